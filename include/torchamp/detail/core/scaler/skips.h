// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Bad iterations in a row, counted from their flags on a device when someone asks. Until then an
/// iteration costs no launch, and six in so many together. Copies stay what they are, as long as
/// what they are counted from does.
class SkipCount {
 public:
  SkipCount() = default;
  /// From `count`, 0-dim fp32, on.
  explicit SkipCount(at::Tensor count) : before_(std::move(count)) {}
  /// One that the host knows.
  explicit SkipCount(double count) : on_host_(count) {}

  bool defined() const { return before_.defined(); }

  /// One iteration more. `found_inf`, 0-dim fp32, is 1 if it was bad, or else 0, and stays so.
  void add(const at::Tensor& found_inf) { flags_.push_back(found_inf); }
  /// Lets go of the flags, so that the next tensor() takes no launch.
  void count() {
    before_ = tensor();
    flags_.clear();
  }

  /// Makes a later change of what it is counted from on invisible.
  void keep() {
    if (!on_host_ && flags_.empty()) before_ = before_.clone();
  }

  /// Adds what it is counted from.
  void add_parts_to(std::vector<at::Tensor>& parts) const {
    parts.insert(parts.end(), flags_.begin(), flags_.end());
    parts.push_back(before_);
  }

  /// 0-dim fp32; not to be changed.
  at::Tensor tensor() const {
    if (flags_.empty()) return before_;
    // From the latest back, 1 as long as all were bad.
    const at::Tensor bad = at::stack(flags_).flip(0).cumprod(0);
    return bad.sum() + bad.select(0, -1) * before_;
  }

  /// For the host, which remembers it.
  double read() {
    if (!on_host_) on_host_ = tensor().item<double>();
    return *on_host_;
  }

 private:
  std::optional<double> on_host_;
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
    warn({"GradScaler::update: gradients held infs or NaNs in the last ",
          static_cast<int64_t>(skips),
          " iterations, and their steps were skipped. If the data or the weights hold a NaN, no "
          "scale helps: overflow_report() (torchamp/overflow_report.h) names the layers whose "
          "gradients do, first_non_finite_op() (torchamp/non_finite_op.h) the op that made the "
          "first one. This warning is given once."});
  }

  /// `skips`, 0-dim fp32: what there is now.
  void send(const at::Tensor& skips) {
    iterations_ = 0;
    mirror_.send(skips);
  }
  void count_iteration() { ++iterations_; }
  /// Whether to send().
  bool is_due() const { return iterations_ >= interval; }
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
