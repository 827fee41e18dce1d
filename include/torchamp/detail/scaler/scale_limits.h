// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>

#include "torchamp/detail/copy_target.h"
#include "torchamp/detail/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

/// What GradScaler::update does about the limits of GradScalerOptions.
class Limits {
 public:
  /// The limits that an iteration has met, and what to say of them.
  struct Met {
    bool min_scale = false;
    bool skips_in_a_row = false;
    double scale = 0.;
    int64_t skips = 0;
  };

  static Met met(const GradScalerOptions& rule, const RuleState<double>& before,
                 const RuleState<double>& after) {
    const auto skips = static_cast<int64_t>(after.skips);
    return {.min_scale = stays_at_floor(rule, before, after),
            .skips_in_a_row = reaches_limit(rule, skips),
            .scale = after.scale,
            .skips = skips};
  }

  /// Throws if a limit that is met says so. Nothing has been changed yet.
  static void throw_if_met(const GradScalerOptions& rule, const Met& met) {
    TORCH_CHECK(
        !met.min_scale || rule.at_min_scale != AtLimit::throw_error,
        "GradScaler::update: gradients hold infs or NaNs and the scale, ", met.scale,
        ", is at min_scale. Look for what produces them (torchamp/overflow_report.h names the "
        "layers), or set at_min_scale to go on.");
    TORCH_CHECK(
        !met.skips_in_a_row || rule.at_max_skips != AtLimit::throw_error,
        "GradScaler::update: gradients held infs or NaNs in ", met.skips,
        " iterations in a row, max_skips_in_a_row being ", rule.max_skips_in_a_row,
        "; the scale is ", met.scale,
        ". Look for what produces them (torchamp/overflow_report.h names the layers), or set "
        "at_max_skips to go on.");
  }

  /// Warns or calls back. The iteration has ended.
  void announce(const GradScalerOptions& rule, const Met& met) {
    if (met.min_scale && rule.at_min_scale == AtLimit::warn && !warned_) {
      TORCH_WARN("GradScaler::update: gradients hold infs or NaNs and the scale, ", met.scale,
                 ", is at min_scale: steps are skipped until they are finite.");
    }
    if (met.skips_in_a_row && rule.at_max_skips == AtLimit::warn) {
      TORCH_WARN("GradScaler::update: gradients held infs or NaNs in ", met.skips,
                 " iterations in a row; the scale is ", met.scale, '.');
    }
    warned_ = met.min_scale || (warned_ && met.scale <= rule.min_scale);
    // A copy: the function may make another scaler of this one.
    const auto on_limit = rule.on_limit;
    if (met.min_scale && rule.at_min_scale == AtLimit::call) {
      on_limit({ScaleLimit::Kind::min_scale, met.scale, met.skips});
    }
    if (met.skips_in_a_row && rule.at_max_skips == AtLimit::call) {
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

  static bool watched(const GradScalerOptions& rule) {
    const bool floor =
        rule.at_min_scale == AtLimit::throw_error || rule.at_min_scale == AtLimit::call ||
        (rule.at_min_scale == AtLimit::warn && rule.min_scale > std::numeric_limits<float>::min());
    const bool skips = rule.max_skips_in_a_row > 0 && rule.at_max_skips != AtLimit::keep_going;
    return floor || skips;
  }

  /// What the latest news from the device says, once. `news` holds the scale and the skips.
  Met news(const GradScalerOptions& rule) {
    if (!arrived_.defined()) return {};
    const volatile float* const values = arrived_.const_data_ptr<float>();
    const double scale = values[0];
    const auto skips = static_cast<int64_t>(values[1]);
    const bool is_new = skips != seen_skips_;
    seen_skips_ = skips;
    if (!is_new || skips == 0) return {.scale = scale};
    return {.min_scale = rule.dynamic && scale <= rule.min_scale,
            .skips_in_a_row = reaches_limit(rule, skips),
            .scale = scale,
            .skips = skips};
  }

  /// Has `news` copied to where a later call of news() finds it.
  void send(const at::Tensor& news) {
    if (!arrived_.defined()) arrived_ = copy_target(news.device(), {2}).zero_();
    arrived_.copy_(news, /*non_blocking=*/true);
  }

 private:
  static bool reaches_limit(const GradScalerOptions& rule, int64_t skips) {
    return rule.max_skips_in_a_row > 0 && skips > 0 && skips % rule.max_skips_in_a_row == 0;
  }

  bool warned_ = false;  // since the scale was last above its floor
  at::Tensor arrived_;   // on the host
  int64_t seen_skips_ = 0;
};

}  // namespace torchamp::detail
