// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/flat_hash_map.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/device_work.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/gradients/attached.h"
#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// How many steps some parameters of one device have taken. Only the device knows, since only the
/// device knows which steps were skipped; the host knows bounds, which are equal as long as no step
/// could be skipped.
struct StepCounter final : ReplayedState {
  [[gnu::cold]] StepCounter(at::Device device, int64_t steps)
      : numbers(at::full({2}, static_cast<float>(steps), at::device(device).dtype(at::kFloat))),
        value(numbers.select(0, 0)),
        at_least(steps),
        at_most(steps) {
    numbers.select(0, 1).fill_(steps == 0 ? 1. : 0.);
  }

  bool known() const { return at_least == at_most; }

  /// The same count, for parameters on `device` whose steps are counted apart from here on.
  StepCounter copy_to(at::Device device) const {
    StepCounter copy(*this);
    copy.numbers = numbers.to(device, numbers.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    copy.value = copy.numbers.select(0, 0);
    copy.mirror = {};
    copy.asked = false;
    return copy;
  }

  /// Whether only the device knows if a step was made at all.
  bool may_be_first() const { return at_least == 0 && at_most > 0; }

  /// Takes what the host has learned of that, or can at once.
  void learn() {
    if (!may_be_first()) return;
    float steps = 0.F;
    if (value.is_cpu()) {
      steps = *value.const_data_ptr<float>();
    } else if (asked && mirror[0] != not_here_yet) {
      steps = mirror[0];
      asked = false;
    }
    if (steps > 0.F) at_least = 1;
  }

  // What was captured while a first step could be still to come holds until it has: then there is
  // less to do.
  void settle() override {
    if (may_be_first() && value.item<float>() > 0.F) at_least = 1;
  }
  bool holds() override {
    learn();
    return may_be_first();
  }
  void note_replay() override {}
  bool wants_look() const override { return may_be_first() && !asked; }
  /// Has the host learn, some time later, whether there was one. Waits for nobody.
  void look() override {
    if (!wants_look()) return;
    mirror.send(value, not_here_yet);
    asked = true;
  }

  at::Tensor numbers;  ///< the count, and 1 as long as it is 0, where someone keeps that
  at::Tensor value;    ///< the count, 0-dim fp32
  int64_t at_least, at_most;

  bool gated = false;   ///< gates are asked for
  at::Tensor gates{};   ///< see Note [First steps of SGD]
  HostMirror mirror{};  ///< of the count
  bool asked = false;   ///< and it is under way

 private:
  static constexpr float not_here_yet = -1.F;
};

using StepCounters = std::vector<std::shared_ptr<StepCounter>>;

/// Which parameter's steps are counted where. Parameters that were always stepped together share a
/// counter. Once only some of them have gradients, these get a copy of it.
class CounterTable {
 public:
  void clear() { counters_.clear(); }
  void erase(void* param) { counters_.erase(param); }

  /// Null if the parameter's steps are not counted.
  std::shared_ptr<StepCounter> find(void* param) const {
    const auto counter = counters_.find(param);
    return counter == counters_.end() ? nullptr : counter->second;
  }

  /// Gives each of `stepped` a counter on its device that no other parameter shares, and returns
  /// these counters. Those that were counted by one still are. One that is new starts from
  /// `steps_so_far(param)`.
  template <class StepsSoFar>
  [[gnu::cold]] StepCounters assign(const std::vector<at::Tensor>& stepped,
                                    const StepsSoFar& steps_so_far) {
    struct Key {
      std::shared_ptr<StepCounter> counter;
      int64_t steps;
      at::Device device;
      bool operator==(const Key&) const = default;
    };
    struct Share : Key {
      std::size_t steppers = 0;
      std::shared_ptr<StepCounter> now{};
    };
    std::vector<Share> made, shares;
    for (const at::Tensor& param : stepped) {
      const at::Device device = param.device();
      auto& counter = counters_[param.unsafeGetTensorImpl()];
      if (!counter) {
        const int64_t steps = steps_so_far(param);
        auto& now = group_of(made, Key{nullptr, steps, device}).now;
        if (!now) now = std::make_shared<StepCounter>(device, steps);
        counter = now;
      }
      ++group_of(shares, Key{counter, 0, device}).steppers;
    }
    StepCounters distinct;
    for (Share& share : shares) {  // one that nobody else has stays: graphs may use its memory
      std::size_t users = 0;
      for (const auto& [param, counter] : counters_) users += counter == share.counter ? 1 : 0;
      const bool stays = share.counter->value.device() == share.device && share.steppers == users;
      share.now = stays ? share.counter
                        : std::make_shared<StepCounter>(share.counter->copy_to(share.device));
      distinct.push_back(share.now);
    }
    for (const at::Tensor& param : stepped) {
      auto& counter = counters_[param.unsafeGetTensorImpl()];
      counter = group_of(shares, Key{counter, 0, param.device()}).now;
    }
    return distinct;
  }

  /// Calls f(parameter, count) for each. Reads the device for each counter that the host does not
  /// know.
  template <class F>
  void read(const F& f) const {
    for (const auto& [param, counter] : counters_) {
      if (!counter->known()) {
        counter->at_least = counter->at_most = counter->value.template item<int64_t>();
      }
      f(param, counter->at_most);
    }
  }

 private:
  ska::flat_hash_map<void*, std::shared_ptr<StepCounter>> counters_;
};

/// Whether the device of `tensor` has ATen's fused kernel `op`, "aten::_fused_sgd_", and it does
/// what is said of those in optim.h.
inline bool has_fused_kernel(const char* op, const at::Tensor& tensor) {
  if (!facts_of(tensor.device().type()).fused) return false;
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(
      c10::highestPriorityBackendTypeId(tensor.key_set()));
}

/// What a step needs on one device beside lists of tensors: the scale, the overflow flag, constants
/// (an op with a number of the host costs several times one with a tensor), and the step counters.
class StepScalars {
 public:
  explicit StepScalars(at::Device device)
      : device_(device),
        zero_(number(0.F)),
        one_(number(1.F)),
        flag_(number(0.F)),
        counts_by_sgd_(has_fused_kernel("aten::_fused_sgd_", one_)) {}

  at::Device device() const { return device_; }
  const at::Tensor& one() const { return one_; }

  /// On this device, as the fused kernels take them.
  const std::optional<at::Tensor>& grad_scale() const { return grad_scale_; }
  const std::optional<at::Tensor>& found_inf() const { return found_inf_; }

  /// A copy without the scale, for gradients that have been divided.
  StepScalars without_scale() const {
    StepScalars unscaled = *this;
    unscaled.grad_scale_.reset();
    return unscaled;
  }

  /// `first_only`: all that matters is whether a step is the first.
  void add_counter(std::shared_ptr<StepCounter> counter, bool first_only) {
    if (first_only && counts_by_sgd_) {
      if (!minus_noted_.defined()) minus_noted_ = at::arange(-1, 1, one_.options());
      firsts_.push_back(std::move(counter));
      return;
    }
    values_.push_back(counter->value);
    ones_.push_back(one_);
    counters_.push_back(std::move(counter));
  }

  /// Takes the scale and the flag to this device, and all memory that counting takes. `is_exact`:
  /// the flag is 0 or 1.
  void prepare(const at::Tensor& grad_scale, const at::Tensor& found_inf, bool is_exact) {
    grad_scale_.reset();
    found_inf_.reset();
    if (grad_scale.defined()) grad_scale_ = to_device_async(device_, grad_scale);
    if (found_inf.defined()) {
      found_inf_ = to_device_async(device_, found_inf);
      // The kernels skip where the flag is exactly 1. A sum over devices or processes may be more.
      if (!is_exact) found_inf_ = at::ne_out(flag_, *found_inf_, zero_);
    }
    if (found_inf_ && !values_.empty() && !counts_by_sgd_) taken_ = at::rsub(*found_inf_, 1.);
    for (const auto& counter : firsts_) make_gates(*counter);
  }

  /// Counts the step, unless it is skipped: the kernels want to find it counted.
  void begin() {
    if (values_.empty()) return;
    if (!found_inf_) {
      at::_foreach_add_(values_, one_);
    } else if (!counts_by_sgd_) {
      at::_foreach_add_(values_, taken_);
    } else {  // SGD's kernel adds numbers to numbers, or does not, in one launch
      at::_fused_sgd_(values_, ones_, {}, /*weight_decay=*/0., /*momentum=*/0., /*lr=*/1.,
                      /*dampening=*/0., /*nesterov=*/false, /*maximize=*/true,
                      /*is_first_step=*/false, /*grad_scale=*/{}, found_inf_);
    }
  }

  void end() {
    note_first_steps();
    for (const auto* const counters : {&counters_, &firsts_}) {
      for (const auto& counter : *counters) {
        if (!found_inf_) ++counter->at_least;
        ++counter->at_most;
      }
    }
    for (const auto& counter : firsts_) follow_up(counter);
    grad_scale_.reset();
    found_inf_.reset();
    taken_ = at::Tensor();
  }

  /// Counts, on the host, a replayed step, which may have been skipped.
  void note_step() {
    for (const auto& counter : counters_) ++counter->at_most;
    for (const auto& counter : firsts_) ++counter->at_most;
  }

 private:
  at::Tensor number(float value) const {
    return at::full({}, value, at::device(device_).dtype(at::kFloat));
  }

  void make_gates(StepCounter& counter) const {
    counter.learn();
    if (!counter.gated || !counter.may_be_first()) return;
    counter.gates = found_inf_ ? at::maximum(counter.numbers, *found_inf_) : counter.numbers;
  }

  /// Has the device note a first step, unless it was skipped: with a rate and a weight decay of 1,
  /// SGD's kernel makes of numbers their negative gradients.
  void note_first_steps() const {
    std::vector<at::Tensor> numbers;
    for (const auto& counter : firsts_) {
      if (counter->at_least == 0) numbers.push_back(counter->numbers);
    }
    if (numbers.empty()) return;
    const std::vector<at::Tensor> gradients(numbers.size(), minus_noted_);
    at::_fused_sgd_(numbers, gradients, {}, /*weight_decay=*/1., /*momentum=*/0., /*lr=*/1.,
                    /*dampening=*/0., /*nesterov=*/false, /*maximize=*/false,
                    /*is_first_step=*/false, /*grad_scale=*/{}, found_inf_);
  }

  static void follow_up(const std::shared_ptr<StepCounter>& counter) {
    counter->gates = at::Tensor();
    if (!counter->may_be_first()) return;
    if (GraphBody* const body = GraphBody::current()) {
      body->states.push_back(counter);
    } else {
      counter->look();
    }
  }

  at::Device device_;
  at::Tensor zero_, one_, flag_;
  at::Tensor taken_;        // 1, or 0 if the step is skipped
  at::Tensor minus_noted_;  // -1 and 0: of a counter's numbers after a step, times -1
  bool counts_by_sgd_;
  std::optional<at::Tensor> grad_scale_, found_inf_;
  StepCounters counters_, firsts_;
  std::vector<at::Tensor> values_, ones_;  // one for each of counters_
};

struct StepBuffers;

/// What parameters have in common that one call steps.
struct StepKey : TensorKind {
  std::size_t group;
  std::shared_ptr<StepCounter> counter;  ///< for kernels that want one count for all parameters
  const StepMethod* method = nullptr;    ///< of weights that carry one
  bool operator==(const StepKey&) const = default;
};

/// The parameters that one call of a fused kernel steps: those of one group, device and dtype that
/// have a gradient. Kept from step to step; the gradients are not.
struct StepList : StepKey {
  std::size_t scalars = 0;  ///< the index of the device's StepScalars
  bool by_foreach = false;  ///< the device lacks Kernel::op
  std::vector<at::Tensor> params{}, grads{};
  std::vector<at::Tensor> counters{};            ///< one for each parameter, shared or not
  std::vector<std::vector<at::Tensor>> state{};  ///< by kind of state, then by parameter
  std::vector<at::Tensor> beside{};              ///< the weights, for `method`

  /// The learning rate where a captured step reads it (0-dim fp32), and what was last written
  /// there; undefined where steps are not captured.
  at::Tensor rate{};
  double written_rate = 0.;

  /// The list without its parameters.
  StepList emptied() const {
    StepList list{static_cast<const StepKey&>(*this)};
    list.scalars = scalars;
    list.by_foreach = by_foreach;
    list.rate = rate;
    list.written_rate = written_rate;
    list.state.resize(state.size());
    return list;
  }

  /// Adds what `of` makes of the tensors of the i-th parameter of `from`.
  template <class F>
  void add(const StepList& from, std::size_t i, const F& of) {
    params.push_back(of(from.params[i]));
    add_beside_param(from, i, of);
  }

  /// Adds what `of` makes of the tensors beside the i-th parameter: gradient, counter, state.
  template <class F>
  void add_beside_param(const StepList& from, std::size_t i, const F& of) {
    grads.push_back(of(from.grads[i]));
    if (!from.counters.empty()) counters.push_back(from.counters[i]);
    for (std::size_t k = 0; k < state.size(); ++k) state[k].push_back(of(from.state[k][i]));
  }
};

/// What distinguishes one fused optimizer from another:
///
///     LibTorch           the class of its counterpart there, whose constructor checks the options
///                        and which reads and writes archives
///     Options, State     the types that go with that
///     name               for error texts
///     apart              whether a call needs parameters with one common count of steps
///     kinds(options)     how many kinds of state tensors a parameter has
///     tensor(state, k)   the one of kind k; that of kind 0 always, if undefined
///     initial(k, …)      what it starts as
///     counted(options)   whether steps are counted on the device
///     steps, set_steps   the count as LibTorch's state holds it, for parameters that are counted
///     step(options, …)   the step of all parameters of a list
///     counts_first_only  if there and true, all that step() asks of list.counter is
///     may_be_first(),
///                        gates and whether at_least and at_most are 0
///     asks_counter(options)
///                        if there, whether step() asks list.counter at all; or else it may
///     op                 if there, the op of ATen's that step() calls; where the device lacks it,
///                        list.by_foreach is true, and all parameters of a list have one count.
///                        step() may then be called with parts of parameters
///
/// step() divides the gradients by scalars.grad_scale(), if it is there, and changes nothing where
/// scalars.found_inf() is there and 1. The counters count the step already. It never reads the
/// device. list.rate, where defined, takes the place of the options' learning rate. ATen's fused
/// ops do all that; a kernel that ATen lacks is made from at::_foreach_ ops.
template <class K>
concept OptimizerKernel = std::derived_from<typename K::LibTorch, torch::optim::Optimizer> &&
    requires(const typename K::Options& options, typename K::State& state, const StepList& list,
             const StepScalars& scalars, const at::Tensor& param) {
  { K::name } -> std::convertible_to<const char*>;
  { K::apart } -> std::convertible_to<bool>;
  { K::kinds(options) } -> std::same_as<std::size_t>;
  { K::tensor(state, std::size_t{}) } -> std::same_as<at::Tensor&>;
  { K::initial(std::size_t{}, param, options) } -> std::same_as<at::Tensor>;
  { K::counted(options) } -> std::same_as<bool>;
  { K::steps(state) } -> std::same_as<int64_t>;
  K::set_steps(state, int64_t{});
  K::step(options, list, scalars);
};

/// Whether a step of `Kernel` does to a part of a parameter what it would do to it in the whole.
template <class Kernel>
inline constexpr bool may_step_parts = requires {
  Kernel::op;
};

/// Kernel::step with the options of a group, for what is the same for all kernels.
struct KernelStep {
  c10::function_ref<void(const StepList&, const StepScalars&)> step;
  bool takes_parts;  ///< whether it does to a part of a parameter what it would do to the whole
  void operator()(const StepList& list, const StepScalars& scalars) const { step(list, scalars); }
};

/// How fused optimizers step weights that are not stepped as they are; see Note [Weights that carry
/// something]. Weights with one method are in lists of their own.
class StepMethod {
 public:
  StepMethod() = default;
  StepMethod(const StepMethod&) = delete;
  StepMethod& operator=(const StepMethod&) = delete;

  /// Throws where `weight` cannot be stepped with `gradient`.
  virtual void check(const at::Tensor& weight, const at::Tensor& gradient,
                     ErrorPlace where) const = 0;
  /// What a list keeps beside the weight.
  virtual at::Tensor beside(const at::Tensor& weight) const = 0;
  /// Whether check() would pass, and `beside` still is what is beside the weight.
  virtual bool holds(const at::Tensor& weight, const at::Tensor& gradient,
                     const at::Tensor& beside) const = 0;
  /// What the weight stands for, of its layout: a state starts from it.
  virtual at::Tensor master(const at::Tensor& weight) const = 0;

  /// What step() wants of `buffers`. `drops`: the gradients are dropped after the step.
  virtual void want(StepBuffers& buffers, const StepList& list, const StepScalars& scalars,
                    bool takes_parts, bool drops) const = 0;
  virtual void step(const KernelStep& kernel, const StepList& list, const StepScalars& scalars,
                    bool drops, StepBuffers& buffers) const = 0;
  /// After step(), with the weight's new version.
  virtual void note_stepped(const at::Tensor& weight) const = 0;

 protected:
  ~StepMethod() = default;
};

// ---- The kernels --------------------------------------------------------------------------------

// Note [Steps without a fused kernel]
// Where a device has no fused kernel that heeds the scale and the flag, the step consists of
// _foreach_ ops, which take the lists in one go, too, and reads nothing either. Gradients are
// copied into one piece, divided, and zeroed if the step is skipped, so that all that follows is
// finite; what is added to parameters and states is then multiplied by 0. 16-bit numbers are
// stepped in fp32 copies. For one list that takes some 30 launches instead of one, 15 to 20 of
// which go over all parameters, and memory for two or three copies of the gradients meanwhile.

/// The lists of one step as `_foreach_` ops are to take them, and 0-dim tensors to scale them by.
class ForeachStep {
 public:
  std::vector<at::Tensor> params, grads;       ///< with at least the precision of fp32
  std::vector<std::vector<at::Tensor>> state;  ///< by kind
  at::Tensor taken;  ///< 1, or 0 if the step is skipped; as all numbers here, fp64 if those are

  ForeachStep(const StepList& list, const StepScalars& scalars)
      : params(list.params), state(list.state), list_(list) {
    if (is_16_bit(list.dtype)) {
      widen(params);
      for (auto& tensors : state) widen(tensors);
    }
    taken = scalars.found_inf() ? at::rsub(*scalars.found_inf(), 1.) : scalars.one();
    if (list.dtype == at::kDouble) taken = taken.to(at::kDouble);
    take_gradients(scalars);
  }

  /// 1 if the step is skipped: keeps denominators from being 0 then.
  at::Tensor skipped() const { return at::rsub(taken, 1.); }

  /// How often the parameters have been stepped, this step included unless it is skipped.
  at::Tensor count() const { return list_.counter->value.to(taken.scalar_type()); }

  /// The learning rate, or 0 if the step is skipped.
  at::Tensor rate_if_taken(double rate) const {
    return list_.rate.defined() ? taken.mul(list_.rate) : taken.mul(rate);
  }

  /// Adds `weight` times the parameters to the gradients.
  void decay(double weight) {
    if (weight != 0.) at::_foreach_add_(grads, params, weight);
  }

  /// Moves each of `tensors` towards its target, `weight` of the way; changes the targets.
  static void move(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& targets,
                   const at::Tensor& weight) {
    at::_foreach_add_(targets, tensors, -1.);
    at::_foreach_mul_(targets, weight);
    at::_foreach_add_(tensors, targets);
  }

  /// Subtracts `rate` times `direction`, which it changes, from the parameters.
  void descend(const std::vector<at::Tensor>& direction, const at::Tensor& rate) {
    at::_foreach_mul_(direction, rate);
    at::_foreach_add_(params, direction, -1.);
  }

  /// Gives the optimizer what has become of its parameters and states.
  void store() const { store(list_, params, state); }
  static void store(const StepList& list, const std::vector<at::Tensor>& params,
                    const std::vector<std::vector<at::Tensor>>& state) {
    if (!is_16_bit(list.dtype)) return;
    at::_foreach_copy_(list.params, params);
    for (std::size_t k = 0; k < state.size(); ++k) at::_foreach_copy_(list.state[k], state[k]);
  }

  /// Puts fp32 copies in the place of these tensors.
  static void widen(std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> wide;
    wide.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      wide.push_back(at::empty_like(tensor, tensor.options().dtype(at::kFloat)));
    }
    at::_foreach_copy_(wide, tensors);
    tensors = std::move(wide);
  }

 private:
  void take_gradients(const StepScalars& scalars) {
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& grad : list_.grads) pieces.push_back(in_memory_order(grad));
    at::Tensor all = at::cat(pieces);
    all = all.to(taken.scalar_type());
    if (scalars.grad_scale()) all.div_(*scalars.grad_scale());
    if (scalars.found_inf()) all.masked_fill_(scalars.found_inf()->to(at::kBool), 0.);
    int64_t offset = 0;
    for (const at::Tensor& grad : list_.grads) {
      grads.push_back(all.as_strided(grad.sizes(), grad.strides(), offset));
      offset += grad.numel();
    }
  }

  const StepList& list_;
};

/// Adam's step of `_foreach_` ops; AdamW's if `decays_params`.
template <class Options>
void adam_by_foreach(const Options& o, const StepList& list, const StepScalars& scalars,
                     bool decays_params) {
  ForeachStep step(list, scalars);
  const auto [beta1, beta2] = o.betas();
  const at::Tensor rate = step.rate_if_taken(o.lr()), skipped = step.skipped();
  const at::Tensor count = step.count();
  const auto correction = [&](double beta) {
    return at::rsub(at::pow(beta, count), 1.).add_(skipped);
  };
  if (!decays_params) {
    step.decay(o.weight_decay());
  } else if (o.weight_decay() != 0.) {
    at::_foreach_mul_(step.params, at::rsub(rate, 1., o.weight_decay()));
  }
  std::vector<at::Tensor> squares = at::_foreach_mul(step.grads, step.grads);
  step.move(step.state[0], step.grads, step.taken.mul(1. - beta1));
  step.move(step.state[1], squares, step.taken.mul(1. - beta2));
  if (o.amsgrad()) {
    squares = at::_foreach_maximum(step.state[1], step.state[2]);
    step.move(step.state[2], squares, step.taken);
  }
  std::vector<at::Tensor> denominators = at::_foreach_sqrt(step.state[o.amsgrad() ? 2 : 1]);
  at::_foreach_div_(denominators, correction(beta2).sqrt_());
  at::_foreach_add_(denominators, skipped.add(o.eps()));
  std::vector<at::Tensor> direction = at::_foreach_div(step.state[0], denominators);
  step.descend(direction, rate.div(correction(beta1)));
  step.store();
}

template <class LibTorch_, class Options_, class State_, auto kernel, auto kernel_of_rate_on_device>
struct AdamKernelBase {
  using LibTorch = LibTorch_;
  using Options = Options_;
  using State = State_;
  static constexpr bool apart = false;

  static std::size_t kinds(const Options& o) { return o.amsgrad() ? 3 : 2; }
  static at::Tensor& tensor(State& s, std::size_t kind) {
    return kind == 0 ? s.exp_avg() : kind == 1 ? s.exp_avg_sq() : s.max_exp_avg_sq();
  }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options&) {
    return at::zeros_like(param);
  }
  static bool counted(const Options&) { return true; }
  static int64_t steps(const State& s) { return s.step(); }
  static void set_steps(State& s, int64_t steps) { s.step(steps); }

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    constexpr bool decays_params = std::is_same_v<Options, torch::optim::AdamWOptions>;
    if (list.by_foreach) return adam_by_foreach(o, list, scalars, decays_params);
    const auto with = [&](auto chosen, const auto& rate) {
      const auto [beta1, beta2] = o.betas();
      chosen(list.params, list.grads, list.state[0], list.state[1],
             o.amsgrad() ? at::TensorList(list.state[2]) : at::TensorList(), list.counters, rate,
             beta1, beta2, o.weight_decay(), o.eps(), o.amsgrad(), /*maximize=*/false,
             scalars.grad_scale(), scalars.found_inf());
    };
    list.rate.defined() ? with(kernel_of_rate_on_device, list.rate) : with(kernel, o.lr());
  }
};

struct AdamKernel
    : AdamKernelBase<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState,
                     &at::_ops::_fused_adam_::call, &at::_ops::_fused_adam__tensor_lr::call> {
  static constexpr const char* name = "FusedAdam";
  static constexpr const char* op = "aten::_fused_adam_";
};

struct AdamWKernel
    : AdamKernelBase<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState,
                     &at::_ops::_fused_adamw_::call, &at::_ops::_fused_adamw__tensor_lr::call> {
  static constexpr const char* name = "FusedAdamW";
  static constexpr const char* op = "aten::_fused_adamw_";
};

// Note [First steps of SGD]
// A momentum buffer starts as the first gradient that is stepped with, undampened. ATen's kernel
// does so when it is told is_first_step, and then skips or not like any other step, so that a host
// that does not read never learns whether the buffer was filled (PyTorch's own optimizer takes it
// for granted and goes on with uninitialised memory). Here buffers start as zeros, and the device
// keeps two numbers, whether there was a step and whether there was none. Each step has them copied
// to the host until it has learned that there was a step; nothing waits for the copy. Without
// dampening, a later step makes of zeros what the first step makes of anything: the numbers matter
// only if dampening is set later. With dampening, while the host does not know, the kernel is
// called twice, as for the first step and as for a later one, and each call is skipped where its
// gate is 1: the larger of one of these numbers and the flag.
struct SgdKernel {
  using LibTorch = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr const char* name = "FusedSGD";
  static constexpr const char* op = "aten::_fused_sgd_";
  static constexpr bool apart = true;
  static constexpr bool counts_first_only = true;

  static std::size_t kinds(const Options& o) { return o.momentum() == 0 ? 0 : 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.momentum_buffer(); }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options&) {
    return at::zeros_like(param);
  }
  static bool counted(const Options& o) { return o.momentum() != 0; }
  static bool asks_counter(const Options& o) { return counted(o) && o.dampening() != 0; }
  static int64_t steps(const State& s) { return s.momentum_buffer().defined() ? 1 : 0; }
  static void set_steps(State&, int64_t) {}

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.by_foreach) return step_by_foreach(o, list, scalars);
    const auto& found_inf = scalars.found_inf();
    if (!asks_counter(o) || list.counter->at_least > 0) {
      call(o, list, /*first=*/false, scalars.grad_scale(), found_inf);
    } else if (list.counter->at_most == 0) {
      call(o, list, /*first=*/true, scalars.grad_scale(), found_inf);
    } else {
      const at::Tensor& gates = list.counter->gates;
      call(o, list, /*first=*/true, scalars.grad_scale(), gates.select(0, 0));
      call(o, list, /*first=*/false, scalars.grad_scale(), gates.select(0, 1));
    }
  }

 private:
  static void step_by_foreach(const Options& o, const StepList& list, const StepScalars& scalars) {
    ForeachStep step(list, scalars);
    step.decay(o.weight_decay());
    const at::Tensor rate = step.rate_if_taken(o.lr());
    if (o.momentum() != 0.) {
      const std::vector<at::Tensor>& buffers = step.state[0];
      at::Tensor weight = step.taken;  // of the gradient in the buffer
      if (asks_counter(o))
        weight =
            at::rsub(step.count().ne(1.).to(weight.scalar_type()), 1., o.dampening()).mul_(weight);
      const std::vector<at::Tensor> parts = at::_foreach_mul(step.grads, weight);
      at::_foreach_mul_(buffers, step.taken.mul(o.momentum() - 1.).add_(1.));
      at::_foreach_add_(buffers, parts);
      if (o.nesterov()) {
        at::_foreach_add_(step.grads, buffers, o.momentum());
      } else {
        at::_foreach_copy_(step.grads, buffers);
      }
    }
    step.descend(step.grads, rate);
    step.store();
  }

  // Found in 2.11: the CPU's kernel computes 16-bit parameters by vectors and stores only the rest.
  static constexpr bool cpu_loses_16_bit_steps = TORCHAMP_LIBTORCH < 215;

  static void call(const Options& o, const StepList& list, bool first,
                   const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf) {
    if (!cpu_loses_16_bit_steps || !list.device.is_cpu() || !is_16_bit(list.dtype)) {
      return call_kernel(o, list, first, grad_scale, found_inf);
    }
    StepList wide = list;
    ForeachStep::widen(wide.params);
    ForeachStep::widen(wide.grads);
    for (auto& tensors : wide.state) ForeachStep::widen(tensors);
    call_kernel(o, wide, first, grad_scale, found_inf);
    ForeachStep::store(list, wide.params, wide.state);
  }

  static void call_kernel(const Options& o, const StepList& list, bool first,
                          const std::optional<at::Tensor>& grad_scale,
                          const std::optional<at::Tensor>& found_inf) {
    const auto with = [&](const auto& rate) {
      at::_fused_sgd_(list.params, list.grads,
                      o.momentum() == 0 ? at::TensorList() : at::TensorList(list.state[0]),
                      o.weight_decay(), o.momentum(), rate, o.dampening(), o.nesterov(),
                      /*maximize=*/false, first, grad_scale, found_inf);
    };
    list.rate.defined() ? with(list.rate) : with(o.lr());
  }
};

struct AdagradKernel {
  using LibTorch = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr const char* name = "FusedAdagrad";
  static constexpr const char* op = "aten::_fused_adagrad_";
  static constexpr bool kernel_takes_rate_on_device = TORCHAMP_LIBTORCH >= 208;
  static constexpr bool apart = !kernel_takes_rate_on_device;  // the `_foreach_` ops want it

  static std::size_t kinds(const Options&) { return 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.sum(); }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options& defaults) {
    return at::full_like(param, defaults.initial_accumulator_value());
  }
  static bool counted(const Options&) { return true; }
  static int64_t steps(const State& s) { return s.step(); }
  static void set_steps(State& s, int64_t steps) { s.step(steps); }
  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.by_foreach || (list.rate.defined() && !kernel_takes_rate_on_device)) {
      return step_by_foreach(o, list, scalars);
    }
    const auto with = [&](const auto& rate) {
      at::_fused_adagrad_(list.params, list.grads, list.state[0], list.counters, rate, o.lr_decay(),
                          o.weight_decay(), o.eps(), /*maximize=*/false, scalars.grad_scale(),
                          scalars.found_inf());
    };
#if TORCHAMP_LIBTORCH >= 208
    if (list.rate.defined()) return with(list.rate);
#endif
    with(o.lr());
  }

 private:
  static void step_by_foreach(const Options& o, const StepList& list, const StepScalars& scalars) {
    ForeachStep step(list, scalars);
    step.decay(o.weight_decay());
    const std::vector<at::Tensor> squares = at::_foreach_mul(step.grads, step.grads);
    at::_foreach_mul_(squares, step.taken);
    at::_foreach_add_(step.state[0], squares);
    const std::vector<at::Tensor> denominators = at::_foreach_sqrt(step.state[0]);
    at::_foreach_add_(denominators, step.skipped().add_(o.eps()));
    const at::Tensor slowdown = step.count().sub(1.).clamp_min_(0.).mul_(o.lr_decay());
    at::_foreach_div_(step.grads, denominators);
    step.descend(step.grads, step.rate_if_taken(o.lr()).div_(slowdown.add_(1.)));
    step.store();
  }
};

}  // namespace torchamp::detail
