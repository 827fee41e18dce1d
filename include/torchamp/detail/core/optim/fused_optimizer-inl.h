// SPDX-License-Identifier: BSD-3-Clause

// Templates, and functions that compiled.h includes a second time: see .github/CONTRIBUTING.md,
// Compiled once.
#ifndef TORCHAMP_FUSED_OPTIMIZER_TEMPLATES
#define TORCHAMP_FUSED_OPTIMIZER_TEMPLATES

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/separate.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/core/optim/option_names.h"
#include "torchamp/optim.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// The counterpart in LibTorch of an optimizer with `Kernel`, with these groups and no states. It
/// reads and writes archives, and throws for options out of range, so this need not be compiled
/// here.
template <class Kernel>
typename Kernel::LibTorch counterpart(const typename Kernel::Options& options,
                                      const ParamGroups& groups = {}) {
  typename Kernel::LibTorch optimizer(ParamGroups(), options);
  for (const auto& group : groups) {
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>()));
    auto& added = optimizer.param_groups().back();
    // Only now: add_param_group() replaces values that are LibTorch's defaults (an lr of 1e-3, say)
    // by the values of `options`.
    added.set_options(group.options().clone());
    added.params() = group.params();  // which may be no leaves now
  }
  return optimizer;
}

}  // namespace detail

template <detail::OptimizerKernel Kernel>
FusedOptimizerOf<Kernel>::FusedOptimizerOf(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults)
    : FusedOptimizer(groups, std::make_unique<Options>(defaults)) {
  detail::counterpart<Kernel>(defaults);
  for (std::size_t g = 0; g < groups.size(); ++g) check_group(groups[g], g);
  note_weights();
}

template <detail::OptimizerKernel Kernel>
void FusedOptimizerOf<Kernel>::check_group(const torch::optim::OptimizerParamGroup& group,
                                           std::size_t number) const {
  if (group.has_options()) detail::counterpart<Kernel>(detail::options_of<Kernel>(group, number));
  for (std::size_t i = 0; i < group.params().size(); ++i) {
    const std::string why = Kernel::why_not(group.params()[i]);
    TORCHAMP_CHECK_VALUE(why.empty(), Kernel::name, ": ", detail::place_of(number, i), why);
  }
}

template <detail::OptimizerKernel Kernel>
detail::ParamStates& FusedOptimizerOf<Kernel>::state() {
  write_steps();
  // A plan creates the states before the first step. If every step was skipped, a state whose
  // existence means a step, such as SGD's momentum buffer, is removed; a state with a count of 0
  // may stay.
  plan_.read_counts([&](void* param, int64_t steps) {
    const auto state = state_.find(param);
    if (steps > 0 || state == state_.end()) return;
    if (Kernel::steps(static_cast<State&>(*state->second)) > 0) state_.erase(state);
  });
  plan_.drop();
  return state_;
}

template <detail::OptimizerKernel Kernel>
void FusedOptimizerOf<Kernel>::save(torch::serialize::OutputArchive& archive) const {
  write_steps();
  auto saved = detail::counterpart<Kernel>(Options(/*lr=*/0.), param_groups_);
  for (const auto& [param, state] : state_) saved.state()[param] = state->clone();
  plan_.read_counts([&](void* param, int64_t steps) {
    if (steps == 0) saved.state().erase(param);
  });
  saved.save(archive);
}

template <detail::OptimizerKernel Kernel>
void FusedOptimizerOf<Kernel>::load(torch::serialize::InputArchive& archive) {
  auto loaded = detail::counterpart<Kernel>(Options(/*lr=*/0.), param_groups_);
  try {
    // Without it, LibTorch assumes an archive of version 1.4 or older.
    c10::IValue version;
    archive.read("pytorch_version", version);
    detail::check_option_names<Options>(archive);
    loaded.load(archive);
  } catch (const std::exception& error) {
    const auto* const own = dynamic_cast<const c10::Error*>(&error);
    const std::string cause = own ? own->what_without_backtrace() : error.what();
    // The text of LibTorch's assertions requests a bug report, but this is no bug.
    const bool tells = cause.find("INTERNAL ASSERT") == std::string::npos;
    TORCHAMP_CHECK(false, Kernel::name, "::load: the archive does not hold what ", Kernel::name,
                   " or its counterpart in LibTorch saves for such parameter groups",
                   tells ? ": " : ".", tells ? cause : "");
  }
  const detail::ParamGroups& groups = loaded.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) check_group(groups[g], g);
  const auto check = [](auto g, auto i, const at::Tensor& param, const at::Tensor& tensor) {
    const std::string shape = tensor.defined() ? c10::str(tensor.sizes()) : "(none)";
    TORCHAMP_CHECK(tensor.defined() && tensor.sizes() == param.sizes(), Kernel::name,
                   "::load: the archive's state of ", detail::place_of(g, i), " has the shape ",
                   shape, ", the parameter ", param.sizes(),
                   ". Load it into an optimizer of the same parameters.");
  };
  detail::for_each_state<Kernel>(groups, loaded.state(), check);
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    static_cast<Options&>(param_groups_[g].options()) =
        static_cast<const Options&>(groups[g].options());
  }
  state_ = std::move(loaded.state());
  plan_.drop();
}

template <detail::OptimizerKernel Kernel>
std::shared_ptr<torch::optim::Optimizer> FusedOptimizerOf<Kernel>::make_counterpart() const {
  return std::make_shared<typename Kernel::LibTorch>(detail::ParamGroups(),
                                                     static_cast<const Options&>(*defaults_));
}

template <detail::OptimizerKernel Kernel>
void FusedOptimizerOf<Kernel>::for_each_state_tensor(torch::optim::OptimizerParamState& state,
                                                     c10::function_ref<void(at::Tensor&)> f) const {
  std::size_t kinds = 0;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    kinds = std::max(kinds, Kernel::kinds(detail::options_of<Kernel>(param_groups_[g], g)));
  }
  for (std::size_t k = 0; k < kinds; ++k) {
    at::Tensor& tensor = Kernel::tensor(static_cast<State&>(state), k);
    if (tensor.defined()) f(tensor);
  }
}

template <detail::OptimizerKernel Kernel>
bool FusedOptimizerOf<Kernel>::prepare_captured_step() {
  const detail::InternalOps internal;
  rates_on_device_ = true;
  if (!plan_.is_for(param_groups_, state_)) {  // the next step makes a plan, maybe in a capture
    const auto fit = [](auto, auto, const at::Tensor& param, at::Tensor& tensor) {
      if (tensor.defined() && tensor.sizes() == param.sizes()) {
        tensor = detail::fitted(tensor, param);  // a loaded state may be on the host
      }
    };
    detail::for_each_state<Kernel>(param_groups_, state_, fit);
    return stepped_with_.empty();
  }
  plan_.write_rates(param_groups_);
  return stepped_with_.empty() || stepped_with_ == options_but_rates();
}

template <detail::OptimizerKernel Kernel>
void FusedOptimizerOf<Kernel>::step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                                          bool is_exact) {
  const detail::DropWeightCasts drop_weight_casts(*this);
  if (!plan_.collect_gradients(param_groups_, state_)) {
    plan_.make(param_groups_, static_cast<const Options&>(*defaults_), state_);
    const bool holds = plan_.collect_gradients(param_groups_, state_);
    TORCH_INTERNAL_ASSERT(holds);
  }
  if (rates_on_device_) {
    plan_.write_rates(param_groups_);
    outdate_captures_of_other_options();
  }
  plan_.run(param_groups_, grad_scale, found_inf, is_exact);
  // A graph that holds this step runs eagerly again if the plan changes.
  if (auto* const body = detail::GraphBody::current()) {
    body->made_eagerly.push_back(plan_.identity());
  }
}

/// A graph holds all options except the rates as constants. If they have changed since the last
/// step, it must not be replayed: it checks the plan's identity() first.
template <detail::OptimizerKernel Kernel>
void FusedOptimizerOf<Kernel>::outdate_captures_of_other_options() {
  std::vector<Options> options = options_but_rates();
  if (!stepped_with_.empty() && options != stepped_with_) plan_.outdate_captures();
  stepped_with_ = std::move(options);
}

/// The options of each group, with learning rates of 0.
template <detail::OptimizerKernel Kernel>
auto FusedOptimizerOf<Kernel>::options_but_rates() const -> std::vector<Options> {
  std::vector<Options> all(param_groups_.size(), Options(/*lr=*/0.));
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    all[g] = detail::options_of<Kernel>(param_groups_[g], g);
    all[g].lr(0.);
  }
  return all;
}

/// Writes the counts to the states. First the plan drops counts that the program has replaced in a
/// state; at the end it records the written counts as its own.
template <detail::OptimizerKernel Kernel>
void FusedOptimizerOf<Kernel>::write_steps() const {
  plan_.drop_counts(state_);
  plan_.read_counts([&](void* param, int64_t steps) {
    const auto state = state_.find(param);
    if (state != state_.end()) Kernel::set_steps(static_cast<State&>(*state->second), steps);
  });
  plan_.note_states(state_);
}

}  // namespace TORCHAMP_NAMESPACE

#endif  // TORCHAMP_FUSED_OPTIMIZER_TEMPLATES

#if TORCHAMP_BODIES && !defined(TORCHAMP_FUSED_OPTIMIZER_BODIES)
#define TORCHAMP_FUSED_OPTIMIZER_BODIES

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY at::Tensor FusedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  step_and_forget_clip({}, {}, /*is_exact=*/false);
  return loss;
}

TORCHAMP_BODY at::Tensor FusedOptimizer::step_scaled(const at::Tensor& grad_scale,
                                                     const at::Tensor& found_inf) {
  check_scalar(grad_scale, "grad_scale");
  check_scalar(found_inf, "found_inf");
  if (grad_scale.defined()) detail::separate_gradients(*this);  // the kernels write quotients
  step_and_forget_clip({.product = grad_scale}, found_inf, /*is_exact=*/false);
  return {};
}

TORCHAMP_BODY void FusedOptimizer::zero_grad(bool set_to_none) {
  deferred_clip_.forget();
  Optimizer::zero_grad(set_to_none);
  detail::any_parameter(*this, [](const at::Tensor& param) {
    detail::note_gradient_dropped(param);
    return false;
  });
}

TORCHAMP_BODY void FusedOptimizer::divide_next_step(const at::Tensor& divisor) {
  TORCHAMP_CHECK_VALUE(divisor.defined(),
                       "FusedOptimizer::divide_next_step: no divisor was given.");
  check_scalar(divisor, "divisor");
  const detail::InternalOps internal;
  detail::separate_gradients(*this);  // the next step's kernels write quotients
  deferred_clip_.add(*this, {divisor});
}

TORCHAMP_BODY at::Tensor FusedOptimizer::next_step_divisor() const {
  const detail::InternalOps internal;
  return deferred_clip_.pending_for(*this).number;
}

TORCHAMP_BODY at::Tensor FusedOptimizer::take_next_step_divisor() {
  at::Tensor divisor = deferred_clip_.is_pending_for(*this) ? next_step_divisor() : at::Tensor();
  deferred_clip_.forget();
  return divisor;
}

TORCHAMP_BODY void FusedOptimizer::step_with_clip(const detail::StepDivisor& divisor,
                                                  const at::Tensor& found_inf) {
  step_and_forget_clip(divisor, found_inf, /*is_exact=*/true);
}

/// All steps call this: step(), step_scaled(), which a scaler or the program calls, and
/// step_with_clip(), whose divisor may already include the clip. Steps by step_fused(); then drops
/// the deferred clip and, if drop_gradients_after_step() is set, the gradients.
TORCHAMP_BODY void FusedOptimizer::step_and_forget_clip(const detail::StepDivisor& divisor,
                                                        const at::Tensor& found_inf,
                                                        bool is_exact) {
  const detail::InternalOps internal;
  const detail::Divisor clip = deferred_clip_.pending_for_step(*this);
  const bool holds_clip = divisor.clip.defined();
  step_fused(holds_clip ? divisor.product : clip.times(divisor.product), found_inf, is_exact);
  deferred_clip_.forget();
  if (!drops_gradients_) return;
  detail::any_parameter(*this, [](const at::Tensor& param) {
    param.mutable_grad().reset();
    return false;
  });
}

TORCHAMP_BODY void FusedOptimizer::check_scalar(const at::Tensor& tensor, const char* name) {
  if (!tensor.defined()) return;
  TORCHAMP_CHECK_VALUE(tensor.dim() == 0 && tensor.scalar_type() == at::kFloat,
                       "FusedOptimizer: ", name, " is of dtype ",
                       c10::toString(tensor.scalar_type()), " and shape ", tensor.sizes(),
                       ". It must be a 0-dim fp32 tensor.");
}

}  // namespace TORCHAMP_NAMESPACE

#endif
