// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/DeviceType.h>

#include <functional>

#include "torchamp/version.h"

namespace torchamp::detail {

/// What records a piece of work once and repeats it. CudaGraph's tests have another one than CUDA.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;

  /// The devices whose values the host cannot see in a recording.
  virtual c10::DeviceType device_type() const = 0;

  /// Runs `work` where a recording would run it, so that what happens on first use happens here.
  virtual void run(const std::function<void()>& work) = 0;

  /// Calls `work` once and records what it asks of the device, in place of an earlier recording,
  /// without doing it. If `work` throws, there is no recording, and the device is as it was.
  virtual void record(const std::function<void()>& work) = 0;

  /// Does what was recorded. Does not wait for the end of it.
  virtual void replay() = 0;

  /// Lets go of the recording and its memory.
  virtual void reset() = 0;
};

}  // namespace torchamp::detail
