// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/host_values.h"
#include "torchamp/version.h"

namespace torchamp::detail {

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

}  // namespace torchamp::detail
