// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/version.h"

namespace torchamp::detail {

/// Marks the calling thread as one that runs the body of a CudaGraph, warm-ups included, while it
/// lives: what a graph cannot hold is refused there by name, before anything is captured.
class GraphBody {
 public:
  GraphBody() : outer_(running()) { running() = true; }
  GraphBody(const GraphBody&) = delete;
  GraphBody& operator=(const GraphBody&) = delete;
  ~GraphBody() { running() = outer_; }

  static bool is_running() { return running(); }

 private:
  static bool& running() {
    static thread_local bool is = false;
    return is;
  }
  bool outer_;
};

}  // namespace torchamp::detail
