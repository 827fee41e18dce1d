// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/ne.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/optim/step_counter.h"

namespace torchamp::detail {

/// Whether the device of `tensor` has ATen's fused kernel `op`, "aten::_fused_sgd_", and it does
/// what is said of those in optim.h.
inline bool has_fused_kernel(const char* op, const at::Tensor& tensor) {
  if (!facts_of(tensor.device().type()).fused) return false;
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(
      c10::highestPriorityBackendTypeId(tensor.key_set()));
}

/// The scale and the overflow flag of a step on a device, as the fused kernels take them.
class StepScalars {
 public:
  const std::optional<at::Tensor>& grad_scale() const { return grad_scale_; }
  const std::optional<at::Tensor>& found_inf() const { return found_inf_; }

 protected:
  std::optional<at::Tensor> grad_scale_, found_inf_;
};

/// What a step needs on one device beside lists of tensors: the scale, the overflow flag, constants
/// (an op with a number of the host costs several times one with a tensor), and the step counters.
class DeviceScalars : public StepScalars {
 public:
  explicit DeviceScalars(at::Device device)
      : one_(at::full({}, 1.F, at::device(device).dtype(at::kFloat))),
        flag_(at::empty_like(one_)),
        counts_by_sgd_(has_fused_kernel("aten::_fused_sgd_", one_)) {}

  at::Device device() const { return one_.device(); }

  /// `first_only`: all that matters is whether a step is the first; so of all counters or of none.
  void add_counter(std::shared_ptr<StepCounter> counter, bool first_only) {
    if (!first_only) {
      values_.push_back(counter->value);
      ones_.push_back(one_);
    } else if (!noted_.defined()) {
      noted_ = StepCounter(device(), 1).numbers;
    }
    counters_.push_back(std::move(counter));
  }

  /// Memory for a step by pieces, until end(). Lists of one dtype, which are stepped one after the
  /// other, share it.
  at::Tensor buffer(at::ScalarType dtype, int64_t elements) {
    for (const at::Tensor& buffer : buffers_) {
      if (buffer.scalar_type() == dtype && buffer.numel() >= elements) {
        return part_of(buffer, 0, elements);
      }
    }
    return buffers_.emplace_back(at::empty({elements}, one_.options().dtype(dtype)));
  }

  /// Takes the scale and the flag to this device, and all memory that counting takes. `is_exact`:
  /// the flag is 0 or 1.
  void prepare(const at::Tensor& grad_scale, const at::Tensor& found_inf, bool is_exact) {
    grad_scale_.reset();
    found_inf_.reset();
    buffers_.clear();  // of a step that has thrown
    if (grad_scale.defined()) grad_scale_ = to_device_async(device(), grad_scale);
    if (found_inf.defined()) {
      found_inf_ = to_device_async(device(), found_inf);
      // The kernels skip where the flag is exactly 1. A sum over devices or processes may be more.
      if (!is_exact) found_inf_ = at::ne_out(flag_, *found_inf_, 0.);
    }
    if (!noted_.defined()) return;
    for (const auto& counter : counters_) counter->learn();
  }

  /// Counts the step, unless it is skipped: the kernels want to find it counted.
  void begin() {
    if (values_.empty()) return;
    if (found_inf_ && counts_by_sgd_) {  // it adds numbers to numbers, or does not, in one launch
      at::_fused_sgd_(values_, ones_, {}, /*weight_decay=*/0., /*momentum=*/0., /*lr=*/1.,
                      /*dampening=*/0., /*nesterov=*/false, /*maximize=*/true,
                      /*is_first_step=*/false, /*grad_scale=*/{}, found_inf_);
      return;
    }
    at::_foreach_add_(values_, one_);
    if (found_inf_) at::_foreach_add_(values_, *found_inf_, /*alpha=*/-1.);
  }

  void end() {
    for (const auto& counter : counters_) {
      if (noted_.defined() && counter->at_least == 0) {
        at::Tensor numbers = counter->numbers;
        found_inf_ ? at::lerp_out(numbers, noted_, numbers, *found_inf_) : numbers.copy_(noted_);
      }
      counter->count(/*surely=*/!found_inf_);
    }
    for (const auto& counter : counters_) {
      if (!noted_.defined() || !counter->may_be_first()) continue;
      if (GraphBody* const body = GraphBody::current()) {
        body->states.push_back(counter);
      } else {
        counter->look();
      }
    }
    grad_scale_.reset();
    found_inf_.reset();
    buffers_.clear();
  }

  /// Counts a step that was replayed.
  void count_replayed() {
    for (const auto& counter : counters_) counter->count(/*surely=*/false);
  }

 private:
  at::Tensor one_, flag_;
  at::Tensor noted_;  // 1 and 0: a counter's numbers after a step; undefined unless first_only
  bool counts_by_sgd_;
  std::vector<std::shared_ptr<StepCounter>> counters_;
  std::vector<at::Tensor> values_, ones_;  // one for each of counters_, or none if first_only
  std::vector<at::Tensor> buffers_;
};

}  // namespace torchamp::detail
