// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <cstddef>
#include <utility>
#include <vector>

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
  void add(const at::Tensor& found_inf) {
    flags_.push_back(found_inf);
    if (flags_.size() < most_flags) return;
    before_ = tensor();
    flags_.clear();
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

}  // namespace torchamp::detail
