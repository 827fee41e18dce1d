// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [What replays do to the scale]
//
// A captured step omits work that the scale's bounds make unnecessary: the check of gradients that
// a scale below 1 may turn into infs, and the division of gradients before the step for scales
// above 2^32. Replays change the scale unseen by the host. So the host tracks the bounds from
// replay to replay, and copies the scale to its memory, as between eager steps. When a bound no
// longer holds, the iteration is captured again with the additional work.
//
// A host that is many replays ahead of the device knows little of the scale. Instead of assuming
// the worst, it waits before a replay until the device has reached a copy made some replays ago: a
// scale of 2^n allows n replays ahead, so the device never runs out of work. Near the bound, where
// it would, a step is captured as if beyond it.

/// Copies of a scale that somebody may wait for.
struct BoundCopies {
  /// Has the scale copied to the host in any case.
  static void send(ScaleBound& bound, const at::Tensor& scale) {
    ScaleBound::Copy& copy = bound.send(scale);
    if (scale.is_cpu()) return;  // it is there
    const at::Device device = scale.device();
    if (!copy.arrival) copy.arrival = std::make_shared<c10::Event>(device.type());
    copy.arrival->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  /// Whether to, between replays.
  static bool are_wanted(const ScaleBound& bound) {
    return bound.now_.at_least < 0x1p8 && bound.under_way_.size() < 4;
  }
  /// Waits for the device to get to the oldest copy under way. False if there is none.
  static bool wait_for_one(ScaleBound& bound) {
    bound.take_copies();
    if (bound.under_way_.empty() || !bound.under_way_.front().arrival) return false;
    bound.under_way_.front().arrival->synchronize();
    bound.take_copies();
    return true;
  }
};

/// The assumptions of one captured iteration about a scale.
class CapturedScale final : public CapturedBound, public ReplayedState {
 public:
  CapturedScale(std::shared_ptr<ScaleBound> bound, at::Tensor scale, GradScalerOptions options)
      : bound_(std::move(bound)), scale_(std::move(scale)), options_(std::move(options)) {}

  bool is_of(const std::shared_ptr<ScaleBound>& bound) const { return bound == bound_; }

  bool may_be_below(double limit) override {
    if (bound_->value() < limit * room()) return true;
    at_least_ = std::max(at_least_, limit);
    return false;
  }
  bool may_be_above(double limit) override {
    if (bound_->at_most() * room() > limit) return true;
    at_most_ = std::min(at_most_, limit);
    return false;
  }

  /// The iteration has made an update.
  void add_update(bool lowers) override {
    ++updates_;
    lowers_ = lowers;
  }

  void settle() override {
    look();
    while (BoundCopies::wait_for_one(*bound_)) {
    }
  }

  bool holds() override {
    if (is_within(1.)) return true;
    while (BoundCopies::wait_for_one(*bound_)) {
      if (is_within(4.)) return true;
    }
    settle();  // a bound that no copy was wanted for has become a wide one
    return is_within(4.);
  }

  void note_replay() override {
    for (int64_t i = 0; i < updates_; ++i) bound_->update(options_, lowers_);
  }

  bool wants_look() const override {
    return lowers_ && at_least_ > 0. && BoundCopies::are_wanted(*bound_);
  }
  void look() override { BoundCopies::send(*bound_, scale_); }

 private:
  /// How far from a limit a scale is to be that replays start from.
  double room() const { return options_.dynamic ? 16. : 1.; }

  bool is_within(double factor) {
    return bound_->value() >= at_least_ * factor && bound_->at_most() * factor <= at_most_;
  }

  std::shared_ptr<ScaleBound> bound_;
  at::Tensor scale_;
  GradScalerOptions options_;  // as they were in the capture
  double at_least_ = 0., at_most_ = std::numeric_limits<double>::infinity();
  int64_t updates_ = 0;
  bool lowers_ = false;
};

/// Warns after many consecutive bad replays.
class CapturedSkips final : public ReplayedState {
 public:
  CapturedSkips(std::shared_ptr<SkipWarning> warning, at::Tensor skips)
      : warning_(std::move(warning)), skips_(std::move(skips)) {}
  void settle() override {}
  bool holds() override { return true; }
  void note_replay() override {
    warning_->count_iteration();
    warning_->look();
  }
  bool wants_look() const override { return warning_->is_due(); }
  void look() override { warning_->send(skips_); }

 private:
  std::shared_ptr<SkipWarning> warning_;
  at::Tensor skips_;
};

/// For the bodies of a CudaGraph.
class FollowsReplays final : public ScaleFollower {
 public:
  CapturedBound& bound_in(GraphBody& body, const std::shared_ptr<ScaleBound>& bound,
                          const at::Tensor& scale,
                          const GradScalerOptions& options) const override {
    for (const auto& state : body.states) {
      auto* const captured = dynamic_cast<CapturedScale*>(state.get());
      if (captured && captured->is_of(bound)) return *captured;
    }
    auto captured = std::make_shared<CapturedScale>(bound, scale, options);
    body.states.push_back(captured);
    return *captured;
  }
  void watch_skips(GraphBody& body, const std::shared_ptr<SkipWarning>& warning,
                   const at::Tensor& skips) const override {
    body.states.push_back(std::make_shared<CapturedSkips>(warning, skips));
  }
};

}  // namespace torchamp::detail
