// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/core/optim/kernels.h"
#include "torchamp/detail/core/optim/plan.h"
#include "torchamp/detail/core/optim/state_tensors.h"
#include "torchamp/muon_options.h"  // IWYU pragma: export
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

/// @file
/// @brief Core. Fused optimizers that never synchronise: Adam, AdamW, SGD, Adagrad, Muon.
///
/// Optimizers over ATen's fused kernels. Each takes the options of LibTorch's own optimizer,
/// computes the same steps (within rounding), stores its state in LibTorch's types, and reads and
/// writes its archives, so it can replace it:
///
///     torchamp::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
///     …
///     scaler.step(optimizer);  // does not synchronise
///
/// A step is one call per group, device and dtype, for any number of parameters. The state is on
/// the parameters' device in their dtype. LibTorch's schedulers, groups with their own options,
/// gradients that appear later, and closures work like with LibTorch's.
///
/// Parameters are fp32, fp64, fp16 or bf16, dense in memory, each in the optimizer once; gradients
/// are dense. Otherwise step() throws and changes nothing.
///
/// On a device without fused kernels that honour the scale and the flag, a step consists of
/// ordinary ops, which do not synchronise either; it costs some 30 launches per list of parameters:
/// see Note [Steps without a fused kernel].

namespace TORCHAMP_NAMESPACE {

/// Base of the fused optimizers: all parameters of a group, device and dtype step together, and the
/// device decides whether to take a step. step() and step_scaled() never synchronise. One
/// thread at a time.
class FusedOptimizer : public torch::optim::Optimizer, public detail::ClippingStep {
 public:
  /// Like torch::optim::Optimizer::step: runs the closure, if any, with gradients enabled, steps,
  /// and returns the closure's value or an undefined tensor.
  TORCHAMP_BODY at::Tensor step(LossClosure closure = nullptr) override;

  /// Like ScaledStep::step_scaled. Your own class overrides step_fused() instead.
  TORCHAMP_BODY at::Tensor step_scaled(const at::Tensor& grad_scale,
                                       const at::Tensor& found_inf) final;

  /// Like torch::optim::Optimizer::zero_grad; also forgets a divisor of divide_next_step.
  void zero_grad(bool set_to_none = true);

  /// From now on each step, taken or skipped, ends by dropping the gradients (set to none, like
  /// zero_grad()). To inspect them, also with an overflow_report(), call unscale_ and do so before
  /// the step. Never synchronises.
  void drop_gradients_after_step(bool drop = true) { drops_gradients_ = drop; }

  /// Whether each step drops its gradients.
  bool drops_gradients_after_step() const { return drops_gradients_; }

  /// Like torch::optim::Optimizer::add_param_group, with the constructor's errors.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    check_group(group, param_groups_.size());
    add_with_options(group);
    note_weights();
  }

  /// Whether a step treats each element of a parameter independently, so that shards of a parameter
  /// can be stepped.
  virtual bool is_elementwise() const { return false; }

  /// For the library's own headers: an optimizer that reads and writes the archives of this one,
  /// with its defaults and without groups; null if there is none.
  virtual std::shared_ptr<torch::optim::Optimizer> make_counterpart() const { return nullptr; }

  /// For the library's own headers: calls `f` with the tensors in a state of this optimizer, of the
  /// parameter's shape, so far as they are defined.
  virtual void for_each_state_tensor(torch::optim::OptimizerParamState& /*state*/,
                                     c10::function_ref<void(at::Tensor&)> /*f*/) const {}

  /// Makes the next step divide the present gradients by `divisor` (0-dim fp32, on any device), on
  /// top of the scale and of earlier divisors; costs one multiplication of two numbers. A divisor
  /// below 1 may make an inf of a finite gradient, which a GradScaler's step does not look for.
  /// clip_grad_norm_ uses it. Until that step neither the gradients nor `divisor` may change: the
  /// step throws if gradients were written to, replaced, added or partly dropped. If all are gone,
  /// the divisor is forgotten if this thread has run a forward pass since (or this class's
  /// zero_grad()); otherwise the step throws; see Note [What was clipped is what is stepped]. Never
  /// synchronises.
  void divide_next_step(const at::Tensor& divisor);

  /// The divisor for the next step; undefined if there is none. An error if it was set for other
  /// gradients than the present ones. Never synchronises.
  at::Tensor next_step_divisor() const;

  /// The same, and removes it; one for other gradients than the present ones is forgotten.
  at::Tensor take_next_step_divisor();

 protected:
  /// `defaults` apply to groups without options. A group keeps options of a type that LibTorch does
  /// not know; what LibTorch's own options leave out, LibTorch 2.15 takes from `defaults`.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults)
      : Optimizer(detail::ParamGroups(), std::move(defaults)) {
    for (const auto& group : groups) add_with_options(group);
  }
  /// One group of `params`.
  FusedOptimizer(std::vector<at::Tensor> params,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults)
      : Optimizer(std::move(params), std::move(defaults)) {}

  /// Throws for a group whose options are out of range or another optimizer's, or with parameters
  /// that the optimizer cannot step. `number` is for the error.
  virtual void check_group(const torch::optim::OptimizerParamGroup& /*group*/,
                           std::size_t /*number*/) const {}

  /// Tells ShardedMasterWeights that their weights are stepped here.
  void note_weights() const {
    detail::any_parameter(*this, [](const at::Tensor& param) {
      if (auto* const meta = detail::weight_meta_of(param)) meta->has_optimizer = true;
      return false;
    });
  }

  /// Steps, with the gradients divided by `grad_scale` unless it is undefined; not if `found_inf`
  /// is non-zero. `is_exact`: `found_inf` is 0 or 1.
  virtual void step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                          bool is_exact) = 0;

 private:
  TORCHAMP_BODY void step_with_clip(const detail::StepDivisor& divisor,
                                    const at::Tensor& found_inf) final;
  void step_and_forget_clip(const detail::StepDivisor& divisor, const at::Tensor& found_inf,
                            bool is_exact);
  static void check_scalar(const at::Tensor& tensor, const char* name);

  void add_with_options(const torch::optim::OptimizerParamGroup& group) {
    Optimizer::add_param_group(group);
    if (!group.has_options() || detail::is_known_to_libtorch(group.options())) return;
    param_groups_.back().set_options(group.options().clone());
  }

  bool drops_gradients_ = false;
};

/// A FusedOptimizer that steps with `Kernel`: one of those below, or one of your own, which need
/// not be ATen's (see torchamp/detail/core/optim/kernel.h for its parts).
template <detail::OptimizerKernel Kernel>
class FusedOptimizerOf : public FusedOptimizer, public CapturedStep {
 public:
  using Options = typename Kernel::Options;  ///< of a group: LibTorch's type, or MuonOptions
  using State = typename Kernel::State;      ///< of a parameter: LibTorch's, or MuonParamState

  /// `defaults` apply to groups without their own options. Errors: options that are out of range or
  /// another optimizer's.
  explicit FusedOptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                            Options defaults = {});
  /// One group of `params`.
  explicit FusedOptimizerOf(std::vector<at::Tensor> params, Options defaults = {})
      : FusedOptimizerOf(
            detail::ParamGroups(1, torch::optim::OptimizerParamGroup(std::move(params))),
            std::move(defaults)) {}
  ~FusedOptimizerOf() override = default;
  // NOLINTBEGIN(performance-noexcept-move-constructor): LibTorch's own may throw
  FusedOptimizerOf(FusedOptimizerOf&&) = default;
  FusedOptimizerOf& operator=(FusedOptimizerOf&&) = default;
  // NOLINTEND(performance-noexcept-move-constructor)

  /// The states of the parameters, in the types of LibTorch's own optimizer; a parameter whose
  /// every step was skipped may lack one. First updates their step counts, which are on the device:
  /// synchronises if a step since then may have been skipped. The states may be changed: the next
  /// step starts from them. (state() of a torch::optim::Optimizer& returns them without this
  /// update. They may also be changed there; a count is taken from there if it, or the whole state,
  /// was changed.)
  detail::ParamStates& state();
  /// The same, read-only.
  const detail::ParamStates& state() const {
    write_steps();
    return state_;
  }

  /// Writes what LibTorch's own optimizer writes, for either to load. Synchronises.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Reads what save() or LibTorch's own optimizer wrote, and replaces all state; the next step
  /// moves it to its parameters' device and dtype. If the archive belongs to another optimizer or
  /// other parameters, throws and changes nothing.
  void load(torch::serialize::InputArchive& archive) override;

  bool is_elementwise() const override { return Kernel::elementwise; }
  std::shared_ptr<torch::optim::Optimizer> make_counterpart() const override;
  void for_each_state_tensor(torch::optim::OptimizerParamState& state,
                             c10::function_ref<void(at::Tensor&)> f) const override;

  bool prepare_captured_step() override;
  bool may_be_captured() const override { return rates_on_device_; }
  void note_replayed_step() override {
    const detail::DropWeightCasts drop_weight_casts;
    plan_.note_step();
  }

 protected:
  void check_group(const torch::optim::OptimizerParamGroup& group,
                   std::size_t number) const override;
  void step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                  bool is_exact) override;

 private:
  void outdate_captures_of_other_options();
  std::vector<Options> options_but_rates() const;
  void write_steps() const;

  mutable detail::StepPlan<Kernel> plan_;  // follows changes of the states, also in save()

  // Where steps are captured.
  bool rates_on_device_ = false;
  std::vector<Options> stepped_with_;
};

/// torch::optim::Adam, fused.
using FusedAdam = FusedOptimizerOf<detail::AdamKernel>;

/// torch::optim::AdamW, fused.
using FusedAdamW = FusedOptimizerOf<detail::AdamWKernel>;

/// torch::optim::SGD, fused.
using FusedSGD = FusedOptimizerOf<detail::SgdKernel>;

/// torch::optim::Adagrad, fused. Like in LibTorch, each sum starts at the initial_accumulator_value
/// of the defaults, not of its group.
using FusedAdagrad = FusedOptimizerOf<detail::AdagradKernel>;

/// torch.optim.Muon of PyTorch 2.15, fused, also for parameters of more than two dimensions, which
/// are flattened after the first. Matrices of one shape and layout take each Newton-Schulz
/// iteration together, up to 2^25 elements at a time, so the number of launches does not depend on
/// the number of such matrices; a step takes temporary memory for some 30 bytes per element of
/// these. split_for_muon() chooses the parameters for it. The iterations multiply in bf16: on a CPU
/// the first step decides how, as the first guard does (see set_cpu_products()). Errors: parameters
/// of fewer than two dimensions, which FusedAdamW takes, and shards of ShardedMasterWeights.
using FusedMuon = FusedOptimizerOf<detail::MuonKernel>;

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/core/optim/fused_optimizer-inl.h"  // IWYU pragma: export

#ifdef TORCHAMP_COMPILED
namespace TORCHAMP_NAMESPACE {

extern template class FusedOptimizerOf<detail::AdamKernel>;
extern template class FusedOptimizerOf<detail::AdamWKernel>;
extern template class FusedOptimizerOf<detail::SgdKernel>;
extern template class FusedOptimizerOf<detail::AdagradKernel>;
extern template class FusedOptimizerOf<detail::MuonKernel>;

}  // namespace TORCHAMP_NAMESPACE
#endif
