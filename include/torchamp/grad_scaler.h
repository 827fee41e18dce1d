// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief GradScaler: scales the loss, skips bad steps, adapts the scale.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/scaler/loss_scale.h"
#include "torchamp/detail/scaler/step_ledger.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/step_result.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {
struct ScalerParts;

/// What torchamp/closure_step.h brings: see Note [Extras].
template <class AnyScaler>
class ClosureStep {
  static_assert(sizeof(AnyScaler) == 0,
                "torchamp: include torchamp/closure_step.h, which steps with a closure.");
};

/// What torchamp/torchamp.h brings.
template <class AnyScaler>
struct ScalerArchive {
  static_assert(sizeof(AnyScaler) == 0,
                "torchamp: include torchamp/torchamp.h, which saves and loads a GradScaler.");
};
}  // namespace detail

/// Scales the loss, so that small gradients survive 16-bit arithmetic, and steps the optimizer with
/// the gradients divided again, unless one of them is inf or NaN: then the step is skipped and the
/// scale lowered. The semantics are torch.amp.GradScaler's, see Note [An iteration].
///
///     torchamp::GradScaler scaler;
///     ...
///     optimizer.zero_grad();
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);
///     scaler.update();
///
/// Reads of the device, which wait for it: step() makes one, whatever the number of parameters,
/// groups and devices; none with an optimizer that implements ScaledStep (FusedAdam and its kin).
/// The rest makes none, except where it says so. The numbers of kernels and reads do not grow with
/// the number of parameters.
///
/// Errors are c10::Error; a call that fails leaves the scaler as it was. One thread at a time.
class GradScaler {
 public:
  /// Checks the options; an error names the one that is out of range. The scale itself is made by
  /// the first scale(), on the device of what is scaled.
  explicit GradScaler(GradScalerOptions options = {});

  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  /// Takes over the state of the other one, which may then only be assigned to or destroyed.
  GradScaler(GradScaler&&) noexcept;
  /// As the constructor that moves.
  GradScaler& operator=(GradScaler&&) noexcept;
  ~GradScaler();

  /// `outputs` times the scale: usually the loss. The first tensor decides on which device the
  /// scale lives: pass one from where the parameters are, for where the scale lies on the host and
  /// gradients do not, checking them has to wait. An fp16 or bf16 scalar comes back in fp32, since
  /// the product may be too large for it; other shapes of floating-point numbers keep their dtype.
  /// Where the scale is fixed at 1 (skip_non_finite()), `outputs` comes back as it is. Error: a
  /// tensor that this scaler has scaled already.
  at::Tensor scale(const at::Tensor& outputs);

  /// Each of several outputs times the scale; they may lie on different devices. See
  /// scale(outputs).
  std::vector<at::Tensor> scale(at::TensorList outputs);

  /// Divides the gradients of all groups of `optimizer` by the scale, in place, for the program to
  /// clip or look at; step() will not do so again. Once for each optimizer between two calls of
  /// update(), after the last backward(): what a later one adds stays scaled. Errors: fp16
  /// gradients (before any has been changed), a second call, a call after step().
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales the gradients if unscale_ has not, and calls `optimizer.step()` unless one of them is
  /// inf or NaN. Once for each optimizer between two calls of update(). An optimizer none of whose
  /// parameters has a gradient is not stepped: a warning, once, and the result name the parameters
  /// and the reasons. If `optimizer.step()` throws, step() may be called again. Within an autocast
  /// region, ops after it see the new weights. Errors: LBFGS, which needs a closure; gradients that
  /// came after unscale_, where it had found none or MasterWeights::take_gradients() made them; a
  /// fused optimizer two of whose parameters have one gradient, unless unscale_ has divided it.
  StepResult step(torch::optim::Optimizer& optimizer);

  /// Steps an optimizer that evaluates the loss by itself, once or, as LBFGS, many times:
  ///
  ///     scaler.step(lbfgs, [&] { return loss(model->forward(input), target); });
  ///     scaler.update();
  ///
  /// `closure` computes the loss, and no more (LibTorch's own also calls zero_grad() and
  /// backward(), which is an error here); these, scaling, unscaling and the check are done at each
  /// evaluation. A non-finite evaluation backs off the scale and is retried (unless the loss is bad
  /// and forgives_bad_losses set), up to `max_retries` times and while the scale is above its
  /// floor; if that does not help, the step is skipped: parameters and optimizer state are as
  /// before (of an optimizer that is not LibTorch's, state tensors that it changes in place are not
  /// put back). Keeps a copy of the parameters and of the state meanwhile
  /// (not of a FusedOptimizer's). Reads the device once for each evaluation. Needs
  /// torchamp/closure_step.h, see Note [A step with a closure] there.
  template <class AnyScaler = GradScaler>
  StepResult step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure, int64_t max_retries = 8) {
    return detail::ClosureStep<AnyScaler>(*this, optimizer, closure, max_retries).step();
  }

  /// Forgets what this iteration has recorded of `optimizer`: for a program that drops its
  /// gradients after an error and goes on. They then count as neither unscaled nor stepped with;
  /// the scale stays as it is.
  void discard(const torch::optim::Optimizer& optimizer);

  /// Ends an iteration: lowers the scale if any optimizer's gradients held an inf or a NaN, raises
  /// it after growth_interval iterations without. Not before some optimizer has been stepped or
  /// unscaled. If limits are set to throw, this is where it happens. Warns once in a scaler's life
  /// when 100 iterations in a row were bad (up to 32 later where only the device knows).
  void update();

  /// Ends an iteration and sets the scale. What the gradients held is forgotten; growth_tracker
  /// stays.
  void update(double new_scale);

  /// Ends an iteration and sets the scale to the one element of `new_scale`, which lies on the
  /// scale's type of device. It is read only where it lies in host memory; elsewhere a value
  /// outside the limits becomes the nearest limit.
  void update(const at::Tensor& new_scale);

  /// The scale; 1 if disabled. Reads the device only where the host does not know it, which is so
  /// after a fused optimizer's step on a GPU.
  double get_scale() const;

  /// The scale where it lives: 0-dim fp32, changed in place by update(), not to be written to.
  /// Undefined before the first scale() and if disabled. Never reads.
  at::Tensor scale_tensor() const;

  /// How many iterations in a row, up to the last update(), held an inf or a NaN. Reads as
  /// get_scale.
  int64_t skips_in_a_row() const;

  /// Whether the gradients of `optimizer` have been unscaled in this iteration.
  bool is_unscaled(const torch::optim::Optimizer& optimizer) const;

  /// Whether `optimizer` has been stepped, or skipped, in this iteration.
  bool is_stepped(const torch::optim::Optimizer& optimizer) const;

  /// Whether the gradients of `optimizer` held an inf or a NaN when they were unscaled in this
  /// iteration, in agreement with the other processes: 0-dim fp32, 0 or 1, on the scale's device.
  /// Undefined if they have not been, or if disabled. Never reads.
  at::Tensor found_inf(const torch::optim::Optimizer& optimizer);

  /// What the scale is multiplied by when it grows.
  double get_growth_factor() const { return options().growth_factor; }
  /// Holds from the next update() on. Error: not above 1.
  void set_growth_factor(double factor) { scale_.set_growth_factor(factor); }
  /// What the scale is multiplied by after a bad iteration.
  double get_backoff_factor() const { return options().backoff_factor; }
  /// Holds from the next update() on. Error: not between 0 and 1.
  void set_backoff_factor(double factor) { scale_.set_backoff_factor(factor); }
  /// How many good iterations in a row make the scale grow.
  int64_t get_growth_interval() const { return options().growth_interval; }
  /// If more good iterations than this have passed already, the scale grows after the next one.
  void set_growth_interval(int64_t interval) { scale_.set_growth_interval(interval); }
  /// False if the scaler was made with `.enabled = false`.
  bool is_enabled() const { return options().enabled; }
  /// What it was made with, and what setters have changed since.
  const GradScalerOptions& options() const { return scale_.options(); }

  /// What torch.amp.GradScaler.state_dict() holds; empty if disabled. Reads as get_scale.
  GradScalerState state_dict() const;

  /// Takes over all of `state` or, if a value is out of range or the state empty, nothing of it.
  /// What the update remembers beyond torch.amp starts afresh. Does nothing if disabled.
  void load_state_dict(const GradScalerState& state);

  /// For torch::save(scaler, path) and torch::load(scaler, path): the state, and what the update
  /// remembers beyond torch.amp. Save after update(): it is refused from unscale_() or step() on,
  /// and within a window of an Accumulation or SafeAccumulation, whose gradients would be lost;
  /// what scale() and backward() alone have done is not in the file. Loading takes over all or
  /// nothing. Needs torchamp/torchamp.h.
  template <class AnyScaler = GradScaler>
  void save(torch::serialize::OutputArchive& archive) const {
    detail::ScalerArchive<AnyScaler>::save(*this, archive);
  }
  /// For torch::load(scaler, path): takes over what save() has written, all of it or nothing.
  template <class AnyScaler = GradScaler>
  void load(torch::serialize::InputArchive& archive) {
    detail::ScalerArchive<AnyScaler>::load(*this, archive);
  }

 private:
  friend struct detail::ScalerParts;

  detail::LossScale scale_;
  detail::StepLedger ledger_;
};

namespace detail {

/// What extras and tests reach of a scaler.
struct ScalerParts {
  static LossScale& scale(GradScaler& scaler) { return scaler.scale_; }
  static const LossScale& scale(const GradScaler& scaler) { return scaler.scale_; }
  static StepLedger& ledger(GradScaler& scaler) { return scaler.ledger_; }
  static const StepLedger& ledger(const GradScaler& scaler) { return scaler.ledger_; }
  static StepResult result(std::shared_ptr<StepRecord> record) {
    return StepResult(std::move(record));
  }
};

/// Takes over `state`, and of `rest` what the state does not hold; `call` begins the error's text.
inline void restore_scaler(GradScaler& scaler, const char* call, const GradScalerState& state,
                           ScaleMemory<double> rest) {
  check_state(call, state, scaler.options());
  const InternalOps guard;
  ScalerParts::ledger(scaler).keep_results();
  ScalerParts::scale(scaler).restore(state, std::move(rest));
}

}  // namespace detail

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/scaler/grad_scaler-inl.h"  // IWYU pragma: export
#endif
