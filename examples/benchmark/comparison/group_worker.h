// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>

#include "benchmark/comparison/way.h"
#include "benchmark/workload.h"

/// What a worker trains that is one of several.
struct GroupWorkerOptions {
  std::string model;
  Way way;
  Sizes sizes;
  std::int64_t threads = 0;       ///< 0: LibTorch's own choice
  std::int64_t bucket_bytes = 0;  ///< 0: torchamp's own choice
};

// Note [Workers in a group]
//   Each process of a group is a worker, see Note [Workers], which finds the others as torchrun
//   tells it, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. All get the same commands:
//
//     run 20    ran … sent=1048576 (by this process, to sockets; -1: sent_bytes.cpp is not there)
//     trace 1   traced start=9.1 forward=9.2 backward=9.4 end=9.5 sent=9.31:48,9.31:65536
//
//   A trace is of one step, in seconds of the monotonic clock: the ends of the last micro-batch's
//   forward and of its backward, which is when all gradients are computed, and what was sent when.

/// Serves as such a worker until the input ends. Returns the program's exit code. Defined where
/// Gloo's headers are.
int serve_in_group(const GroupWorkerOptions& options);
