// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/threshold_backward.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "torchamp/detail/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

// Note [Hysteresis on a device]
// A device has one kernel for a whole update, torch.amp's, which takes any factors and knows
// nothing of hysteresis. Called some times more it does that, too, in 5 launches to 8 instead of
// some 45:
//   spent     as a scale that is 2^n after n bad iterations: "backed off" by 2, and, where the
//             credit is refilled, "grown" to next to nothing; then clamped to 1 to 2^hysteresis
//   the scale backed off by 1 and grown
//   the scale backed off where the iteration was bad and all credit is spent, and grown by 1
// What an overflow_tolerance needs to know besides is not kept up to date.

/// The credit of bad iterations on a device, and the update of a scale that goes by it.
class SpentCredit {
 public:
  explicit SpentCredit(const GradScalerOptions& options)
      : serves_(options.dynamic && !options.follows_gradients && options.overflow_tolerance == 0. &&
                options.hysteresis <= most && !is_torch_update(options)),
        hysteresis_(static_cast<double>(options.hysteresis)),
        refill_(options.hysteresis_refill) {}

  /// Whether after_update() is that update.
  bool serves() const { return serves_; }
  bool defined() const { return spent_.defined(); }

  /// `like`: the scale.
  void create(const at::Tensor& like) {
    spent_ = at::full({}, 1., like.options());
    trackers_ = at::full({3}, 0, like.options().dtype(at::kInt));
  }

  /// 0-dim, int32: good iterations since the scale grew or a bad one.
  at::Tensor growth_tracker() const { return trackers_.select(0, 0); }

  void set(double credit, double growth_tracker) {
    spent_.fill_(std::exp2(hysteresis_ - credit));
    trackers_.narrow(0, 0, counts_for_credit() ? 2 : 1).fill_(growth_tracker);
  }
  /// Reads the device.
  double credit() const { return hysteresis_ - std::log2(spent_.item<double>()); }
  void limit_growth_tracker(int64_t last) { trackers_.narrow(0, 0, 2).clamp_max_(last); }

  /// `scale` after an iteration, but for its limits.
  void update(const GradScalerOptions& options, at::Tensor& scale, const at::Tensor& found_inf) {
    constexpr int64_t never = std::numeric_limits<int32_t>::max();
    at::Tensor scale_tracker = trackers_.select(0, 0), credit_tracker = trackers_.select(0, 1),
               unused = trackers_.select(0, 2);
    const double all_spent = std::exp2(hysteresis_);
    at::_amp_update_scale_(spent_, credit_tracker, found_inf, next_to_nothing, 2.,
                           counts_for_credit() ? options.growth_interval : 1);
    const at::Tensor lowers = at::threshold_backward(found_inf, spent_, 0.75 * all_spent);
    if (refill_ == HysteresisRefill::good_or_backed_off) {
      at::_amp_update_scale_(spent_, unused, lowers, 1., next_to_nothing, never);
    }
    spent_.clamp_(1., all_spent);
    at::_amp_update_scale_(scale, scale_tracker, found_inf, options.growth_factor, 1.,
                           options.growth_interval);
    at::_amp_update_scale_(scale, unused, lowers, 1., options.backoff_factor, never);
    if (options.growth_tracker_start != 0) {
      trackers_.narrow(0, 0, counts_for_credit() ? 2 : 1)
          .add_(found_inf.to(at::kInt), options.growth_tracker_start);
    }
  }

 private:
  static constexpr int64_t most = 60;
  static constexpr double next_to_nothing = 0x1p-100;

  bool counts_for_credit() const { return refill_ == HysteresisRefill::growth; }

  bool serves_;
  double hysteresis_;
  HysteresisRefill refill_;
  at::Tensor spent_;     // 0-dim fp32
  at::Tensor trackers_;  // int32: the scale's, the credit's, and one that does not matter
};

}  // namespace torchamp::detail
