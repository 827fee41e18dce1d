// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief What a scaler is made with, and what of it is saved.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

class ScaleRule;

/// What torchamp/predictive_scale.h brings: see Note [Extras].
template <class Bool>
struct PredictiveScale {
  static_assert(sizeof(Bool) == 0,
                "torchamp: include torchamp/predictive_scale.h, which has "
                "GradScalerOptions::predictive(), follows_gradients and forgives_bad_losses.");
  static const ScaleRule* rule() { return nullptr; }
};

/// A bool whose setting needs torchamp/predictive_scale.h. Reading it does not.
class PredictiveSetting {
 public:
  PredictiveSetting() = default;
  template <std::same_as<bool> Bool>
  PredictiveSetting(Bool value) : rule_(value ? PredictiveScale<Bool>::rule() : nullptr) {}
  operator bool() const { return rule_ != nullptr; }
  /// Null where it is false.
  const ScaleRule* rule() const { return rule_; }

 private:
  const ScaleRule* rule_ = nullptr;
};

}  // namespace detail

/// What GradScaler::update does when a limit is met. Where only the device knows that (after a
/// fused optimizer's step on a GPU), update() does it an iteration or a few later, as soon as
/// the device has told the host: nothing waits for it.
enum class AtLimit {
  keep_going,   ///< nothing
  warn,         ///< a warning of LibTorch's, once for each time that the limit is reached
  throw_error,  ///< a c10::Error out of update(), which then has changed nothing
  call,         ///< GradScalerOptions::on_limit, each time, after update() has done its work
};

/// When the credit of bad iterations (GradScalerOptions::hysteresis) is filled up again.
enum class HysteresisRefill {
  growth,             ///< when the scale grows (Megatron, DeepSpeed)
  good_step,          ///< at every good iteration (DeepSpeed with consecutive_hysteresis, Apex)
  good_or_backed_off  ///< also after the scale was lowered (Paddle)
};

/// The limit that was met, for GradScalerOptions::on_limit.
struct ScaleLimit {
  /// Which limit it is.
  enum class Kind {
    min_scale,      ///< the scale ought to be lowered and is at min_scale already
    skips_in_a_row  ///< max_skips_in_a_row iterations in a row were bad
  };
  /// Which limit was met.
  Kind kind;
  double scale;            ///< the scale as update() has left it
  int64_t skips_in_a_row;  ///< bad iterations in a row, this one included
};

/// What a GradScaler is made with. An aggregate, for designated initialisers:
/// `GradScaler scaler({.init_scale = 1024., .growth_interval = 100});`
///
/// The defaults behave as torch.amp.GradScaler does. A "bad" iteration is one in which any
/// optimizer's gradients held an inf or a NaN, a "good" one any other.
struct GradScalerOptions {
  /// The scale at first.
  double init_scale = 65536.;
  /// What the scale is multiplied by after growth_interval good iterations in a row; above 1.
  double growth_factor = 2.;
  /// What the scale is multiplied by after a bad iteration; between 0 and 1.
  double backoff_factor = 0.5;
  /// Good iterations in a row before the scale grows; from 1 to 2^31 - 1.
  int64_t growth_interval = 2000;
  /// False: scale() returns its argument, step() is the optimizer's own, the rest does nothing.
  bool enabled = true;

  // ---- Beyond torch.amp
  // --------------------------------------------------------------------------

  /// False: only update(new_scale) changes the scale.
  bool dynamic = true;

  /// The scale is never below min_scale nor above max_scale, each rounded to fp32. The default
  /// floor is the smallest scale whose inverse is sure to be finite (torch.amp goes on to 0,
  /// divides by it and ruins the weights); the default ceiling is the largest fp32 number.
  double min_scale = std::numeric_limits<float>::min();
  /// The scale is never above it; the largest fp32 number by default.
  double max_scale = std::numeric_limits<float>::max();
  /// What happens when the scale ought to be lowered and is at min_scale already.
  AtLimit at_min_scale = AtLimit::warn;

  /// Number of overflows that back off the scale; 1 backs off at the first. A good iteration
  /// between them does not reset the count, unless hysteresis_refill says so.
  int64_t hysteresis = 1;
  /// When those bad iterations are counted from the start again.
  HysteresisRefill hysteresis_refill = HysteresisRefill::growth;

  /// A bad iteration lowers the scale only if at least this fraction of the iterations since the
  /// scale last changed were bad; from 0 to 1 (fairseq).
  double overflow_tolerance = 0.;

  /// Where growth_tracker starts, at first and after a bad iteration; 0 or below (DeepSpeed: -1).
  int64_t growth_tracker_start = 0;

  /// 0: no limit. n: at_max_skips happens after every n bad iterations in a row.
  int64_t max_skips_in_a_row = 0;
  /// What happens after max_skips_in_a_row bad iterations.
  AtLimit at_max_skips = AtLimit::throw_error;

  /// For AtLimit::call. It may call update(new_scale).
  std::function<void(const ScaleLimit&)> on_limit = nullptr;

  /// Makes the processes of a distributed program agree: called once for each optimizer and
  /// iteration, on every path, with the 0-dim fp32 tensor that is 1 if this process found an inf or
  /// a NaN and 0 otherwise, on the scale's device. It must leave there, in place or as another
  /// tensor, something non-zero if any process found one: a sum or a maximum over all of them. It
  /// is called without gradients, too. More often, on all processes alike: in a step with a
  /// closure, once for each evaluation (the processes must evaluate equally often, as they do where
  /// their losses and gradients agree); with `recheck`, by found_inf() before step() as well as by
  /// step().
  std::function<void(at::Tensor& found_inf)> agree_found_inf = nullptr;

  /// True: the scale follows the gradients' magnitude, see predictive(). The growth and backoff
  /// factors and growth_interval then change how large the scaled gradients are to be. Not without
  /// `dynamic`. A bool that only a program with torchamp/predictive_scale.h can set.
  detail::PredictiveSetting follows_gradients{};

  /// For follows_gradients. True: a bad iteration in which scale() was given an inf or a NaN (a
  /// batch of NaNs, an overflow in forward) is skipped and leaves the scale as it is, since a lower
  /// one would not have mended it. Over several processes only with agree_largest, which tells all
  /// of them: one's loss is not another's, even where their gradients are averaged. A step with a
  /// closure is skipped then, without another evaluation. A program that leaves an iteration
  /// without update() calls discard(), or its bad loss counts for the next. Costs a small kernel
  /// for each scale() and some for each update(); reads nothing (but for a step with a closure that
  /// is bad). A bool that only a program with torchamp/predictive_scale.h can set.
  detail::PredictiveSetting forgives_bad_losses{};

  /// For follows_gradients with agree_found_inf: called at the same times, with the largest
  /// magnitude of this process's scaled gradients (0-dim fp32). It must leave the maximum over all
  /// processes there, in place or as another tensor, for their scales to stay alike;
  /// found_inf_agreement() gives such a function, too.
  std::function<void(at::Tensor& largest)> agree_largest = nullptr;

  /// True: step() looks at the gradients once more, as unscale_, clipping and the program have left
  /// them, at the cost of a second pass. torch.amp does not see what becomes non-finite after its
  /// one check.
  bool recheck = false;

  /// torch.amp.GradScaler (torch/amp/grad_scaler.py of PyTorch 2.15): the defaults.
  static GradScalerOptions torch() { return {}; }

  /// Megatron-LM's DynamicGradScaler (megatron/core/optimizer/grad_scaler.py at 00caa53a), with the
  /// defaults of its command line.
  static GradScalerOptions megatron() {
    return {.init_scale = 0x1p32,
            .growth_interval = 1000,
            .min_scale = 1.,
            .at_min_scale = AtLimit::keep_going,
            .hysteresis = 2};
  }

  /// DeepSpeed's DynamicLossScaler (deepspeed/runtime/fp16/loss_scaler.py at 03365187), with the
  /// defaults of its "fp16" configuration.
  static GradScalerOptions deepspeed() {
    return {.growth_interval = 1000,
            .min_scale = 1.,
            .at_min_scale = AtLimit::throw_error,
            .hysteresis = 2,
            .growth_tracker_start = -1};
  }

  /// fairseq's DynamicLossScaler (fairseq/optim/dynamic_loss_scaler.py at 0d77035e), with its own
  /// defaults, for scales that are powers of two: its min_loss_scale of 1e-4 is never reached, so
  /// the floor is the last power above it.
  static GradScalerOptions fairseq() {
    return {.init_scale = 0x1p15, .min_scale = 0x1p-13, .at_min_scale = AtLimit::throw_error};
  }

  /// Follows the gradients' magnitude: OpenSeq2Seq's LogMaxScaler
  /// (open_seq2seq/optimizers/automatic_loss_scaler.py), with the mistakes of its averages mended:
  /// see Note [A scale that looks ahead]. From the first backward() on, the scale is the largest
  /// power of two at which the largest gradient is expected to stay well within fp16's range,
  /// from a running mean and variance of its logarithm, and from its latest value. So it need not
  /// grow slowly, and nearly no step is skipped to find it. Over several processes set
  /// agree_found_inf and agree_largest; one of them alone is an error. Decided on the device,
  /// without a read: the largest magnitude is what the check for infs gives. (Where unscale_
  /// divides the gradients, that check is a pass of its own.) Gradients in fp16 and in fp32 behind
  /// fp16 layers alike. A batch of NaNs is taken for an overflow, but tells nothing of the
  /// gradients: after some hundred iterations a run of them costs a factor of 2 or 4, from the
  /// second good iteration on until growth_interval iterations were good; sooner, while the
  /// gradients' variance is hardly known, up to 2^5. Where batches of NaNs come
  /// more often than that, set forgives_bad_losses, and they cost their own step alone. As long as
  /// all gradients are 0, the scale grows as torch.amp's does. Needs torchamp/predictive_scale.h.
  template <class Options = GradScalerOptions>
  static Options predictive() {
    return Options{.max_scale = 0x1p32, .follows_gradients = true};
  }

  /// For bf16 and fp32: the scale is 1 and stays so; a step with an inf or a NaN is skipped.
  /// (A file of another scaler brings its scale along; update(1.) sets it back.)
  static GradScalerOptions skip_non_finite() { return {.init_scale = 1., .dynamic = false}; }

  /// A scale that nothing but update(new_scale) changes.
  static GradScalerOptions fixed(double scale) { return {.init_scale = scale, .dynamic = false}; }
};

/// What torch.amp.GradScaler.state_dict() holds, by the same names (its growth_tracker has an
/// underscore in front). An empty state, as a disabled scaler gives it, has a scale of 0.
struct GradScalerState {
  double scale = 0.;               ///< 0 in an empty state
  double growth_factor = 2.;       ///< by which the scale grows
  double backoff_factor = 0.5;     ///< by which it is lowered after a bad iteration
  int64_t growth_interval = 2000;  ///< good iterations in a row before it grows
  int64_t growth_tracker = 0;      ///< good iterations since the scale grew or a bad one

  /// Whether it is that of a disabled scaler.
  bool empty() const { return scale == 0.; }
  bool operator==(const GradScalerState&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
