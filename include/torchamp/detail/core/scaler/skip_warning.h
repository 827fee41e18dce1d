// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Warns of a long run of bad iterations, once. Where only the device knows the run, it is copied
/// to the host once in `interval` iterations, replays included, and nobody waits for the copy.
class SkipWarning final : public ReplayedState {
 public:
  static constexpr int64_t many = 100, interval = 32;

  /// `has_kept_gradients`: see ScaledBackward::has_kept_gradients().
  void note(double skips, bool has_kept_gradients) {
    if (skips < many || warned_) return;
    warned_ = true;
    warn({"GradScaler::update: gradients held infs or NaNs in the last ",
          static_cast<int64_t>(skips), " iterations, and their steps were skipped. ",
          has_kept_gradients
              ? "The gradients of the last skipped step were not cleared: backward() has added to "
                "their infs and NaNs. Call zero_grad() in each iteration, also where the step was "
                "skipped. "
              : "If the gradients of a skipped step are not cleared, its infs and NaNs stay: call "
                "zero_grad() in each iteration. If the data, the weights or the buffers (running "
                "statistics of a batch norm) hold a NaN, no scale helps: overflow_report() "
                "(torchamp/overflow_report.h) names the layers whose gradients and buffers do, "
                "first_non_finite_op() (torchamp/non_finite_op.h) the op that made the first one. ",
          "This warning is given once."});
  }

  /// The device has made an update. `skips`, 0-dim fp32: those in a row now.
  void count_iteration(const at::Tensor& skips) {
    skips_ = skips;
    ++iterations_;
  }
  /// Warns if the copy that has arrived says so.
  void warn_if_arrived(bool has_kept_gradients = false) {
    if (!mirror_.empty()) note(mirror_[0], has_kept_gradients);
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

}  // namespace torchamp::detail
