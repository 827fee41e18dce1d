// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ne.h>

#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/optim/counters.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// What a step needs on one device beside lists of tensors: the scale, the overflow flag, constants
/// (an op with a number of the host costs several times one with a tensor), and the step counters.
class StepScalars {
 public:
  explicit StepScalars(at::Device device)
      : device_(device), zero_(number(0.F)), one_(number(1.F)), flag_(number(0.F)) {}

  at::Device device() const { return device_; }
  const at::Tensor& one() const { return one_; }

  /// On this device, as the fused kernels take them.
  const std::optional<at::Tensor>& grad_scale() const { return grad_scale_; }
  const std::optional<at::Tensor>& found_inf() const { return found_inf_; }

  void add_counter(std::shared_ptr<StepCounter> counter) {
    values_.push_back(counter->value);
    counters_.push_back(std::move(counter));
  }

  /// Takes the scale and the flag to this device and counts the step, which the kernels want to
  /// find counted.
  void begin(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
    grad_scale_.reset();
    found_inf_.reset();
    if (grad_scale.defined()) grad_scale_ = to_device_async(device_, grad_scale);
    if (found_inf.defined()) {
      // The kernels skip where the flag is exactly 1. A sum over devices or processes may be more.
      at::ne_out(flag_, to_device_async(device_, found_inf), zero_);
      found_inf_ = flag_;
    }
    add_to_counters(one_, 1);
  }

  /// Takes the step off the counters again if it was skipped.
  void end() {
    if (found_inf_) add_to_counters(*found_inf_, -1);
    for (const auto& counter : counters_) {
      if (!found_inf_) ++counter->at_least;
      ++counter->at_most;
    }
    grad_scale_.reset();
    found_inf_.reset();
  }

  /// Takes note of a step that was made without begin() and end(), and may have been skipped.
  void note_step() {
    for (const auto& counter : counters_) ++counter->at_most;
  }

 private:
  at::Tensor number(float value) const {
    return at::full({}, value, at::device(device_).dtype(at::kFloat));
  }

  void add_to_counters(const at::Tensor& amount, int sign) {
    if (values_.size() == 1) {
      values_[0].add_(amount, sign);
    } else if (!values_.empty()) {
      at::_foreach_add_(values_, amount, sign);
    }
  }

  at::Device device_;
  at::Tensor zero_, one_, flag_;
  std::optional<at::Tensor> grad_scale_, found_inf_;
  StepCounters counters_;
  std::vector<at::Tensor> values_;
};

}  // namespace torchamp::detail
