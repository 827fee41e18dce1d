// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/scaler/scale_rule.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Hysteresis on a device]
// A device has one kernel for a whole update, torch.amp's, which takes any factors and knows
// nothing of hysteresis. Called some times more it does that, too, in 5 launches to 8 instead of
// some 45:
//   spent     as a scale that is 2^n after n bad iterations: "backed off" by 2, and, where the
//             credit is refilled, "grown" to next to nothing; then clamped to 1 to 2^hysteresis
//             (a smaller base serves a hysteresis above 60: up to some 10^4 it counts exactly)
//   the scale backed off by 1 and grown
//   the scale backed off where the iteration was bad and all credit is spent, and grown by 1
// An overflow_tolerance takes some ops more; what it needs to know is kept up to date for it alone.

/// The precision in which a device computes an update.
inline at::ScalarType number_type_on(at::Device device) {
  return facts_of(device.type()).fp64 == Fp64::no ? at::kFloat : at::kDouble;
}

/// The update of a scale that no ScaleRule changes.
class CountedUpdate final : public DeviceUpdate {
 public:
  CountedUpdate(const GradScalerOptions& options, const ScaleMemory<double>& values,
                const at::Tensor& scale)
      : hysteresis_(static_cast<double>(options.hysteresis)),
        bits_(std::min(1., 60. / hysteresis_)),
        tracks_credit_(options.hysteresis_refill == HysteresisRefill::growth),
        trackers_(at::full({3}, 0, scale.options().dtype(at::kInt))),
        tracker_(trackers_.select(0, 0)),
        credit_tracker_(trackers_.select(0, 1)),
        unused_(trackers_.select(0, 2)),
        own_trackers_(trackers_.narrow(0, 0, tracks_credit_ ? 2 : 1)) {
    if (!is_torch_update(options)) spent_ = at::full({}, 1., scale.options());
    if (options.overflow_tolerance > 0.) {
      const auto number = scale.options().dtype(number_type_on(scale.device()));
      since_change_ = at::full({}, 0., number);
      overflows_ = at::full({}, 0., number);
    }
    CountedUpdate::set(values);
  }

  void set(const ScaleMemory<double>& values) override {
    own_trackers_.fill_(values.growth_tracker);
    if (spent_.defined()) spent_.fill_(std::exp2((hysteresis_ - values.credit) * bits_));
    if (!since_change_.defined()) return;
    since_change_.fill_(values.since_change);
    overflows_.fill_(values.overflows);
  }

  void read(ScaleMemory<double>& values) const override {
    values.growth_tracker = tracker_.item<double>();
    values.credit = hysteresis_;
    if (spent_.defined()) values.credit -= std::round(std::log2(spent_.item<double>()) / bits_);
    if (!since_change_.defined()) return;
    values.since_change = since_change_.item<double>();
    values.overflows = overflows_.item<double>();
  }

  void limit_growth_tracker(int64_t last) override { trackers_.clamp_max_(last); }

  void make(const GradScalerOptions& options, const at::Tensor& scale_tensor,
            const at::Tensor& found_inf, const at::Tensor& /*largest*/,
            const at::Tensor& /*skips*/) override {
    at::Tensor scale = scale_tensor;
    if (!spent_.defined()) {
      at::_amp_update_scale_(scale, tracker_, found_inf, options.growth_factor,
                             options.backoff_factor, options.growth_interval);
      return;
    }
    constexpr int64_t never = std::numeric_limits<int32_t>::max();
    constexpr double next_to_nothing = 0x1p-100;
    at::_amp_update_scale_(spent_, credit_tracker_, found_inf, next_to_nothing, std::exp2(bits_),
                           tracks_credit_ ? options.growth_interval : 1);
    at::Tensor lowers =
        at::threshold_backward(found_inf, spent_, std::exp2((hysteresis_ - 0.5) * bits_));
    if (since_change_.defined()) lowers = tolerate(options, found_inf, lowers);
    if (options.hysteresis_refill == HysteresisRefill::good_or_backed_off) {
      at::_amp_update_scale_(spent_, unused_, lowers, 1., next_to_nothing, never);
    }
    spent_.clamp_(1., std::exp2(hysteresis_ * bits_));
    at::_amp_update_scale_(scale, tracker_, found_inf, options.growth_factor, 1.,
                           options.growth_interval);
    at::_amp_update_scale_(scale, unused_, lowers, 1., options.backoff_factor, never);
    if (options.growth_tracker_start != 0) {
      own_trackers_.add_(found_inf.to(at::kInt), options.growth_tracker_start);
    }
  }

 private:
  /// What is left of `lowers` where few iterations were bad. Before the growth tracker changes.
  at::Tensor tolerate(const GradScalerOptions& options, const at::Tensor& found_inf,
                      const at::Tensor& lowers) {
    since_change_.add_(1.);
    overflows_.add_(found_inf);
    const at::Tensor many = overflows_.div(since_change_).ge(options.overflow_tolerance);
    const at::Tensor grows = tracker_.eq(options.growth_interval - 1).mul(found_inf.eq(0.));
    at::Tensor still = lowers.mul(many);
    const at::Tensor stays = still.eq(0.);
    overflows_.mul_(stays);
    since_change_.mul_(stays.logical_and(grows.logical_not()));
    return still;
  }

  double hysteresis_;
  double bits_;          // of the factor by which `spent_` counts
  bool tracks_credit_;   // until it is refilled
  at::Tensor spent_;     // 0-dim fp32; undefined where one bad iteration lowers the scale
  at::Tensor trackers_;  // int32: the scale's, the credit's, and one that does not matter
  at::Tensor tracker_, credit_tracker_, unused_;  // the same, 0-dim
  at::Tensor own_trackers_;                       // those that start anew after a bad iteration
  at::Tensor since_change_, overflows_;           // undefined without an overflow_tolerance
};

}  // namespace torchamp::detail
