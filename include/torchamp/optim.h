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
#include "torchamp/detail/core/gradients/optimizer_identity.h"
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
/// FusedAdam, FusedAdamW, FusedSGD and FusedAdagrad run ATen's fused kernels. Each can replace
/// LibTorch's own optimizer: it takes the same options, computes the same steps (within rounding),
/// stores its state in the same types, and reads and writes the same archives. LibTorch has no
/// Muon: FusedMuon computes the steps of Python's torch.optim.Muon.
///
///     torchamp::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
///     …
///     scaler.step(optimizer);  // does not synchronise
///
/// A step calls one kernel per group, device and dtype, for any number of parameters; FusedMuon
/// calls some kernels per shape of its matrices. The state is on the parameters' device in their
/// dtype. LibTorch's schedulers, groups with their own options, gradients that appear later, and
/// closures work as with LibTorch's optimizers.
///
/// Parameters must be fp32, fp64, fp16 or bf16, dense in memory, and each in the optimizer only
/// once. Gradients must be dense. Otherwise step() throws and changes nothing.
///
/// If a device has no fused kernels, or its kernels ignore the scale and the flag, a step consists
/// of ordinary ops. It does not synchronise, and costs some 30 launches per list of parameters: see
/// Note [Steps without a fused kernel].

namespace TORCHAMP_NAMESPACE {

/// Base of the fused optimizers: all parameters of a group, device and dtype step together, and the
/// device decides whether to take a step. step() and step_scaled() never synchronise. One
/// thread at a time.
class FusedOptimizer : public torch::optim::Optimizer, public detail::ClippingStep {
 public:
  /// Like torch::optim::Optimizer::step: runs the closure (if there is one) with gradients enabled,
  /// steps, and returns the closure's value or an undefined tensor.
  TORCHAMP_BODY at::Tensor step(LossClosure closure = nullptr) override;

  /// Like ScaledStep::step_scaled. Your own class overrides step_fused() instead.
  TORCHAMP_BODY at::Tensor step_scaled(const at::Tensor& grad_scale,
                                       const at::Tensor& found_inf) final;

  /// Like torch::optim::Optimizer::zero_grad; also drops a divisor of divide_next_step.
  void zero_grad(bool set_to_none = true);

  /// From now on each step, taken or skipped, ends by dropping the gradients (set to none, like
  /// zero_grad()). To inspect gradients, for example with an overflow_report(), call unscale_ and
  /// inspect them before the step. Never synchronises.
  void drop_gradients_after_step(bool drop = true) { drops_gradients_ = drop; }

  /// Whether each step drops its gradients.
  bool drops_gradients_after_step() const { return drops_gradients_; }

  /// Like torch::optim::Optimizer::add_param_group, with the constructor's errors. If you call it
  /// through a torch::optim::Optimizer&, LibTorch 2.15 replaces the group's MuonOptions by the
  /// optimizer's defaults.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    check_group(group, param_groups_.size());
    detail::add_group(*this, group);
    note_weights();
  }

  /// Whether a step treats each element of a parameter independently, so that shards of a parameter
  /// can be stepped.
  virtual bool is_elementwise() const { return false; }

  /// For the library's own headers: LibTorch's optimizer that reads and writes the same archives,
  /// with the same defaults and without groups; null if there is none.
  virtual std::shared_ptr<torch::optim::Optimizer> make_counterpart() const { return nullptr; }

  /// For the library's own headers: calls `f` with each defined tensor in `state` that has the
  /// parameter's shape.
  virtual void for_each_state_tensor(torch::optim::OptimizerParamState& /*state*/,
                                     c10::function_ref<void(at::Tensor&)> /*f*/) const {}

  /// Makes the next step divide the present gradients by `divisor` (0-dim fp32, on any device), in
  /// addition to the scale and to earlier divisors. clip_grad_norm_ uses it. Costs one
  /// multiplication of two numbers. A divisor below 1 may turn a finite gradient into an inf; a
  /// GradScaler's step does not check for this.
  ///
  /// Until that step neither the gradients nor `divisor` may change. If some of the gradients were
  /// written to, replaced, added to or dropped, the step throws. zero_grad() of this class drops
  /// the divisor with the gradients. If all gradients were dropped in another way, and this thread
  /// has run a forward pass since, the step ignores the divisor; without a forward pass it throws.
  /// See Note [What was clipped is what is stepped]. Never synchronises.
  void divide_next_step(const at::Tensor& divisor);

  /// The divisor for the next step; undefined if there is none. Error: it was set for other
  /// gradients than the present gradients. Never synchronises.
  at::Tensor next_step_divisor() const;

  /// Returns the divisor and removes it. A divisor for other gradients than the present gradients
  /// is dropped.
  at::Tensor take_next_step_divisor();

 protected:
  /// `defaults` apply to groups without options. If a group has options of a type that LibTorch
  /// does not know, they are unchanged. If LibTorch's own options leave values out, LibTorch 2.15
  /// takes these values from `defaults`; LibTorch 2.6 uses the defaults of the options' type.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults)
      : Optimizer(detail::ParamGroups(), std::move(defaults)) {
    for (const auto& group : groups) detail::add_group(*this, group);
  }
  /// One group of `params`.
  FusedOptimizer(std::vector<at::Tensor> params,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults)
      : Optimizer(std::move(params), std::move(defaults)) {}

  /// Throws if a group's options are out of range or belong to another optimizer, or if the
  /// optimizer cannot step its parameters. `number` is for the error.
  virtual void check_group(const torch::optim::OptimizerParamGroup& /*group*/,
                           std::size_t /*number*/) const {}

  /// Records, for parameters that belong to masters, that an optimizer steps them.
  /// ShardedMasterWeights read this record.
  void note_weights() const {
    detail::any_parameter(*this, [](const at::Tensor& param) {
      if (auto* const meta = detail::weight_meta_of(param)) meta->has_optimizer = true;
      return false;
    });
  }

  /// Steps, with the gradients divided by `grad_scale` unless it is undefined. Skips the step if
  /// `found_inf` is defined and non-zero. If `is_exact` is true, a defined `found_inf` is 0 or 1;
  /// otherwise it may be any number.
  virtual void step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                          bool is_exact) = 0;

 private:
  TORCHAMP_BODY void step_with_clip(const detail::StepDivisor& divisor,
                                    const at::Tensor& found_inf) final;
  void step_and_forget_clip(const detail::StepDivisor& divisor, const at::Tensor& found_inf,
                            bool is_exact);
  static void check_scalar(const at::Tensor& tensor, const char* name);

  bool drops_gradients_ = false;
};

/// A FusedOptimizer that steps with `Kernel`: a kernel of the aliases below, or your own, which
/// need not be ATen's (see torchamp/detail/core/optim/kernel.h for its parts).
template <detail::OptimizerKernel Kernel>
class FusedOptimizerOf : public FusedOptimizer, public CapturedStep, public detail::NamedOptimizer {
 public:
  using Options = typename Kernel::Options;  ///< a group's options: LibTorch's type, or MuonOptions
  using State = typename Kernel::State;      ///< a parameter's state: LibTorch's, or MuonParamState

  /// `defaults` apply to groups without their own options. Errors: options that are out of range or
  /// belong to another optimizer.
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

  /// The states of the parameters, in the types of LibTorch's own optimizer. If every step of a
  /// parameter was skipped, it may have no state. The step counts are on the device, and this call
  /// first copies them into the states. It synchronises if a step since the last call may have been
  /// skipped. The program may change the states: the next step starts from them.
  ///
  /// state() of a torch::optim::Optimizer& returns the states without updating the step counts. If
  /// the program changes a step count or replaces a state there, the next step starts from this
  /// count. Otherwise it continues from the count on the device.
  detail::ParamStates& state();
  /// The same, read-only.
  const detail::ParamStates& state() const {
    write_steps();
    return state_;
  }

  /// Writes the archive of LibTorch's own optimizer; both can load it. Synchronises.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Reads an archive of save() or of LibTorch's own optimizer, and replaces all state; the next
  /// step moves the state to its parameters' device and dtype. If the archive belongs to another
  /// optimizer or other parameters, throws and changes nothing.
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
  const char* name_in_errors() const final { return Kernel::name; }
  void outdate_captures_of_other_options();
  std::vector<Options> options_but_rates() const;
  void write_steps() const;

  mutable detail::StepPlan<Kernel> plan_;  // save() may update it: the states may have changed

  // For steps that are captured.
  bool rates_on_device_ = false;
  std::vector<Options> stepped_with_;
};

/// torch::optim::Adam, fused.
using FusedAdam = FusedOptimizerOf<detail::AdamKernel>;

/// torch::optim::AdamW, fused.
using FusedAdamW = FusedOptimizerOf<detail::AdamWKernel>;

/// torch::optim::SGD, fused.
using FusedSGD = FusedOptimizerOf<detail::SgdKernel>;

/// torch::optim::Adagrad, fused. As in LibTorch, each sum starts at the initial_accumulator_value
/// of the defaults, not of the group.
using FusedAdagrad = FusedOptimizerOf<detail::AdagradKernel>;

/// torch.optim.Muon of PyTorch 2.15, fused. A parameter of more than two dimensions is flattened
/// after the first dimension. Matrices of the same shape and layout take each Newton-Schulz
/// iteration together, up to 2^25 elements at a time. So the number of launches grows with each
/// 2^25 elements of such matrices, and not with each matrix. A step needs some 30 bytes of
/// temporary memory per element of these matrices. split_for_muon() chooses the parameters. The
/// iterations multiply in bf16: on a CPU the first step decides how, as the first guard does (see
/// set_cpu_products()). Errors: parameters of fewer than two dimensions, which FusedAdamW can step;
/// shards of ShardedMasterWeights.
using FusedMuon = FusedOptimizerOf<detail::MuonKernel>;

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/core/optim/fused_optimizer-inl.h"  // IWYU pragma: export

#ifdef TORCHAMP_COMPILED
namespace TORCHAMP_NAMESPACE {

#define TORCHAMP_DECLARE_OPTIMIZER(kernel) extern template class FusedOptimizerOf<detail::kernel>;
TORCHAMP_FOR_EACH_KERNEL(TORCHAMP_DECLARE_OPTIMIZER)
#undef TORCHAMP_DECLARE_OPTIMIZER
}  // namespace TORCHAMP_NAMESPACE
#endif
