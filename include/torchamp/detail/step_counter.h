// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

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

/// Makes `counters` known: one read for each device.
inline void read_counters(StepCounters counters) {
  std::sort(counters.begin(), counters.end());
  counters.erase(std::unique(counters.begin(), counters.end()), counters.end());
  while (!counters.empty()) {
    const at::Device device = counters.back()->value.device();
    const auto here = std::stable_partition(counters.begin(), counters.end(),
                                            [&](const std::shared_ptr<StepCounter>& counter) {
                                              return counter->value.device() != device;
                                            });
    std::vector<at::Tensor> values;
    for (auto counter = here; counter != counters.end(); ++counter) {
      values.push_back((*counter)->value);
    }
    const at::Tensor steps = at::stack(values).to(at::kCPU, at::kLong);
    const int64_t* next = steps.const_data_ptr<int64_t>();
    for (auto counter = here; counter != counters.end(); ++counter) {
      (*counter)->at_least = (*counter)->at_most = *next++;
    }
    counters.erase(here, counters.end());
  }
}

}  // namespace torchamp::detail
