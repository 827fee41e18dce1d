// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace support {

/// Times the steps of a loop by groups: it waits for a GPU once a group, so as not to hold it up at
/// each step, and the median of the groups lets other programs on the machine disturb some.
///
///     StepTimer timer(device, 20);
///     for (…) { …; timer.step(); }
///     timer.seconds_per_step();
class StepTimer {
  using Clock = std::chrono::steady_clock;

 public:
  StepTimer(c10::Device device, std::int64_t steps_per_group)
      : device_(device), group_(std::max<std::int64_t>(steps_per_group, 1)), start_(now()) {}

  /// To be called at the end of each step.
  void step() {
    if (++steps_ % group_ != 0) return;
    const Clock::time_point end = now();
    groups_.push_back(std::chrono::duration<double>(end - start_).count() /
                      static_cast<double>(group_));
    start_ = end;
  }

  /// The median of the finished groups; the first, in which memory is allocated and kernels are
  /// chosen, counts only if there is no other. A first guess before the end of the first group.
  double seconds_per_step() const {
    if (groups_.empty()) {
      return std::chrono::duration<double>(Clock::now() - start_).count() /
             static_cast<double>(std::max<std::int64_t>(steps_, 1));
    }
    std::vector<double> timed(groups_.begin() + (groups_.size() > 1 ? 1 : 0), groups_.end());
    const auto middle = timed.begin() + static_cast<std::ptrdiff_t>(timed.size() / 2);
    std::nth_element(timed.begin(), middle, timed.end());
    return *middle;
  }

 private:
  Clock::time_point now() const {
    if (device_.is_cuda()) torch::cuda::synchronize();
    return Clock::now();
  }

  c10::Device device_;
  std::int64_t group_;
  std::int64_t steps_ = 0;
  std::vector<double> groups_;
  Clock::time_point start_;
};

}  // namespace support
