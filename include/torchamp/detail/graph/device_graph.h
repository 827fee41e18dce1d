// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <exception>

#include "torchamp/version.h"

namespace torchamp::detail {

/// What a device that has graphs implements: the work of one stream, recorded and done again. An
/// object records at most once.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;

  /// From here on what the current stream of the current device is given is recorded and not done.
  /// What is allocated for it lies in memory that nobody else gets while the graph lives.
  virtual void begin() = 0;

  /// Ends the recording and makes it ready to be done.
  virtual void end() = 0;

  /// Ends a recording that an exception broke off, or that end() refused, as if there had been
  /// none.
  virtual void abandon() noexcept = 0;

  /// Does what was recorded, on the current stream. Does not wait for the end of it.
  virtual void replay() = 0;

  /// Lets go of the recording and its memory.
  virtual void reset() = 0;

 protected:
  /// For abandon(): returns whether `call` has not thrown. The error for which a recording is
  /// abandoned is on its way already.
  template <class Call>
  static bool attempt(const Call& call) noexcept {
    try {
      call();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
};

}  // namespace torchamp::detail
