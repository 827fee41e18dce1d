// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <string>

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

/// A line of /proc/self/status in bytes: "VmRSS" is what this process holds in memory, "VmHWM" the
/// most that it ever held. 0 where there is no such file.
inline std::int64_t process_memory(const std::string& line) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kibibytes = 0;
    if (word == line + ":" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}
