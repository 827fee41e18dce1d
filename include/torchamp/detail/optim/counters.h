// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// How many steps some parameters of one device have taken. Only the device knows, since only the
/// device knows which steps were skipped; the host knows bounds, which are equal as long as no step
/// could be skipped.
struct StepCounter {
  StepCounter(at::Device device, int64_t steps)
      : value(at::full({}, static_cast<float>(steps), at::device(device).dtype(at::kFloat))),
        at_least(steps),
        at_most(steps) {}

  bool known() const { return at_least == at_most; }

  /// The same count, for parameters on `device` that go their own way from here on.
  StepCounter copy_to(at::Device device) const {
    StepCounter copy(*this);
    copy.value = value.to(device, value.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    return copy;
  }

  at::Tensor value;  ///< 0-dim fp32
  int64_t at_least, at_most;
};

using StepCounters = std::vector<std::shared_ptr<StepCounter>>;

/// Makes `counters`, which are distinct, known: one read for each device.
inline void read_counters(const StepCounters& counters) {
  for (const auto& first : counters) {
    if (first->known()) continue;
    StepCounters here;
    std::vector<at::Tensor> values;
    for (const auto& counter : counters) {
      if (counter->known() || counter->value.device() != first->value.device()) continue;
      here.push_back(counter);
      values.push_back(counter->value);
    }
    const at::Tensor steps = at::stack(values).to(at::kCPU, at::kLong);
    const auto* next = steps.const_data_ptr<int64_t>();
    for (const auto& counter : here) counter->at_least = counter->at_most = *next++;
  }
}

}  // namespace torchamp::detail
