// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace simulated {

/// What the simulated accelerator has done, on both devices and all threads together.
struct Totals {
  int64_t kernels = 0;           ///< launches; a `_foreach_` or fused op over alike tensors is one
  int64_t host_to_device = 0;    ///< copies
  int64_t device_to_host = 0;    ///< copies, `item()` among them
  int64_t device_to_device = 0;  ///< copies between the devices; within one they are kernels
  int64_t waits = 0;             ///< times that the host waited for a device
  int64_t bytes_written = 0;     ///< by kernels and copies, to the devices' memory
  int64_t graph_launches = 0;    ///< replays, whose kernels and copies count as well
  int64_t bytes_read = 0;  ///< by kernels outside of graphs: arguments that they do not only store
};

Totals totals();

/// Counts from its construction on: `Counts counts; step(); EXPECT_EQ(counts.now().waits, 0);`
class Counts {
 public:
  Counts() : start_(totals()) {}

  Totals now() const {
    const Totals end = totals();
    return {end.kernels - start_.kernels,
            end.host_to_device - start_.host_to_device,
            end.device_to_host - start_.device_to_host,
            end.device_to_device - start_.device_to_device,
            end.waits - start_.waits,
            end.bytes_written - start_.bytes_written,
            end.graph_launches - start_.graph_launches,
            end.bytes_read - start_.bytes_read};
  }

 private:
  Totals start_;
};

/// What one op launched.
struct Launch {
  std::string op;
  int64_t kernels;
  int64_t elements;  ///< of all its arguments on the device
};

/// What is launched on both devices and all threads while it lives, in order. One at a time.
class LaunchLog {
 public:
  LaunchLog();
  ~LaunchLog();
  LaunchLog(const LaunchLog&) = delete;
  LaunchLog& operator=(const LaunchLog&) = delete;

  /// Up to now, and forgets it.
  std::vector<Launch> take();
};

/// For the device's own parts.
void count_launch(const Launch& launch);
void count(int64_t Totals::*what, int64_t by = 1);

}  // namespace simulated
