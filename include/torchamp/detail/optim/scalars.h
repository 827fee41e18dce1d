// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKeySet.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/optim/counters.h"
#include "torchamp/detail/optim/first_step.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Whether the device of `tensor` has ATen's fused kernel `op`, "aten::_fused_sgd_", and it does
/// what is said of those in optim.h.
inline bool has_fused_kernel(const char* op, const at::Tensor& tensor) {
  if (!facts_of(tensor.device().type()).fused) return false;
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(
      c10::highestPriorityBackendTypeId(tensor.key_set()));
}

/// What a step needs on one device beside lists of tensors: the scale, the overflow flag, constants
/// (an op with a number of the host costs several times one with a tensor), and the step counters.
class StepScalars {
 public:
  explicit StepScalars(at::Device device)
      : device_(device),
        zero_(number(0.F)),
        one_(number(1.F)),
        flag_(number(0.F)),
        counts_by_sgd_(has_fused_kernel("aten::_fused_sgd_", one_)) {}

  at::Device device() const { return device_; }
  const at::Tensor& one() const { return one_; }

  /// On this device, as the fused kernels take them.
  const std::optional<at::Tensor>& grad_scale() const { return grad_scale_; }
  const std::optional<at::Tensor>& found_inf() const { return found_inf_; }

  /// A copy without the scale, for gradients that have been divided.
  StepScalars without_scale() const {
    StepScalars unscaled = *this;
    unscaled.grad_scale_.reset();
    return unscaled;
  }

  /// `first_only`: all that matters is whether a step is the first.
  void add_counter(std::shared_ptr<StepCounter> counter, bool first_only) {
    if (first_only && counts_by_sgd_) {
      if (!first_and_later_.defined()) {
        first_and_later_ = at::arange(2, one_.options()).flip(0);
        unused_ = at::zeros({2}, one_.options());
      }
      firsts_.push_back(std::move(counter));
      return;
    }
    values_.push_back(counter->value);
    ones_.push_back(one_);
    counters_.push_back(std::move(counter));
  }

  /// Takes the scale and the flag to this device, and all memory that counting takes. `is_exact`:
  /// the flag is 0 or 1.
  void prepare(const at::Tensor& grad_scale, const at::Tensor& found_inf, bool is_exact) {
    grad_scale_.reset();
    found_inf_.reset();
    if (grad_scale.defined()) grad_scale_ = to_device_async(device_, grad_scale);
    if (found_inf.defined()) {
      found_inf_ = to_device_async(device_, found_inf);
      // The kernels skip where the flag is exactly 1. A sum over devices or processes may be more.
      if (!is_exact) found_inf_ = at::ne_out(flag_, *found_inf_, zero_);
    }
    if (found_inf_ && !values_.empty() && !counts_by_sgd_) taken_ = at::rsub(*found_inf_, 1.);
    for (const auto& counter : firsts_) make_gates(*counter);
  }

  /// Counts the step, unless it is skipped: the kernels want to find it counted.
  void begin() {
    if (values_.empty()) return;
    if (!found_inf_) {
      at::_foreach_add_(values_, one_);
    } else if (!counts_by_sgd_) {
      at::_foreach_add_(values_, taken_);
    } else {  // SGD's kernel adds numbers to numbers, or does not, in one launch
      at::_fused_sgd_(values_, ones_, {}, /*weight_decay=*/0., /*momentum=*/0., /*lr=*/1.,
                      /*dampening=*/0., /*nesterov=*/false, /*maximize=*/true,
                      /*is_first_step=*/false, /*grad_scale=*/{}, found_inf_);
    }
  }

  void end() {
    note_first_steps();
    for (const auto* const counters : {&counters_, &firsts_}) {
      for (const auto& counter : *counters) {
        if (!found_inf_) ++counter->at_least;
        ++counter->at_most;
      }
    }
    for (const auto& counter : firsts_) follow_up(counter);
    grad_scale_.reset();
    found_inf_.reset();
    taken_ = at::Tensor();
  }

  /// Counts, on the host, a replayed step, which may have been skipped.
  void note_step() {
    for (const auto& counter : counters_) ++counter->at_most;
    for (const auto& counter : firsts_) ++counter->at_most;
  }

 private:
  at::Tensor number(float value) const {
    return at::full({}, value, at::device(device_).dtype(at::kFloat));
  }

  void make_gates(StepCounter& counter) const {
    counter.learn();
    if (!counter.gated || !counter.may_be_first()) return;
    counter.gates = found_inf_ ? at::maximum(counter.numbers, *found_inf_) : counter.numbers;
  }

  /// Has the device note a first step, unless it was skipped: SGD's kernel copies what it takes for
  /// gradients of a first step to what it takes for buffers.
  void note_first_steps() const {
    std::vector<at::Tensor> numbers;
    for (const auto& counter : firsts_) {
      if (counter->at_least == 0) numbers.push_back(counter->numbers);
    }
    if (numbers.empty()) return;
    const std::vector<at::Tensor> unused(numbers.size(), unused_);
    const std::vector<at::Tensor> now(numbers.size(), first_and_later_);
    at::_fused_sgd_(unused, now, numbers, /*weight_decay=*/0., /*momentum=*/1., /*lr=*/0.,
                    /*dampening=*/0., /*nesterov=*/false, /*maximize=*/false,
                    /*is_first_step=*/true, /*grad_scale=*/{}, found_inf_);
  }

  static void follow_up(const std::shared_ptr<StepCounter>& counter) {
    counter->gates = at::Tensor();
    if (!counter->may_be_first()) return;
    if (GraphBody* const body = GraphBody::current()) {
      body->states.push_back(std::shared_ptr<ReplayedState>(new FirstStepToCome(counter)));
    } else {
      counter->ask();
    }
  }

  at::Device device_;
  at::Tensor zero_, one_, flag_;
  at::Tensor taken_;                     // 1, or 0 if the step is skipped
  at::Tensor first_and_later_, unused_;  // 1 and 0, and two numbers
  bool counts_by_sgd_;
  std::optional<at::Tensor> grad_scale_, found_inf_;
  StepCounters counters_, firsts_;
  std::vector<at::Tensor> values_, ones_;  // one for each of counters_
};

}  // namespace torchamp::detail
