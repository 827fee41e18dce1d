// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/scaler/scale_bound.h"
#include "torchamp/detail/core/scaler/skip_warning.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// What the host knows of a scale on a device without reading it: bounds of the scale, and the
/// skips in a row some time ago. Replays of a CudaGraph are followed, too.
class FollowedScale {
 public:
  /// The host has set the scale; see ScaleBound.
  void set(double scale, int64_t good_in_a_row) { followed_->bound.set(scale, good_in_a_row); }
  void set_unknown(double max_scale) { followed_->bound.set_unknown(max_scale); }

  /// From now on replays may change the scale: those of a CudaGraph, if this is called in its body,
  /// or else, if no CudaGraph is known that they could be of, some that the host never hears of.
  void expect_replays() {
    if (is_replayed()) return;
    replays_ = GraphBody::is_running() ? Replays::followed : Replays::unseen;
  }

  /// Whether the scale is `value`, and no replay changes it.
  bool stays_at(double value) { return !is_replayed() && followed_->bound.value() == value; }

  bool may_be_below(double limit, const at::Tensor& scale, const GradScalerOptions& options) {
    if (replays_ == Replays::unseen) return true;
    CapturedBound* const captured = captured_bound(scale, options);
    return captured ? captured->may_be_below(limit) : followed_->bound.value() < limit;
  }
  bool may_be_above(double limit, const at::Tensor& scale, const GradScalerOptions& options) {
    if (replays_ == Replays::unseen) return true;
    CapturedBound* const captured = captured_bound(scale, options);
    return captured ? captured->may_be_above(limit) : followed_->bound.at_most() > limit;
  }

  /// The device has made an update. The bounds of the scale follow, and copies to the host go under
  /// way where they are due: of the scale, and of the skips in a row.
  void note_update(const at::Tensor& scale, const at::Tensor& skips,
                   const GradScalerOptions& options) {
    const bool lowers = needs_lower_bound(options);
    followed_->bound.update(options, lowers);
    CapturedBound* const captured = captured_bound(scale, options);
    if (captured) {
      captured->add_update(lowers);  // each replay follows, and copies
    } else if (lowers) {
      followed_->bound.look_at(scale);
    }
    watch_skips(skips);
  }

  /// Warns of a long run of skips if one is known of.
  void warn_of_skips(bool has_kept_gradients) { followed_->warning.look(has_kept_gradients); }
  void warn_of_skips(double skips, bool has_kept_gradients) {
    followed_->warning.note(skips, has_kept_gradients);
  }

 private:
  enum class Replays {
    none,
    followed,  ///< see Note [What replays do to the scale]
    unseen,    ///< the scale may be anything
  };

  /// What replays may still need when the scaler is gone.
  struct Followed {
    ScaleBound bound;
    SkipWarning warning;
  };

  /// Whether anybody asks how small the scale may be: a fixed one stays, one
  /// that unseen replays change may be anything.
  bool needs_lower_bound(const GradScalerOptions& options) const {
    return options.dynamic && replays_ != Replays::unseen;
  }

  bool is_replayed() const { return replays_ != Replays::none; }

  /// What the body of the CudaGraph that is running takes for granted; null outside of one.
  CapturedBound* captured_bound(const at::Tensor& scale, const GradScalerOptions& options) {
    GraphBody* const body = GraphBody::current();
    const ScaleFollower* const follower = ScaleFollower::of(body);
    if (!follower || replays_ != Replays::followed) return nullptr;
    return &follower->bound_in(*body, {followed_, &followed_->bound}, scale, options);
  }

  /// Has the host learn of the skips some time.
  void watch_skips(const at::Tensor& skips) {
    if (replays_ == Replays::unseen) return;
    followed_->warning.count_iteration();
    GraphBody* const body = GraphBody::current();
    const ScaleFollower* const follower = ScaleFollower::of(body);
    if (follower && is_replayed()) {
      follower->watch_skips(*body, {followed_, &followed_->warning}, skips);
    } else if (followed_->warning.is_due()) {
      followed_->warning.send(skips);
    }
  }

  std::shared_ptr<Followed> followed_ = std::make_shared<Followed>();
  Replays replays_ = Replays::none;
};

}  // namespace torchamp::detail
