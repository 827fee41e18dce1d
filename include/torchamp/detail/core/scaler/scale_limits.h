// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// How GradScaler::update handles the limits of GradScalerOptions.
class ScaleLimits {
 public:
  /// The limits that an iteration has met, and the numbers for messages.
  struct Met {
    bool min_scale = false;
    bool skips_in_a_row = false;
    double scale = 0.;
    int64_t skips = 0;
  };

  static Met met(const GradScalerOptions& options, const ScaleMemory<double>& before,
                 const ScaleMemory<double>& after) {
    const auto skips = static_cast<int64_t>(after.skips);
    const bool lowered = options.dynamic && skips > 0 && after.credit <= 0.;
    return {.min_scale = lowered && before.scale <= options.min_scale,
            .skips_in_a_row = reaches_limit(options, skips),
            .scale = after.scale,
            .skips = skips};
  }

  /// Throws if a limit that is met is set to throw. Nothing has been changed yet.
  static void throw_if_met(const GradScalerOptions& options, const Met& met) {
    TORCHAMP_CHECK(!met.min_scale || options.at_min_scale != AtLimit::throw_error,
                   "GradScaler::update: gradients hold infs or NaNs and the scale, ", met.scale,
                   ", is at min_scale. Look for what produces them (torchamp/overflow_report.h "
                   "names the layers), or set at_min_scale to continue.");
    TORCHAMP_CHECK(!met.skips_in_a_row || options.at_max_skips != AtLimit::throw_error,
                   "GradScaler::update: gradients held infs or NaNs in ", met.skips,
                   " consecutive iterations; max_skips_in_a_row is ", options.max_skips_in_a_row,
                   "; the scale is ", met.scale,
                   ". Look for what produces them (torchamp/overflow_report.h names the layers), ",
                   "or set at_max_skips to continue.");
  }

  /// Warns or calls back. The iteration has ended.
  void announce(const GradScalerOptions& options, const Met& met) {
    if (met.min_scale && options.at_min_scale == AtLimit::warn && !warned_) {
      warn({"GradScaler::update: gradients hold infs or NaNs and the scale, ", met.scale,
            ", is at min_scale: steps are skipped until they are finite."});
    }
    if (met.skips_in_a_row && options.at_max_skips == AtLimit::warn) {
      warn({"GradScaler::update: gradients held infs or NaNs in ", met.skips,
            " iterations in a row; the scale is ", met.scale, '.'});
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
  // If the state is on a device, the scale and the count of skips are copied to host memory after
  // each update, and a later update() acts on the copy that has arrived. With the default limits
  // the only action is a warning at 2^-126, so no copy is made.

  static bool watched(const GradScalerOptions& options) {
    const bool floor = options.at_min_scale == AtLimit::throw_error ||
                       options.at_min_scale == AtLimit::call ||
                       (options.at_min_scale == AtLimit::warn &&
                        options.min_scale > std::numeric_limits<float>::min());
    const bool skips =
        options.max_skips_in_a_row > 0 && options.at_max_skips != AtLimit::keep_going;
    return floor || skips;
  }

  HostMirror mirror;  ///< of the scale and the skips

  /// Another state has replaced the state that the mirror shows.
  void forget() {
    mirror = {};
    seen_skips_ = 0;
  }

  /// The limits that the mirror shows to be met, each once.
  Met met_in_mirror(const GradScalerOptions& options) {
    if (mirror.empty()) return {};
    const double scale = mirror[0];
    const auto skips = static_cast<int64_t>(mirror[1]);
    const bool is_new = skips != seen_skips_;
    seen_skips_ = skips;
    if (!is_new || skips == 0) return {.scale = scale};
    return {.min_scale = options.dynamic && scale <= options.min_scale,
            .skips_in_a_row = reaches_limit(options, skips),
            .scale = scale,
            .skips = skips};
  }

 private:
  static bool reaches_limit(const GradScalerOptions& options, int64_t skips) {
    return options.max_skips_in_a_row > 0 && skips > 0 && skips % options.max_skips_in_a_row == 0;
  }

  bool warned_ = false;  // since the scale was last above min_scale
  int64_t seen_skips_ = 0;
};

/// Warns of a long run of bad iterations, once. If the run's length is on the device, it is copied
/// to the host once in `interval` iterations, replays included; nothing waits for the copy.
class SkipWarning final : public ReplayedState {
 public:
  static constexpr int64_t many = 100, interval = 32;

  void note(double skips) {
    if (skips < many || warned_) return;
    warned_ = true;
    warn({"GradScaler::update: gradients held infs or NaNs in the last ",
          static_cast<int64_t>(skips), " iterations, and their steps were skipped. ",
          "If the gradients of a skipped step are not cleared, its infs and NaNs stay: call "
          "zero_grad() in each iteration. If the data, the weights or the buffers (running "
          "statistics of a batch norm) hold a NaN, no scale helps: overflow_report() "
          "(torchamp/overflow_report.h) names the layers whose gradients and buffers do, "
          "first_non_finite_op() (torchamp/non_finite_op.h) the op that made the first one. "
          "This warning is given once."});
  }

  /// Counts an update on the device. `skips`, 0-dim fp32: the present skips in a row.
  void count_iteration(const at::Tensor& skips) {
    skips_ = skips;
    ++iterations_;
  }
  /// Warns if the copy that has arrived shows a long run.
  void warn_if_arrived() {
    if (!mirror_.empty()) note(mirror_[0]);
  }

  void settle() override {}
  bool holds() override { return true; }
  void note_replay() override {
    ++iterations_;
    warn_if_arrived();
  }
  bool wants_look() const override { return iterations_ >= interval; }
  void look() override {
    iterations_ = 0;
    mirror_.send(skips_);
  }

 private:
  bool warned_ = false;
  int64_t iterations_ = 0;  // since the last copy
  at::Tensor skips_;
  HostMirror mirror_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
