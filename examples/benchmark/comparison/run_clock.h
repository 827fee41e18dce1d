// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <chrono>
#include <ctime>

/// What came of a run of several steps, or calls.
struct RunResult {
  double seconds = 0.;    ///< for all of them
  double processor = 0.;  ///< seconds that this process was computing on the host
  double loss = 0.;
  double first_loss = 0.;
};

/// Takes the time from its construction on, of all that the device was given to do.
class RunClock {
 public:
  explicit RunClock(at::Device device) : device_(device) {
    synchronize();
    start_ = Clock::now();
    processor_start_ = std::clock();
  }

  /// Waits for the device. The losses are left to the caller.
  RunResult read() const {
    synchronize();
    return {.seconds = std::chrono::duration<double>(Clock::now() - start_).count(),
            .processor = static_cast<double>(std::clock() - processor_start_) /
                         static_cast<double>(CLOCKS_PER_SEC)};
  }

 private:
  using Clock = std::chrono::steady_clock;

  void synchronize() const {
    if (device_.is_cuda()) torch::cuda::synchronize();
  }

  at::Device device_;
  Clock::time_point start_;
  std::clock_t processor_start_ = 0;
};
