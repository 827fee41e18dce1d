// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>

#include "torchamp/detail/host_values.h"
#include "torchamp/detail/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

/// What GradScaler::update does about the limits of GradScalerOptions.
class ScaleLimits {
 public:
  /// The limits that an iteration has met, and what to say of them.
  struct Met {
    bool min_scale = false;
    bool skips_in_a_row = false;
    double scale = 0.;
    int64_t skips = 0;
  };

  static Met met(const GradScalerOptions& options, const ScaleMemory<double>& before,
                 const ScaleMemory<double>& after) {
    const auto skips = static_cast<int64_t>(after.skips);
    return {.min_scale = stays_at_floor(options, before, after),
            .skips_in_a_row = reaches_limit(options, skips),
            .scale = after.scale,
            .skips = skips};
  }

  /// Throws if a limit that is met says so. Nothing has been changed yet.
  static void throw_if_met(const GradScalerOptions& options, const Met& met) {
    TORCH_CHECK(
        !met.min_scale || options.at_min_scale != AtLimit::throw_error,
        "GradScaler::update: gradients hold infs or NaNs and the scale, ", met.scale,
        ", is at min_scale. Look for what produces them (torchamp/overflow_report.h names the "
        "layers), or set at_min_scale to go on.");
    TORCH_CHECK(
        !met.skips_in_a_row || options.at_max_skips != AtLimit::throw_error,
        "GradScaler::update: gradients held infs or NaNs in ", met.skips,
        " iterations in a row, max_skips_in_a_row being ", options.max_skips_in_a_row,
        "; the scale is ", met.scale,
        ". Look for what produces them (torchamp/overflow_report.h names the layers), or set "
        "at_max_skips to go on.");
  }

  /// Warns or calls back. The iteration has ended.
  void announce(const GradScalerOptions& options, const Met& met) {
    if (met.min_scale && options.at_min_scale == AtLimit::warn && !warned_) {
      TORCH_WARN("GradScaler::update: gradients hold infs or NaNs and the scale, ", met.scale,
                 ", is at min_scale: steps are skipped until they are finite.");
    }
    if (met.skips_in_a_row && options.at_max_skips == AtLimit::warn) {
      TORCH_WARN("GradScaler::update: gradients held infs or NaNs in ", met.skips,
                 " iterations in a row; the scale is ", met.scale, '.');
    }
    warned_ = met.min_scale || (warned_ && met.scale <= options.min_scale);
    // A copy: the function may make another scaler of this one.
    const auto on_limit = options.on_limit;
    if (met.min_scale && options.at_min_scale == AtLimit::call) {
      on_limit({ScaleLimit::Kind::min_scale, met.scale, met.skips});
    }
    if (met.skips_in_a_row && options.at_max_skips == AtLimit::call) {
      on_limit({ScaleLimit::Kind::skips_in_a_row, met.scale, met.skips});
    }
  }

  // Note [Limits that only the device knows]
  //
  // Where the host does not know the scale (see Note [Where the scale is known]), the scale and the
  // count of skips are copied to host memory behind the update, and nobody waits for the copy. A
  // later update() finds there what has arrived meanwhile and acts on it, an iteration or a few
  // late. With the default limits there is nothing to act on but a warning at 2^-126, so no copy is
  // made.

  static bool watched(const GradScalerOptions& options) {
    const bool floor = options.at_min_scale == AtLimit::throw_error ||
                       options.at_min_scale == AtLimit::call ||
                       (options.at_min_scale == AtLimit::warn &&
                        options.min_scale > std::numeric_limits<float>::min());
    const bool skips =
        options.max_skips_in_a_row > 0 && options.at_max_skips != AtLimit::keep_going;
    return floor || skips;
  }

  /// The limits that the mirror shows to be met, each once.
  Met met_in_mirror(const GradScalerOptions& options) {
    if (mirror_.empty()) return {};
    const double scale = mirror_[0];
    const auto skips = static_cast<int64_t>(mirror_[1]);
    const bool is_new = skips != seen_skips_;
    seen_skips_ = skips;
    if (!is_new || skips == 0) return {.scale = scale};
    return {.min_scale = options.dynamic && scale <= options.min_scale,
            .skips_in_a_row = reaches_limit(options, skips),
            .scale = scale,
            .skips = skips};
  }

  /// Has `scale_and_skips` copied to where a later met_in_mirror() finds them.
  void send(const at::Tensor& scale_and_skips) { mirror_.send(scale_and_skips); }

 private:
  static bool reaches_limit(const GradScalerOptions& options, int64_t skips) {
    return options.max_skips_in_a_row > 0 && skips > 0 && skips % options.max_skips_in_a_row == 0;
  }

  bool warned_ = false;  // since the scale was last above its floor
  HostMirror mirror_;    // of the scale and the skips
  int64_t seen_skips_ = 0;
};

}  // namespace torchamp::detail
