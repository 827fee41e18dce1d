// SPDX-License-Identifier: BSD-3-Clause
// Numbers that a fused step reads on its device: the divisor, found_inf, the step counters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ne.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/optim/conditional_add.h"
#include "torchamp/detail/core/optim/step_counter.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The scale and the overflow flag of a step on a device, as the fused kernels take them.
class StepScalars {
 public:
  const std::optional<at::Tensor>& grad_scale() const { return grad_scale_; }
  const std::optional<at::Tensor>& found_inf() const { return found_inf_; }

 protected:
  std::optional<at::Tensor> grad_scale_, found_inf_;
};

/// The numbers that a step needs on one device: the scale, the overflow flag, and the step
/// counters. A tensor with a 1 is added to the counters, because an op with a number on the host
/// costs several times as much.
class DeviceScalars : public StepScalars {
 public:
  explicit DeviceScalars(at::Device device)
      : one_(at::full({}, 1.F, at::device(device).dtype(at::kFloat))),
        flag_(at::empty_like(one_)),
        adds_conditionally_(has_conditional_add(one_)) {}

  at::Device device() const { return one_.device(); }

  /// How kernels use a counter; the same for all counters.
  enum class Asked {
    number,    ///< the number of this step: the step is counted before the kernels
    is_first,  ///< whether this is the first step: counted after the kernels, until a step was
               ///< surely taken
  };
  void add_counter(std::shared_ptr<StepCounter> counter, Asked asked) {
    asked_ = asked;
    counters_.push_back(std::move(counter));
  }

  /// Memory for a step by chunks, until forget_step(). Lists of one dtype, which are stepped one
  /// after the other, share it.
  at::Tensor buffer(at::ScalarType dtype, int64_t elements) {
    for (const at::Tensor& buffer : buffers_) {
      if (buffer.scalar_type() == dtype && buffer.numel() >= elements) {
        return part_of(buffer, 0, elements);
      }
    }
    return buffers_.emplace_back(at::empty({elements}, one_.options().dtype(dtype)));
  }

  /// Copies the scale and the flag to this device, and allocates all memory for counting. It waits
  /// only if a list is on the host and its scale is on a device. `is_exact`: the flag is 0 or 1.
  void prepare(const at::Tensor& grad_scale, const at::Tensor& found_inf, bool is_exact) {
    forget_step();  // of a step that has thrown
    if (grad_scale.defined()) grad_scale_ = to_device_async(device(), grad_scale);
    if (found_inf.defined()) {
      found_inf_ = to_device_async(device(), found_inf);
      // The kernels skip if the flag is exactly 1. A sum over devices or processes may be larger.
      if (!is_exact) found_inf_ = at::ne_out(flag_, *found_inf_, 0.);
    }
    if (asked_ == Asked::is_first) {
      for (const auto& counter : counters_) counter->learn();
    }
    counts_ = counts_to_add_to();
    ones_.assign(counts_.size(), one_);
  }

  /// If the kernels use the step's number: counts the step on the device, unless it is skipped.
  void count_before_kernels() {
    if (asked_ == Asked::number) add_step();
  }
  /// Otherwise counts the step on the device now. The host also counts, either surely or as a step
  /// that may have been skipped.
  void count_after_kernels() {
    if (asked_ == Asked::is_first) add_step();
    for (const auto& counter : counters_) {
      counter->count(/*surely=*/!found_inf_);  // without a flag, no step is skipped
      if (asked_ == Asked::is_first && counter->may_be_first()) learn_later(counter);
    }
  }
  /// Drops the data of this step.
  void forget_step() {
    grad_scale_.reset();
    found_inf_.reset();
    buffers_.clear();
    counts_.clear();
  }

  /// Counts a step that was replayed.
  void count_replayed() {
    for (const auto& counter : counters_) counter->count(/*surely=*/false);
  }

 private:
  /// If only the first step matters, this is empty as soon as the host has read that there was one,
  /// that is, if StepCounter::at_least is above 0.
  std::vector<at::Tensor> counts_to_add_to() const {
    std::vector<at::Tensor> counts;
    for (const auto& counter : counters_) {
      if (asked_ == Asked::number || counter->at_least == 0) counts.push_back(counter->value);
    }
    return counts;
  }
  void add_step() {
    if (counts_.empty()) return;
    if (found_inf_ && adds_conditionally_) return add_unless(found_inf_, counts_, ones_);
    at::_foreach_add_(counts_, one_);
    if (found_inf_) at::_foreach_add_(counts_, *found_inf_, /*alpha=*/-1.);
  }
  /// Reads, without waiting, whether there was a first step: StepCounter::look() starts a copy from
  /// the device, and a later learn() reads the copy. In the body of a graph each replay would start
  /// a copy. So there the counter becomes one of the body's states, and the graph calls look().
  static void learn_later(const std::shared_ptr<StepCounter>& counter) {
    if (GraphBody* const body = GraphBody::current()) {
      body->states.push_back(counter);
    } else {
      counter->look();
    }
  }

  at::Tensor one_, flag_;
  bool adds_conditionally_;
  Asked asked_ = Asked::number;
  std::vector<std::shared_ptr<StepCounter>> counters_;
  std::vector<at::Tensor> counts_, ones_;  // to which this step is added
  std::vector<at::Tensor> buffers_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
