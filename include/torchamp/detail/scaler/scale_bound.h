// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/host_values.h"
#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

// What the host knows of a scale, and of bad iterations, where only a device knows all.

/// Bad iterations in a row, counted from their flags on a device when someone asks. Until then an
/// iteration costs no launch, and six in so many together. Copies stay what they are.
class SkipCount {
 public:
  SkipCount() = default;
  /// From `count`, 0-dim fp32, on, which nobody is to change.
  explicit SkipCount(at::Tensor count) : before_(std::move(count)) {}

  bool defined() const { return before_.defined(); }

  /// One iteration more. `found_inf`, 0-dim fp32, is 1 if it was bad, or else 0, and stays so.
  /// Whether the count is there now, for the next tensor() to take no launch.
  bool add(const at::Tensor& found_inf) {
    flags_.push_back(found_inf);
    if (flags_.size() < most_flags) return false;
    before_ = tensor();
    flags_.clear();
    return true;
  }

  /// What it is counted from.
  std::vector<at::Tensor> parts() const {
    std::vector<at::Tensor> parts = flags_;
    parts.push_back(before_);
    return parts;
  }

  /// 0-dim fp32; not to be changed.
  at::Tensor tensor() const {
    if (flags_.empty()) return before_;
    // From the latest back, 1 as long as all were bad.
    const at::Tensor bad = at::stack(flags_).flip(0).cumprod(0);
    return bad.sum() + bad.select(0, -1) * before_;
  }

 private:
  static constexpr std::size_t most_flags = 32;

  at::Tensor before_;
  std::vector<at::Tensor> flags_;  // of the iterations since
};

/// Warns of a long run of bad iterations, once. Where only the device knows the run, it is copied
/// to the host once in `interval` iterations, and nobody waits for the copy.
class SkipWarning {
 public:
  static constexpr int64_t many = 100, interval = 32;

  void note(double skips) {
    if (skips < many || warned_) return;
    warned_ = true;
    TORCH_WARN(
        "GradScaler::update: gradients held infs or NaNs in the last ", static_cast<int64_t>(skips),
        " iterations, and their steps were skipped. No scale mends that where the data or the "
        "weights hold a NaN: overflow_report() (torchamp/overflow_report.h) names the layers "
        "whose gradients do, first_non_finite_op() (torchamp/non_finite_op.h) the op that "
        "made the first one. This is said once.");
  }

  /// `skips`, 0-dim fp32: what there is now.
  void send(const at::Tensor& skips) {
    iterations_ = 0;
    mirror_.send(skips);
  }
  /// Whether to send(), after an iteration more.
  bool is_due() { return ++iterations_ >= interval; }
  bool is_due_now() const { return iterations_ >= interval; }
  /// Warns if what has arrived says so.
  void look() {
    if (!mirror_.empty()) note(mirror_[0]);
  }

 private:
  bool warned_ = false;
  int64_t iterations_ = 0;
  HostMirror mirror_;
};

// Note [A scale below 1]
//
// Dividing by a scale below 1 may turn a finite gradient into an inf, which has to be found, too,
// and costs a second look at the gradients. A device's scale is not read for the sake of that. The
// host knows what it was once and by how much each update() may have changed it since. Before the
// lower bound gets near 1, the scale is copied to host memory, and nobody waits for the copy: when
// it has arrived, both bounds start from it. So the second look is taken only where the scale is
// below 1 or just above it. For captured steps see Note [What replays do to the scale].

/// Numbers that a scale which only the device knows is not below, and not above.
class ScaleBound {
 public:
  /// For good_in_a_row, where the scale may grow after the next good iteration.
  static constexpr int64_t grows_at_once = std::numeric_limits<int64_t>::max() - 1;

  double value() {
    take_copies();
    return value_;
  }
  double at_most() {
    take_copies();
    return rise_.at_most;
  }

  /// The host has set the scale, which has not grown for so many good iterations.
  void set(double scale, int64_t good_in_a_row = 0) { set(scale, scale, good_in_a_row); }
  /// The host has set the scale to what it does not know.
  void set_unknown(double max_scale) { set(0., max_scale, 0); }

  /// An update may have multiplied the scale by `factor`, and has not left it below `min_scale`.
  void lower(double factor, double min_scale) {
    factor *= 1. - 0x1p-23;  // the device rounds
    value_ = std::max(value() * factor, min_scale);
    for (Copy& copy : copies_) copy.lowered_since *= factor;
  }
  void lower(double factor, double min_scale, const at::Tensor& scale) {
    lower(factor, min_scale);
    look_at(scale);
  }

  /// An update has multiplied the scale by `factor` if `interval` iterations in a row were good.
  void grow(double factor, int64_t interval) {
    rise_.count(factor, interval);
    for (Copy& copy : copies_) copy.rise.count(factor, interval);
  }
  /// An update may have raised the scale to anything.
  void grow_to(double max_scale) { rise_.at_most = max_scale; }

  /// Has the scale copied to the host if it may be near 1, and no copy is under way.
  void look_at(const at::Tensor& scale) {
    if (value_ < 0x1p10 && under_way() == 0) send(scale);
  }
  /// The same in any case, for wait_for_a_copy().
  void look_now(const at::Tensor& scale) { note_arrival(send(scale), scale.device()); }
  /// Whether it should be between replays.
  bool wants_look_between_replays() const { return value_ < 0x1p8 && under_way() < 4; }

  /// Waits for the device to get to the oldest copy under way. False if there is none.
  bool wait_for_a_copy() {
    take_copies();
    Copy* oldest = nullptr;
    for (Copy& copy : copies_) {
      if (copy.under_way && (!oldest || copy.number < oldest->number)) oldest = &copy;
    }
    if (!oldest || !oldest->arrival) return false;
    oldest->arrival->synchronize();
    take_copies();
    return true;
  }

 private:
  static constexpr float not_here_yet = -1.F;
  static constexpr double infinity = std::numeric_limits<double>::infinity();

  struct Rise {
    double at_most;
    int64_t good_in_a_row;  ///< what the growth tracker may be

    void count(double factor, int64_t interval) {
      if (++good_in_a_row < interval) return;
      good_in_a_row = 0;
      at_most *= factor;
    }
  };

  struct Copy {
    HostMirror mirror{};  ///< of the scale
    bool under_way = false;
    int64_t number = 0;
    double lowered_since = 0.;  ///< the copy was made
    Rise rise{infinity, 0};     ///< since then
    std::optional<c10::Event> arrival{};
  };

  void set(double at_least, double at_most, int64_t good_in_a_row) {
    value_ = at_least;
    rise_ = {at_most, good_in_a_row};
    for (Copy& copy : copies_) {  // what it will say is out of date
      copy.lowered_since = 0.;
      copy.rise.at_most = infinity;
    }
  }

  void take_copies() {
    for (Copy& copy : copies_) {
      if (!copy.under_way || copy.mirror[0] == not_here_yet) continue;
      const double scale = copy.mirror[0];
      value_ = std::max(value_, scale * copy.lowered_since);
      const double at_most = scale > 0. ? scale * copy.rise.at_most : infinity;
      if (at_most < rise_.at_most) rise_ = {at_most, copy.rise.good_in_a_row};
      copy.under_way = false;
    }
  }

  int64_t under_way() const {
    int64_t count = 0;
    for (const Copy& copy : copies_) count += copy.under_way ? 1 : 0;
    return count;
  }

  Copy& send(const at::Tensor& scale) {
    Copy& copy = free_copy();
    copy.mirror.send(scale, not_here_yet);
    copy.under_way = true;
    copy.number = ++sent_;
    copy.lowered_since = 1.;
    copy.rise = {1., grows_at_once};
    return copy;
  }

  Copy& free_copy() {
    for (Copy& copy : copies_) {
      if (!copy.under_way) return copy;
    }
    return copies_.emplace_back();
  }

  static void note_arrival(Copy& copy, c10::Device device) {
    if (device.is_cpu()) return;  // it is there
    if (!copy.arrival) copy.arrival.emplace(device.type());
    copy.arrival->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  double value_ = 0.;
  Rise rise_{0., 0};
  std::vector<Copy> copies_;
  int64_t sent_ = 0;
};

/// By how much one update may move the scale.
struct ScaleMoves {
  explicit ScaleMoves(const GradScalerOptions& options)
      : growth_factor(options.growth_factor),
        backoff_factor(options.backoff_factor),
        growth_interval(options.growth_interval),
        min_scale(options.min_scale),
        max_scale(options.max_scale),
        dynamic(options.dynamic),
        counts_good(!options.follows_gradients) {}

  /// `lowers`: whether the lower bound is followed, too.
  void follow(ScaleBound& bound, bool lowers) const {
    if (!dynamic) return;
    if (lowers) bound.lower(backoff_factor, min_scale);
    if (counts_good) {
      bound.grow(growth_factor, growth_interval);
    } else {  // which may grow sooner
      bound.grow_to(max_scale);
    }
  }

  double growth_factor, backoff_factor;
  int64_t growth_interval;
  double min_scale, max_scale;
  bool dynamic, counts_good;
};

/// What one captured iteration takes for granted of a scale; see Note [What replays do to the
/// scale].
class CapturedBound : public ReplayedState {
 public:
  virtual bool is_of(const std::shared_ptr<ScaleBound>& bound) const = 0;
  /// Whether the scale may be below `limit`, or so near that replays would soon have to wait; if
  /// not, this is taken for granted.
  virtual bool may_be_below(double limit) = 0;
  virtual bool may_be_above(double limit) = 0;
  /// The iteration has made an update.
  virtual void add_update(bool lowers) = 0;
};

/// What a GraphBody brings, so that a scaler's state is followed through replays.
class ScaleFollower {
 public:
  virtual std::shared_ptr<CapturedBound> follow(std::shared_ptr<ScaleBound> bound, at::Tensor scale,
                                                const ScaleMoves& moves) const = 0;
  virtual std::shared_ptr<ReplayedState> follow(std::shared_ptr<SkipWarning> warning,
                                                at::Tensor skips) const = 0;

 protected:
  ~ScaleFollower() = default;
};

}  // namespace torchamp::detail
