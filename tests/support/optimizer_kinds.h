// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/optim.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <ostream>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/ema_sgd.h"
#include "support/tolerances.h"

using at::Tensor;
using torch::optim::AdagradOptions;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;
using Groups = std::vector<OptimizerParamGroup>;
using Params = std::vector<Tensor>;
using Betas = std::tuple<double, double>;

// ---- Kinds of optimizers ------------------------------------------------------------------------

/// An optimizer with some options.
struct Kind {
  std::string name;
  /// `plain` is LibTorch's own optimizer, or a PlainOptimizer if LibTorch lacks it.
  std::function<std::unique_ptr<Optimizer>(const Groups&)> plain, fused;
  std::function<std::unique_ptr<Optimizer>(const Params&)> fused_of_parameters;
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>()> other_options;

  std::string optimizer;         ///< "FusedAdam"
  std::string op;                ///< ATen's kernel, "_fused_adam_"; empty if ATen lacks it
  bool is_in_libtorch = false;   ///< whether `plain` is LibTorch's own
  bool is_elementwise = false;   ///< whether it can step shards
  bool has_state = false;        ///< whether it stores tensors for a parameter
  bool counts_steps = false;     ///< whether each step is counted on the device
  bool counts_to_first = false;  ///< whether steps are counted until the first was taken
  int most_calls = 4;            ///< of ops, in a step of a list by ATen's kernel
  /// If LibTorch lacks the optimizer: options that are errors, and the texts of the errors.
  std::vector<std::pair<std::shared_ptr<torch::optim::OptimizerOptions>, std::string>> refused{};
};

inline std::ostream& operator<<(std::ostream& out, const Kind& kind) {
  return out << kind.name;
}

template <class Fused>
struct KernelOf;
template <class Kernel>
struct KernelOf<torchamp::FusedOptimizerOf<Kernel>> : Kernel {};

/// Base of an optimizer that LibTorch lacks, which steps parameter by parameter with plain ops.
template <class Fused>
class PlainOptimizer : public KernelOf<Fused>::LibTorch {
  using Stored = typename KernelOf<Fused>::LibTorch;

 public:
  using Options = typename Fused::Options;
  using State = typename Fused::State;
  using Stored::Stored;

  Tensor step(Optimizer::LossClosure closure = nullptr) override {
    Tensor loss;
    if (closure) {
      const at::AutoGradMode with_gradients(true);
      loss = closure();
    }
    const torch::NoGradGuard no_grad;
    for (OptimizerParamGroup& group : this->param_groups()) {
      for (const Tensor& p : group.params()) {
        if (!p.grad().defined()) continue;
        auto& state = this->state()[p.unsafeGetTensorImpl()];
        if (!state) state = std::make_unique<State>();
        step_parameter(static_cast<const Options&>(group.options()), static_cast<State&>(*state), p,
                       p.grad());
      }
    }
    return loss;
  }

 private:
  /// The tensors of a new state are undefined.
  virtual void step_parameter(const Options& o, State& state, const Tensor& p,
                              const Tensor& gradient) const = 0;
};

template <class Plain, class Fused, class Options>
Kind kind(std::string name, const Options& options, const Options& other) {
  using Kernel = KernelOf<Fused>;
  const std::string op = Kernel::op ? Kernel::op : "";
  const bool counted = Kernel::counted(options);
  return {.name = std::move(name),
          .plain = [=](const Groups& groups) { return std::make_unique<Plain>(groups, options); },
          .fused = [=](const Groups& groups) { return std::make_unique<Fused>(groups, options); },
          .fused_of_parameters =
              [=](const Params& params) { return std::make_unique<Fused>(params, options); },
          .other_options = [=] { return std::make_unique<Options>(other); },
          .optimizer = Kernel::name,
          .op = op.substr(op.rfind(':') + 1),
          .is_in_libtorch = std::is_same_v<Plain, typename Kernel::LibTorch>,
          .is_elementwise = Kernel::elementwise,
          .has_state = Kernel::kinds(options) > 0,
          .counts_steps = counted && !Kernel::counts_first_only,
          .counts_to_first = counted && Kernel::counts_first_only};
}

inline Kind adam(const std::string& name, const AdamOptions& options) {
  return kind<torch::optim::Adam, torchamp::FusedAdam>(
      name, options, AdamOptions(0.03).betas(Betas(0.5, 0.6)).eps(0.1).amsgrad(options.amsgrad()));
}
inline Kind adamw(const std::string& name, const AdamWOptions& options) {
  return kind<torch::optim::AdamW, torchamp::FusedAdamW>(
      name, options,
      AdamWOptions(0.03).betas(Betas(0.5, 0.6)).weight_decay(0.5).amsgrad(options.amsgrad()));
}
inline Kind sgd(const std::string& name, const SGDOptions& options) {
  Kind made =
      kind<torch::optim::SGD, torchamp::FusedSGD>(name, options, SGDOptions(0.03).momentum(0.7));
  if (options.dampening() != 0.) made.most_calls = 11;  // the first step is another kernel's
  return made;
}
inline Kind adagrad(const std::string& name, const AdagradOptions& options) {
  return kind<torch::optim::Adagrad, torchamp::FusedAdagrad>(
      name, options,
      AdagradOptions(0.03).lr_decay(0.2).initial_accumulator_value(
          options.initial_accumulator_value()));
}

struct PlainEmaSgd : PlainOptimizer<FusedEmaSgd> {
  using PlainOptimizer::PlainOptimizer;

 private:
  void step_parameter(const Options& o, State& state, const Tensor& p,
                      const Tensor& gradient) const override {
    const Tensor decayed = gradient + o.weight_decay() * p;
    const Tensor before = state.average().defined() ? state.average() : torch::zeros_like(p);
    state.average(o.momentum() * before + (1. - o.momentum()) * decayed);
    p.sub_(o.lr() * state.average());
  }
};
inline Kind ema_sgd(const std::string& name, const EmaSgdOptions& options) {
  Kind made = kind<PlainEmaSgd, FusedEmaSgd>(name, options,
                                             EmaSgdOptions(0.03).momentum(0.7).weight_decay(0.3));
  made.refused = {
      {std::make_shared<EmaSgdOptions>(-1.), "FusedEmaSgd: lr is -1. It must be at least 0."}};
  return made;
}

/// The optimizers that the tests run with. Their names are public: a program that uses them must
/// still compile.
inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      adam("adam", AdamOptions(0.1)),
      adam("adam_decay_amsgrad",
           AdamOptions(0.1).betas(Betas(0.8, 0.9)).eps(1e-3).weight_decay(0.1).amsgrad(true)),
      adamw("adamw", AdamWOptions(0.1).weight_decay(0.2)),
      adamw("adamw_amsgrad", AdamWOptions(0.1).betas(Betas(0.7, 0.9)).amsgrad(true)),
      sgd("sgd", SGDOptions(0.1)),
      sgd("sgd_decay", SGDOptions(0.1).weight_decay(0.1)),
      sgd("sgd_momentum", SGDOptions(0.1).momentum(0.9)),
      sgd("sgd_nesterov", SGDOptions(0.1).momentum(0.9).weight_decay(0.1).nesterov(true)),
      sgd("sgd_dampening", SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.1)),
      adagrad("adagrad", AdagradOptions(0.1)),
      adagrad(
          "adagrad_decay",
          AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.5).eps(
              1e-3)),
      ema_sgd("ema_sgd", EmaSgdOptions(0.1).weight_decay(0.1)),
  };
  return all;
}

/// The first kind of each optimizer that stores something for a parameter.
inline std::vector<Kind> kinds_with_state() {
  std::vector<Kind> found;
  for (const Kind& kind : kinds()) {
    const auto is_same = [&](const Kind& other) { return other.optimizer == kind.optimizer; };
    if (kind.has_state && std::none_of(found.begin(), found.end(), is_same)) found.push_back(kind);
  }
  return found;
}

inline const Kind& kind_named(const std::string& name) {
  for (const Kind& kind : kinds()) {
    if (kind.name == name) return kind;
  }
  TORCH_CHECK(false, "no kind of optimizer is named ", name);
}

// ---- What the tests do to them ------------------------------------------------------------------

inline Tensor param(at::IntArrayRef sizes, at::TensorOptions options = {}) {
  return torch::randn(sizes, options).requires_grad_();
}

inline Params copies(const Params& params) {
  Params all;
  for (const Tensor& p : params) all.push_back(p.detach().clone().requires_grad_());
  return all;
}

inline int64_t dice(int64_t sides) {
  return torch::randint(sides, {1}).item<int64_t>();
}

inline Tensor number(double value, at::Device device) {
  return torch::full({}, value, at::TensorOptions(device).dtype(at::kFloat));
}

inline void expect_close(const Params& actual, const Params& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(i);
    ::expect_close(actual[i], expected[i]);
  }
}

inline torchamp::FusedOptimizer& as_fused(Optimizer& optimizer) {
  return dynamic_cast<torchamp::FusedOptimizer&>(optimizer);
}

/// The same parameters under the plain optimizer and under ours.
struct Pair {
  Pair(const Kind& kind, Params params, bool two_groups = false)
      : plain_params(copies(params)), fused_params(std::move(params)) {
    plain = kind.plain(groups(plain_params, kind, two_groups));
    fused = kind.fused(groups(fused_params, kind, two_groups));
  }

  static Groups groups(const Params& params, const Kind& kind, bool two) {
    if (!two) return {OptimizerParamGroup(params)};
    const auto middle = params.begin() + static_cast<std::ptrdiff_t>(params.size() / 2);
    Groups groups{OptimizerParamGroup(Params(params.begin(), middle))};
    groups.emplace_back(Params(middle, params.end()), kind.other_options());
    return groups;
  }

  /// New random gradients, ours times `scale`; one in `absent` parameters has none.
  void new_gradients(double scale, int64_t absent = 4) const {
    for (std::size_t i = 0; i < plain_params.size(); ++i) {
      plain_params[i].mutable_grad().reset();
      fused_params[i].mutable_grad().reset();
      if (dice(absent) == 0) continue;
      const Tensor gradient = torch::randn_like(plain_params[i]);
      plain_params[i].mutable_grad() = gradient;
      fused_params[i].mutable_grad() = gradient.detach() * scale;
    }
  }

  /// A step that may be skipped and may be scaled.
  void random_step() const {
    const double scale = std::ldexp(1. + 0.25 * static_cast<double>(dice(3)), 8 - dice(8));
    const bool skipped = dice(3) == 0;
    new_gradients(scale);
    if (!skipped) plain->step();
    const at::Device device = fused_params[0].device();
    as_fused(*fused).step_scaled(number(scale, device), number(skipped ? 1. : 0., device));
  }

  void expect_equal() const { expect_close(fused_params, plain_params); }

  Params plain_params, fused_params;
  std::unique_ptr<Optimizer> plain, fused;
};

template <class From, class To>
void through_archive(const From& from, To& to) {
  std::stringstream archive;
  torch::save(from, archive);
  torch::load(to, archive);
}

template <class State>
State& state_of(Optimizer& optimizer, const Tensor& p) {
  return static_cast<State&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
}
