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

/// What GradScaler::update does at a limit. Where only the device knows (after a fused optimizer's
/// step on a GPU), it acts an iteration or a few later, when the device has told the host, without
/// waiting.
enum class AtLimit {
  keep_going,   ///< nothing
  warn,         ///< a LibTorch warning, each time that the limit is reached
  throw_error,  ///< update() throws a c10::Error and changes nothing
  call,         ///< calls GradScalerOptions::on_limit, each time, at the end of update()
};

/// How long a GradScaler looks for calls in an order that trains wrongly, such as a clip of scaled
/// gradients: see the guide's page on mistakes. It warns once of each. A mistake that begins later
/// is not reported. Errors that are certain, such as a second unscale_, do not depend on this.
struct CheckOrder {
  /// Iterations from the first on. These are slower: they compare weights and gradients, without
  /// waiting for a device. 0: none.
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
  /// The factor after growth_interval consecutive good iterations; above 1.
  double growth_factor = 2.;
  /// The factor after a bad iteration; between 0 and 1.
  double backoff_factor = 0.5;
  /// Consecutive good iterations before the scale grows; from 1 to 2^31 - 1.
  int64_t growth_interval = 2000;
  /// False: scale() returns its argument, step() is the optimizer's own, all else does nothing.
  bool enabled = true;

  // Beyond torch.amp:

  /// False: only update(new_scale) changes the scale.
  bool dynamic = true;

  /// The lowest scale, rounded to fp32. The default is the smallest scale with a finite inverse.
  /// torch.amp's scale reaches 0; dividing by it ruins the weights.
  double min_scale = std::numeric_limits<float>::min();
  /// The highest scale, rounded to fp32; by default the largest fp32 number.
  double max_scale = std::numeric_limits<float>::max();
  /// What happens when the scale should back off, but is at min_scale.
  AtLimit at_min_scale = AtLimit::warn;

  /// Number of overflows that back off the scale; 1 backs off at the first. Only growth of the
  /// scale resets the count. Above some 100,000, it is approximate where only the device knows the
  /// scale.
  int64_t hysteresis = 1;

  /// The value of growth_tracker initially and after a bad iteration; 0 or below (DeepSpeed: -1).
  int64_t growth_tracker_start = 0;

  /// If not 0: at_max_skips happens after each such number of consecutive bad iterations.
  int64_t max_skips_in_a_row = 0;
  /// What happens then.
  AtLimit at_max_skips = AtLimit::throw_error;

  /// For AtLimit::call. It may call update(new_scale).
  std::function<void(const ScaleLimit&)> on_limit = nullptr;

  /// Makes several processes agree on overflow: called once per optimizer and iteration, on every
  /// path (also without gradients), with a 0-dim fp32 tensor on the scale's device, which is 1 if
  /// this process found an inf or a NaN, otherwise 0. It must leave a non-zero value there, in
  /// place or as another tensor, if any process found one: a sum or a maximum over all. Called more
  /// often, on all processes alike, in a step with a closure (once per evaluation; all processes
  /// must evaluate equally often, as they do if their losses and gradients agree) and with
  /// `recheck` (by found_inf() before step() as well).
  std::function<void(at::Tensor& found_inf)> agree_found_inf = nullptr;

  /// True: step() checks the gradients again after unscale_, clipping and changes by the program,
  /// in a second pass. torch.amp does not see what becomes non-finite after its only check.
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

  /// fairseq's DynamicLossScaler (fairseq/optim/dynamic_loss_scaler.py at 0d77035e), with its own
  /// defaults, for scales that are powers of two: its min_loss_scale of 1e-4 is never reached, so
  /// the floor is the last power above it.
  static GradScalerOptions fairseq() {
    return {.init_scale = 0x1p15, .min_scale = 0x1p-13, .at_min_scale = AtLimit::throw_error};
  }

  /// For bf16 and fp32: the scale stays 1; steps with an inf or a NaN are skipped. Loading another
  /// scaler's state loads its scale; update(1.) resets it.
  static GradScalerOptions skip_non_finite() { return {.init_scale = 1., .dynamic = false}; }

  /// A scale that only update(new_scale) changes.
  static GradScalerOptions fixed(double scale) { return {.init_scale = scale, .dynamic = false}; }
};

/// The contents of torch.amp.GradScaler.state_dict(), by the same names (its growth_tracker begins
/// with an underscore). The empty state of a disabled scaler has a scale of 0.
struct GradScalerState {
  double scale = 0.;               ///< 0 in an empty state
  double growth_factor = 2.;       ///< the scale's factor when it grows
  double backoff_factor = 0.5;     ///< its factor after a bad iteration
  int64_t growth_interval = 2000;  ///< consecutive good iterations before it grows
  int64_t growth_tracker = 0;      ///< good iterations since it grew or since a bad one

  /// Whether it is that of a disabled scaler.
  bool empty() const { return scale == 0.; }
  bool operator==(const GradScalerState&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
