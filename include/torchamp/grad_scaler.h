// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. GradScaler: scales the loss, skips bad steps, adapts the scale. StepResult: the
/// result of a step.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

class GradScaler;
namespace detail {
struct ScalerParts;
}  // namespace detail

/// The result of a GradScaler::step.
///
///     if (!scaler.step(optimizer)) std::cout << "skipped\n";
///
/// A query synchronises with the device once, unless the host already has the value. Further
/// queries and copies of the result share the value. A result that is never queried costs nothing.
/// A later update() does not change the values. One thread at a time.
class StepResult {
 public:
  /// Whether the optimizer stepped. False: a gradient held an inf or a NaN, or there was no
  /// gradient.
  bool stepped() const { return record_->had_gradients && record_->found_inf.read() == 0.; }
  /// Whether the optimizer stepped: stepped().
  explicit operator bool() const { return stepped(); }

  /// The overflow flag on its device: 0-dim fp32, non-zero if the step was skipped because of an
  /// inf or a NaN. Ops on the device can depend on it. Undefined for a disabled scaler. Never
  /// synchronises.
  at::Tensor found_inf() const { return record_->found_inf.tensor; }

  /// The scale of the gradients; 1 for a disabled scaler.
  double scale() const { return record_->scale.read(); }

  /// The number of consecutive iterations with an inf or a NaN, including this one; 0 if the
  /// optimizer stepped.
  int64_t skips_in_a_row() const {
    const bool bad = record_->found_inf.read() != 0.;
    if (!bad && record_->had_gradients) return 0;
    return static_cast<int64_t>(record_->skips.read()) + (bad ? 1 : 0);
  }

  /// False if none of the optimizer's parameters had a gradient. Never synchronises.
  bool had_gradients() const { return record_->had_gradients; }

  /// If no parameter had a gradient: every parameter, with the reason. Otherwise empty. Never
  /// synchronises.
  const std::vector<MissingGradient>& missing_gradients() const { return record_->missing; }

  /// The value that the optimizer's step returned: the loss if there is a closure. Undefined if the
  /// step was skipped, and for most optimizers without a closure.
  const at::Tensor& value() const { return record_->value; }

 private:
  friend class GradScaler;
  friend struct detail::ScalerParts;
  explicit StepResult(std::shared_ptr<detail::StepRecord> record) : record_(std::move(record)) {}

  std::shared_ptr<detail::StepRecord> record_;
};

/// Scales the loss, so that small gradients survive 16-bit arithmetic, and steps the optimizer with
/// the unscaled gradients. If one of them is inf or NaN, the step is skipped and the scale backs
/// off. The semantics are torch.amp.GradScaler's, see Note [An iteration].
///
///     torchamp::GradScaler scaler;
///     ...
///     optimizer.zero_grad();
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);
///     scaler.update();
///
/// step() synchronises once, for any number of parameters, groups and devices. It does not
/// synchronise if the optimizer implements ScaledStep, as FusedAdam does. Other calls synchronise
/// only if their comment says so. The number of kernels does not grow with the number of
/// parameters.
///
/// In its first iterations a scaler warns of calls in an order that trains wrongly: see
/// GradScalerOptions::check_order.
///
/// Errors are c10::Error; a call that fails leaves the scaler unchanged. Exception: update() calls
/// on_limit and the program's handler of warnings at its end, and a step() without gradients calls
/// the handler at its end. If such a function throws, the call is already complete. One thread at a
/// time.
class GradScaler {
 public:
  /// Checks the options; an error names the option that is out of range. The first scale() creates
  /// the scale, on the device of its argument.
  explicit GradScaler(GradScalerOptions options = {});

  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  /// Moves the state. The other scaler may then only be assigned to or destroyed.
  GradScaler(GradScaler&&) noexcept;
  /// Like the move constructor.
  GradScaler& operator=(GradScaler&&) noexcept;
  ~GradScaler();

  /// Returns `outputs` (usually the loss) times the scale. The scale is created on the device of
  /// the first tensor: pass a tensor on the parameters' device. If the scale is on the host and the
  /// gradients are on a device, the host waits for the device at each check. An fp16 or bf16 scalar
  /// is returned in fp32, which can hold the product; other shapes keep their dtype. If the scale
  /// is fixed at 1 (skip_non_finite()), `outputs` is returned unchanged. Error: a loss that this
  /// scaler has already scaled.
  at::Tensor scale(const at::Tensor& outputs);

  /// Returns each of several outputs, which may be on different devices, times the scale. See
  /// scale(outputs).
  std::vector<at::Tensor> scale(at::TensorList outputs);

  /// Divides the gradients of all groups of `optimizer` by the scale, in place, so that the program
  /// can clip or inspect them. step() then does not divide again. Call it once per optimizer
  /// between two calls of update(), after the last backward(): gradients added later stay scaled.
  /// If gradients of two parameters share memory, unscale_ and step() first replace one of them by
  /// a clone. Errors, before any gradient is changed: nothing was scaled yet; fp16 gradients,
  /// unless the scale is fixed at 1; a second call; a call after step(); a gradient that unscale_
  /// or step has already divided for another optimizer in this iteration.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales the gradients, unless unscale_ has done so, and calls `optimizer.step()` if all
  /// gradients are finite. Call it once per optimizer between two calls of update(). An optimizer
  /// without any gradient is not stepped: one warning names the parameters and the reasons, and so
  /// does the result. If `optimizer.step()` throws, step() may be called again. In a region,
  /// later ops use the new weights.
  ///
  /// Errors: nothing was scaled yet; a second call before update(); LBFGS, which needs a closure
  /// (step() in closure_step.h); a gradient that unscale_ or step has already divided for another
  /// optimizer in this iteration. If the program has called unscale_, there are further errors:
  ///  - unscale_ found no gradient, but the optimizer has gradients now;
  ///  - MasterWeights::take_gradients() has made gradients after unscale_;
  ///  - a parameter that was added to the optimizer after unscale_ has a gradient;
  ///  - backward() of a scaled loss has added to the gradients after unscale_.
  StepResult step(torch::optim::Optimizer& optimizer);

  /// Clears the scaler's records of `optimizer` in this iteration: its gradients count as neither
  /// unscaled nor stepped. The scale is unchanged. Call it if the program drops the gradients after
  /// an error and continues.
  void discard(const torch::optim::Optimizer& optimizer);

  /// Ends an iteration. If the gradients of any optimizer held an inf or a NaN, the scale backs
  /// off. After growth_interval consecutive good iterations, the scale grows. Error: no optimizer
  /// was stepped or unscaled in this iteration. If a limit is met whose option is
  /// AtLimit::throw_error, update() throws. Warns once in a scaler's life, after 100 consecutive
  /// bad iterations; if only the device has the overflow flags, the warning comes up to 32
  /// iterations later.
  void update();

  /// Ends an iteration and sets the scale, even if a gradient held an inf or a NaN; growth_tracker
  /// is unchanged. Errors: a scale outside of min_scale and max_scale; nothing was scaled yet.
  void update(double new_scale);

  /// Ends an iteration and sets the scale to the only element of `new_scale`. In host memory, a
  /// value outside of min_scale and max_scale is an error. On a device the value is not read: a
  /// value outside the limits becomes the nearest limit, and a NaN becomes min_scale. Errors: a
  /// tensor on another type of device than the scale; more than one element; a complex number;
  /// requires_grad.
  void update(const at::Tensor& new_scale);

  /// The scale; 1 if disabled. Synchronises only if the value is on the device alone, that is,
  /// after a fused optimizer's step on a GPU.
  double get_scale() const;

  /// The scale on its device: 0-dim fp32, changed in place by update(); do not write to it.
  /// Undefined before the first scale() and if disabled. Never synchronises.
  at::Tensor scale_tensor() const;

  /// Number of consecutive bad iterations up to the last update(). Synchronises like get_scale.
  int64_t skips_in_a_row() const;

  /// Whether `optimizer`'s gradients have been unscaled in this iteration.
  bool is_unscaled(const torch::optim::Optimizer& optimizer) const;

  /// Whether `optimizer` has been stepped, or skipped, in this iteration.
  bool is_stepped(const torch::optim::Optimizer& optimizer) const;

  /// Whether `optimizer`'s gradients held an inf or a NaN when they were unscaled in this
  /// iteration: 0-dim fp32, 0 or 1, on the scale's device. With agree_found_inf, the value that the
  /// processes agreed on. Undefined if the gradients were not unscaled, or if disabled. Never
  /// synchronises.
  at::Tensor found_inf(const torch::optim::Optimizer& optimizer);

  /// The factor by which the scale grows.
  double get_growth_factor() const { return options().growth_factor; }
  /// Sets the growth factor, from the next update() on. Error: a factor that is not finite and
  /// above 1.
  void set_growth_factor(double factor) { scale_.set_growth_factor(factor); }
  /// The factor by which the scale backs off.
  double get_backoff_factor() const { return options().backoff_factor; }
  /// Sets the backoff factor, from the next update() on. Error: a factor that is not between 0 and
  /// 1.
  void set_backoff_factor(double factor) { scale_.set_backoff_factor(factor); }
  /// Number of consecutive good iterations after which the scale grows.
  int64_t get_growth_interval() const { return options().growth_interval; }
  /// Sets the growth interval. If more good iterations have already passed, the scale grows after
  /// the next good iteration. Error: an interval that is not between 1 and 2^31 - 1.
  void set_growth_interval(int64_t interval) { scale_.set_growth_interval(interval); }
  /// False if the scaler was created with `.enabled = false`.
  bool is_enabled() const { return options().enabled; }
  /// The options of construction, with later changes by setters.
  const GradScalerOptions& options() const { return scale_.options(); }

  /// The contents of torch.amp.GradScaler.state_dict(); empty if disabled. Synchronises like
  /// get_scale.
  GradScalerState state_dict() const;

  /// Loads all of `state`. If a value is out of range or the state is empty, throws and loads
  /// nothing. Counts that torch.amp does not have (of hysteresis and of consecutive bad iterations)
  /// are reset. Does nothing if disabled. Call it between iterations: present gradients have the
  /// old scale, and step() would divide by the new scale.
  void load_state_dict(const GradScalerState& state);

  /// For torch::save(scaler, path): writes the state, including the state of options beyond
  /// torch.amp's. Save after update(). Errors: a call between unscale_() or step() and update(); a
  /// call in a window of an Accumulation, whose gradients would be lost. The effects of scale()
  /// and backward() are not saved.
  void save(torch::serialize::OutputArchive& archive) const;
  /// For torch::load(scaler, path): loads a file of save(), completely or not at all.
  void load(torch::serialize::InputArchive& archive);

 private:
  friend struct detail::ScalerParts;

  detail::LossScale scale_;
  detail::StepLedger ledger_;
};

namespace detail {

/// Access for extras and tests.
struct ScalerParts {
  static LossScale& scale(GradScaler& scaler) { return scaler.scale_; }
  static const LossScale& scale(const GradScaler& scaler) { return scaler.scale_; }
  static StepLedger& ledger(GradScaler& scaler) { return scaler.ledger_; }
  static const StepLedger& ledger(const GradScaler& scaler) { return scaler.ledger_; }
  static StepResult result(std::shared_ptr<StepRecord> record) {
    return StepResult(std::move(record));
  }
  /// A copy of a result that does not share the values.
  static StepResult with_own_answers(const StepResult& of) {
    return result(std::make_shared<StepRecord>(*of.record_));
  }
  /// The result of a disabled scaler's step.
  static StepResult unscaled_result(at::Tensor value) {
    auto record = std::make_shared<StepRecord>();
    record->value = std::move(value);
    return result(std::move(record));
  }
};

/// Loads `state`, and from `rest` the values that the state does not hold; `call` begins error
/// messages.
TORCHAMP_BODY void restore_scaler(GradScaler& scaler, const char* call,
                                  const GradScalerState& state, ScaleMemory<double> rest);

}  // namespace detail

/// Calls save(), for torch::save.
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

/// Calls load(), for torch::load.
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace TORCHAMP_NAMESPACE

namespace torch {

/// torch::load for a GradScaler. For a damaged archive LibTorch's reader throws several kinds of
/// exceptions; here all are c10::Errors.
template <class... From>
void load(torchamp::GradScaler& scaler, From&&... from) {
  serialize::InputArchive archive;
  try {
    archive.load_from(std::forward<From>(from)...);
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    TORCHAMP_CHECK(false, "GradScaler::load: the archive cannot be read: ", error.what());
  }
  scaler.load(archive);
}

}  // namespace torch

#if TORCHAMP_BODIES
#include "torchamp/detail/core/scaler/grad_scaler-inl.h"          // IWYU pragma: export
#include "torchamp/detail/core/scaler/grad_scaler_archive-inl.h"  // IWYU pragma: export
#endif
