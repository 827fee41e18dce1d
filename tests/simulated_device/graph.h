// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "simulated_device/capture.h"

namespace simulated {

/// What a stream was given between begin() and end(), to be done again in each replay; see
/// Note [A capture]. As CUDA's: on a stream that is not the default one, from one thread, with its
/// own memory, which nothing else gets before reset().
///
/// Where LibTorch has a registry of graphs (2.15), this is the device's.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Captures from the current stream of the current device. `only_this_thread`: other threads may
  /// wait meanwhile (cudaStreamCaptureModeThreadLocal).
  void begin(bool only_this_thread = true);
  /// Throws if the capture is invalid: after a wait, or with work on other streams that the first
  /// one does not wait for. It has ended then as well.
  void end();
  /// Does the work on the current stream of its device. An error, before anything is done, if
  /// memory outside of its pool is gone.
  void replay();
  void reset();

 private:
  std::unique_ptr<Capture> capture_;
  c10::DeviceIndex device_ = 0;
  std::shared_ptr<Pool> pool_;
  std::vector<Work> work_;
  bool recorded_ = false;
};

/// While it lives, `stream` is as one that a graph is captured from: it does nothing, and what
/// makes the host wait, or touches the generator's state, throws, on whatever thread it happens.
class Capturing {
 public:
  explicit Capturing(c10::Stream stream);
  ~Capturing();
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;

 private:
  Capture capture_;
};

}  // namespace simulated
