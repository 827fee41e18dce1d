// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/utils.h>

namespace support {

/// How long a step takes in fp32 and in mixed precision, in seconds.
struct StepTimes {
  double fp32, amp;
  double both() const { return fp32 + amp; }
};

/// What `trial` measures on a CPU, with all of LibTorch's threads or with one, whichever is faster;
/// LibTorch keeps that number. Several threads wait for each other at every op: where other
/// programs keep the cores busy, or a container has fewer than it shows, one alone is much faster.
template <class Trial>
StepTimes try_on_cpu(Trial trial) {
  const int threads = torch::get_num_threads();
  const StepTimes all = trial();
  if (threads == 1) return all;
  torch::set_num_threads(1);
  const StepTimes one = trial();
  if (one.both() < all.both()) return one;
  torch::set_num_threads(threads);
  return all;
}

}  // namespace support
