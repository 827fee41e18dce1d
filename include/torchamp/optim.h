// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Optimizers over fused kernels that never read the device: Adam, AdamW, SGD, Adagrad.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <utility>
#include <vector>

#include "torchamp/detail/gradients/deferred_clip.h"
#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/optim/kernels.h"
#include "torchamp/detail/optim/plan.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/scaled_step.h"
#include "torchamp/version.h"

/// @file
/// Optimizers over ATen's fused kernels. Each takes the options of LibTorch's own optimizer of its
/// kind, computes the same steps (within rounding), keeps its state in LibTorch's own types, and
/// reads and writes its archives, so that one can take the other's place:
///
///     torchamp::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
///     …
///     scaler.step(optimizer);  // reads nothing
///
/// Where there are fused kernels, a step is one call for each group, device and dtype, however many
/// parameters there are. Its
/// state lives on the parameters' device in their dtype. LibTorch's schedulers, groups with options
/// of their own, gradients that appear later and closures work as with LibTorch's.
///
/// Parameters are fp32, fp64, fp16 or bf16, dense in memory, each in the optimizer once; gradients
/// are dense. Anything else is an error of step(), which then changes nothing.
///
/// On a device for which LibTorch has no fused kernel that heeds the scale and the flag, a step
/// consists of `_foreach_` ops, reads nothing either, and costs some 30 launches for one list of
/// parameters: see Note [Steps without a fused kernel].

namespace TORCHAMP_NAMESPACE {

/// What all fused optimizers have in common: they step all parameters of a group, device and dtype
/// together, and decide on the device whether a step is taken. Neither step() nor
/// step_scaled() ever reads the device. One thread at a time.
class FusedOptimizer : public torch::optim::Optimizer,
                       public detail::DefersClips,
                       public detail::HeedsStepMethods {
 public:
  TORCHAMP_BODY ~FusedOptimizer() override;
  FusedOptimizer(FusedOptimizer&&) = default;
  FusedOptimizer& operator=(FusedOptimizer&&) = default;

  /// As torch::optim::Optimizer::step: runs the closure, if there is one, with gradients enabled,
  /// steps, and returns the closure's value or an undefined tensor.
  TORCHAMP_BODY at::Tensor step(LossClosure closure = nullptr) override;

  /// As ScaledStep::step_scaled. A class of your own overrides step_fused() instead.
  TORCHAMP_BODY at::Tensor step_scaled(const at::Tensor& grad_scale,
                                       const at::Tensor& found_inf) final;

  /// As torch::optim::Optimizer::zero_grad; also forgets what divide_next_step has left.
  void zero_grad(bool set_to_none = true);

  /// From now on every step that is asked of this optimizer, taken or skipped, ends with the
  /// gradients dropped (set to none, as zero_grad() does): nobody can look at them then, an
  /// overflow_report() neither, so call unscale_ and look before the step. In exchange it need
  /// not leave them divided. On a CPU, large fp32 and fp64 gradients are then read and not written:
  /// a scaled and clipped step moves 1.15 times the bytes of one without a scaler, else 1.3 times.
  /// Never reads the device.
  void drop_gradients_after_step(bool drop = true) { drops_gradients_ = drop; }

  /// Whether each step drops its gradients.
  bool drops_gradients_after_step() const { return drops_gradients_; }

  /// As torch::optim::Optimizer::add_param_group.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Optimizer::add_param_group(group);
    note_weights();
  }

  /// Divides the gradients that are there now by `divisor` (0-dim fp32, on any device) when they
  /// are next stepped with, on top of the scale and of earlier divisors, at the cost of one
  /// multiplication of two numbers. clip_grad_norm_ uses it. The gradients themselves are not
  /// changed before that step, nor may `divisor` be. Gradients that were written to, replaced,
  /// added or dropped in part make the step an error. If all of them are gone, a divisor is
  /// forgotten where this thread has run a forward pass since, and the step an error where it has
  /// not (this class's zero_grad() forgets at once); see Note [What was clipped is what is
  /// stepped]. Never reads the device.
  void divide_next_step(const at::Tensor& divisor);

  /// What divide_next_step left for the next step; undefined if there is nothing. An error if it
  /// was left for other gradients than there are now. Never reads the device.
  at::Tensor next_step_divisor() const;

  /// The same, and leaves nothing for the next step; what was left for other gradients than there
  /// are now is forgotten.
  at::Tensor take_next_step_divisor();

 protected:
  using Optimizer::Optimizer;

  /// Has ShardedMasterWeights know that their weights are stepped here.
  void note_weights() const {
    for (const auto& group : param_groups_) {
      for (const at::Tensor& param : group.params()) {
        if (auto* const meta = detail::weight_meta_of(param)) meta->has_optimizer = true;
      }
    }
  }

  /// Steps, with the gradients divided by `grad_scale` unless it is undefined, and not if
  /// `found_inf` is non-zero. `is_exact`: it is 0 or 1.
  virtual void step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                          bool is_exact) = 0;

 private:
  TORCHAMP_BODY void step_knowing(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                                  const detail::StepFacts& facts) final;
  static void check_scalar(const at::Tensor& tensor, const char* name);

  bool drops_gradients_ = false;
};

/// A FusedOptimizer that steps with `Kernel`: one of those below, or one of your own, which need
/// not be ATen's (see torchamp/detail/optim/kernel.h for what it has).
template <detail::OptimizerKernel Kernel>
class FusedOptimizerOf : public FusedOptimizer, public CapturedStep {
 public:
  using Options = typename Kernel::Options;  ///< of a group, LibTorch's type
  using State = typename Kernel::State;      ///< of a parameter, LibTorch's type

  /// `defaults` hold for groups without options of their own. Errors: options out of range, or
  /// another optimizer's.
  explicit FusedOptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                            Options defaults = {});
  /// One group of `params`.
  explicit FusedOptimizerOf(std::vector<at::Tensor> params, Options defaults = {})
      : FusedOptimizerOf(detail::one_group(std::move(params)), std::move(defaults)) {}
  ~FusedOptimizerOf() override;
  /// As torch::optim::Optimizer::add_param_group. Errors: as of the constructor.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  // NOLINTBEGIN(performance-noexcept-move-constructor): LibTorch's own may throw
  FusedOptimizerOf(FusedOptimizerOf&&) = default;
  FusedOptimizerOf& operator=(FusedOptimizerOf&&) = default;
  // NOLINTEND(performance-noexcept-move-constructor)

  /// The states of the parameters, in the types of LibTorch's own optimizer; a parameter whose
  /// every step was skipped may or may not have one. Brings their step counts, which live on the
  /// device, up to date: reads it if a step since then could be skipped. They may be changed: the
  /// next step starts from them. (state() of a reference to torch::optim::Optimizer gives them as
  /// they were last brought up to date. They may be changed there, too; a count is taken from there
  /// if it, or the whole state, was.)
  detail::ParamStates& state();
  /// The same, not to be changed.
  const detail::ParamStates& state() const;

  /// Writes what LibTorch's own optimizer writes, for either to load. Reads the device.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Reads what save() or LibTorch's own optimizer wrote. All of the state is replaced; it goes to
  /// its parameters' device and dtype when they are next stepped. If the archive is another
  /// optimizer's, or one for other parameters, throws and changes nothing.
  void load(torch::serialize::InputArchive& archive) override;

  bool prepare_captured_step() override;
  bool may_be_captured() const override { return rates_on_device_; }
  void note_replayed_step() override;

 protected:
  void step_fused(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                  bool is_exact) override;

 private:
  bool same_options() const;
  static void check_loaded(torch::optim::Optimizer& loaded);
  void write_steps() const;

  // Both follow what is done to the states, also in save().
  mutable detail::CounterTable counters_;
  mutable detail::StepPlan<Kernel> plan_;

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

/// torch::optim::Adagrad, fused. Every parameter's sum starts at the initial_accumulator_value of
/// the defaults, as in LibTorch, which does not look at its group's own one either.
using FusedAdagrad = FusedOptimizerOf<detail::AdagradKernel>;

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/optim/fused_optimizer-inl.h"  // IWYU pragma: export

#ifdef TORCHAMP_COMPILED
namespace TORCHAMP_NAMESPACE {

extern template class FusedOptimizerOf<detail::AdamKernel>;
extern template class FusedOptimizerOf<detail::AdamWKernel>;
extern template class FusedOptimizerOf<detail::SgdKernel>;
extern template class FusedOptimizerOf<detail::AdagradKernel>;

}  // namespace TORCHAMP_NAMESPACE
#endif
