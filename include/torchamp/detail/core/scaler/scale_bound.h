// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace c10 {
struct Event;
}

namespace torchamp::detail {

class SkipWarning;

// Note [A scale below 1]
//
// Dividing by a scale below 1 may turn a finite gradient into an inf, so the gradients must then be
// checked twice. In each iteration that would be one more pass over all gradients for unscale_, and
// for a fused step one more launch: step() and update() with FusedAdam would take 9 instead of 8,
// and a small captured iteration 19 instead of 18. A device's scale is not read to decide: the host
// knows an earlier value, and how far each update() may have moved it. Before the lower bound comes
// near 1, the scale is copied to host memory without waiting, and both bounds start from the copy
// once it has arrived.

/// Numbers that a scale which only the device knows is not below, and not above.
class ScaleBound {
 public:
  /// For good_in_a_row, where the scale may grow after the next good iteration.
  static constexpr int64_t grows_at_once = std::numeric_limits<int64_t>::max() - 1;

  double value() {
    take_copies();
    return now_.at_least;
  }
  double at_most() {
    take_copies();
    return now_.at_most;
  }

  /// The host has set the scale, which has not grown for so many good iterations.
  void set(double scale, int64_t good_in_a_row = 0) { set({scale, scale, good_in_a_row}); }
  /// The host has set the scale to what it does not know.
  void set_unknown(double max_scale) { set({0., max_scale, 0}); }

  /// Follows an update; downwards only if it `lowers`.
  void update(const GradScalerOptions& options, bool lowers) {
    if (!options.dynamic) return;
    take_copies();
    now_.update(options, lowers);
    if (lowers) now_.at_least = std::max(now_.at_least, options.min_scale);
    for (Copy& copy : under_way_) copy.since.update(options, lowers);
  }

  /// Has the scale copied to the host if it may be near 1, and no copy is under way.
  void look_at(const at::Tensor& scale) {
    if (now_.at_least < 0x1p10 && under_way_.empty()) send(scale);
  }

 private:
  friend struct BoundCopies;

  static constexpr float not_here_yet = -1.F;
  static constexpr double infinity = std::numeric_limits<double>::infinity();

  struct Range {
    double at_least, at_most;
    int64_t good_in_a_row;  ///< what the growth tracker may be

    void update(const GradScalerOptions& options, bool lowers) {
      if (lowers) at_least *= options.backoff_factor * (1. - 0x1p-23);  // the device rounds
      if (++good_in_a_row >= options.growth_interval) {
        good_in_a_row = 0;
        at_most *= options.growth_factor;
      }
    }
  };
  struct Copy {
    HostMirror mirror{};                    ///< of the scale
    Range since{};                          ///< what has multiplied the scale since
    std::shared_ptr<c10::Event> arrival{};  ///< where somebody may wait for it
  };

  void set(Range range) {
    now_ = range;
    // What copies will say is out of date.
    for (Copy& copy : under_way_) copy.since = {0., infinity, 0};
  }

  void take_copies() {
    for (auto next = under_way_.begin(); next != under_way_.end();) {
      const auto copy = next++;
      const double scale = copy->mirror[0];
      if (scale == not_here_yet) continue;
      const auto& [at_least, at_most, good_in_a_row] = copy->since;
      now_.at_least = std::max(now_.at_least, scale * at_least);
      if (scale > 0. && scale * at_most < now_.at_most) {
        now_.at_most = scale * at_most;
        now_.good_in_a_row = good_in_a_row;
      }
      free_.splice(free_.end(), under_way_, copy);
    }
  }

  Copy& send(const at::Tensor& scale) {
    if (free_.empty()) free_.emplace_back();
    under_way_.splice(under_way_.end(), free_, free_.begin());
    Copy& copy = under_way_.back();
    copy.mirror.send(scale, not_here_yet);
    copy.since = {1., 1., grows_at_once};
    return copy;
  }

  Range now_{0., 0., 0};
  std::list<Copy> under_way_, free_;  // in the order in which they were sent
};

/// What one captured iteration takes for granted of a scale.
class CapturedBound {
 public:
  /// Whether the scale may be below `limit`, or so near that replays would soon have to wait; if
  /// not, this is taken for granted.
  virtual bool may_be_below(double limit) = 0;
  virtual bool may_be_above(double limit) = 0;
  /// The iteration has made an update.
  virtual void add_update(bool lowers) = 0;

 protected:
  ~CapturedBound() = default;
};

/// What a GraphBody brings, so that a scaler's state is followed through replays; see
/// Note [What replays do to the scale].
class ScaleFollower : public ReplayFollower {
 public:
  /// What `body`, which may be null, brings; null where it follows no scales.
  static const ScaleFollower* of(const GraphBody* body) {
    return body ? static_cast<const ScaleFollower*>(body->scales) : nullptr;
  }

  /// What `body` takes for granted of the scale with this bound.
  virtual CapturedBound& bound_in(GraphBody& body, const std::shared_ptr<ScaleBound>& bound,
                                  const at::Tensor& scale,
                                  const GradScalerOptions& options) const = 0;
  virtual void watch_skips(GraphBody& body, const std::shared_ptr<SkipWarning>& warning,
                           const at::Tensor& skips) const = 0;

 protected:
  ~ScaleFollower() override = default;
};

}  // namespace torchamp::detail
