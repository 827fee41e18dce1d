// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. GradScalerOptions and GradScalerState: a scaler's options and saved state.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What GradScaler::update does at a limit. After a fused optimizer's step on a GPU, only the
/// device has the scale; then update() acts one or a few iterations later, when the value has
/// arrived on the host. It never waits for the value.
enum class AtLimit {
  keep_going,   ///< nothing
  warn,         ///< a LibTorch warning, each time that the limit is reached
  throw_error,  ///< update() throws a c10::Error and changes nothing
  call,         ///< calls GradScalerOptions::on_limit, each time, at the end of update()
};

/// How long a GradScaler checks for calls in an order that trains wrongly, such as a clip of scaled
/// gradients: see the guide's page on mistakes. It warns once of each mistake. A mistake that
/// begins later is not reported. Certain mistakes, such as a second unscale_, are errors in every
/// iteration.
struct CheckOrder {
  /// The number of iterations that are checked, from the first on. Skipped iterations are checked
  /// but do not count. If only a device holds the result, each iteration counts. Checked iterations
  /// are slower: the scaler compares weights and gradients, without waiting for a device. 0: none.
  int64_t first_iterations = 3;
};

/// The argument of GradScalerOptions::on_limit.
struct ScaleLimit {
  /// The kinds of limits.
  enum class Kind {
    min_scale,      ///< the scale should back off, but is at min_scale
    skips_in_a_row  ///< max_skips_in_a_row consecutive iterations were bad
  };
  Kind kind;               ///< the limit that was met
  double scale;            ///< the scale after update()
  int64_t skips_in_a_row;  ///< consecutive bad iterations, including this one
};

/// Options of a GradScaler. An aggregate, for designated initialisers: `GradScaler
/// scaler({.init_scale = 1024., .growth_interval = 100});`
///
/// The defaults behave like torch.amp.GradScaler. An iteration is "bad" if the gradients of any
/// optimizer held an inf or a NaN, otherwise "good".
struct GradScalerOptions {
  /// The initial scale.
  double init_scale = 65536.;
  /// The scale grows by this factor after growth_interval consecutive good iterations; above 1.
  double growth_factor = 2.;
  /// The scale is multiplied by this factor after a bad iteration; between 0 and 1.
  double backoff_factor = 0.5;
  /// Consecutive good iterations before the scale grows; from 1 to 2^31 - 1.
  int64_t growth_interval = 2000;
  /// False: scale() returns its argument, step() is the optimizer's own step, and all other calls
  /// do nothing.
  bool enabled = true;

  // Beyond torch.amp:

  /// False: only update(new_scale) changes the scale.
  bool dynamic = true;

  /// The lowest scale, rounded to fp32. The default is the smallest normal fp32 number, whose
  /// inverse is finite. torch.amp's scale reaches 0; dividing by it ruins the weights.
  double min_scale = std::numeric_limits<float>::min();
  /// The highest scale, rounded to fp32; by default the largest fp32 number.
  double max_scale = std::numeric_limits<float>::max();
  /// What happens when the scale is at min_scale and cannot back off.
  AtLimit at_min_scale = AtLimit::warn;

  /// The number of bad iterations until the scale backs off. 1: it backs off after every bad
  /// iteration. With n, it does not back off after the first n - 1 bad iterations, but after each
  /// later bad iteration, until the scale grows. Only growth of the scale resets the count. If only
  /// the device has the scale, a count above some 100,000 is approximate.
  int64_t hysteresis = 1;

  /// The value of growth_tracker initially and after a bad iteration; 0 or below (DeepSpeed: -1).
  int64_t growth_tracker_start = 0;

  /// If not 0: at_max_skips applies after this number of consecutive bad iterations, and after each
  /// multiple of it.
  int64_t max_skips_in_a_row = 0;
  /// What happens after max_skips_in_a_row consecutive bad iterations.
  AtLimit at_max_skips = AtLimit::throw_error;

  /// The function that AtLimit::call calls. It may call update(new_scale).
  std::function<void(const ScaleLimit&)> on_limit = nullptr;

  /// A function by which several processes agree on overflow. Its argument is a 0-dim fp32 tensor
  /// on the scale's device: 1 if this process found an inf or a NaN, otherwise 0. The function must
  /// make the value non-zero if it is 1 on any process, for example by a sum or a maximum over all
  /// processes; it may write in place or assign another tensor.
  ///
  /// The scaler calls it once per optimizer and iteration, even without gradients. There are two
  /// exceptions. A step with a closure calls it once per evaluation, so all processes must evaluate
  /// the loss equally often. With `recheck`, found_inf() before step() calls it once more, so call
  /// found_inf() on all processes or on none.
  std::function<void(at::Tensor& found_inf)> agree_found_inf = nullptr;

  /// True: step() checks the gradients again, in a second pass, after unscale_, clipping and
  /// changes by the program. torch.amp checks only once, so it misses infs and NaNs that appear
  /// after unscale_.
  bool recheck = false;

  /// Warnings of calls in an order that trains wrongly.
  CheckOrder check_order{};

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

  /// fairseq's DynamicLossScaler (fairseq/optim/dynamic_loss_scaler.py at 0d77035e), with its
  /// defaults. fairseq's min_loss_scale is 1e-4. Because scales are powers of two, the lowest scale
  /// here is the lowest power of two above 1e-4.
  static GradScalerOptions fairseq() {
    return {.init_scale = 0x1p15, .min_scale = 0x1p-13, .at_min_scale = AtLimit::throw_error};
  }

  /// For bf16 and fp32: the scale stays 1; steps with an inf or a NaN are skipped. If the program
  /// loads another scaler's state, the scale becomes that scaler's scale; update(1.) sets it to 1
  /// again.
  static GradScalerOptions skip_non_finite() { return {.init_scale = 1., .dynamic = false}; }

  /// A scale that only update(new_scale) changes.
  static GradScalerOptions fixed(double scale) { return {.init_scale = scale, .dynamic = false}; }
};

/// The contents of torch.amp.GradScaler.state_dict(), by the same names (its growth_tracker begins
/// with an underscore). The empty state of a disabled scaler has a scale of 0.
struct GradScalerState {
  double scale = 0.;               ///< 0 in an empty state
  double growth_factor = 2.;       ///< the scale's factor when it grows
  double backoff_factor = 0.5;     ///< the scale's factor after a bad iteration
  int64_t growth_interval = 2000;  ///< consecutive good iterations before the scale grows
  int64_t growth_tracker = 0;      ///< good iterations since growth or a bad iteration

  /// Whether this is the state of a disabled scaler.
  bool empty() const { return scale == 0.; }
  bool operator==(const GradScalerState&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
