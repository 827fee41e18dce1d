// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// State on the device that captured work relies on and changes in each replay, as far as the host
/// can track it.
class ReplayedState {
 public:
  virtual ~ReplayedState() = default;
  /// Called before a capture, outside it: determines the present state. Waits for the device.
  virtual void settle() = 0;
  /// Called before a replay: whether the captured assumptions still hold.
  virtual bool holds() = 0;
  /// Called before each replay but the first, for which the capture counts.
  virtual void note_replay() = 0;
  /// Whether look() must be called after a replay, on the body's stream.
  virtual bool wants_look() const = 0;
  virtual void look() = 0;
};
class ScaleFollower;  // the scaler's

using ReplayedStates = std::vector<std::shared_ptr<ReplayedState>>;

/// While it lives, marks the calling thread as running the body of a CudaGraph, warm-ups included:
/// what a graph cannot hold is refused there by name, before any capture.
class GraphBody {
 public:
  /// `follower` tracks the scales of scalers; null if nothing does.
  explicit GraphBody(const ScaleFollower* follower = nullptr)
      : scales(follower), outer_(current()) {
    current() = this;
  }
  GraphBody(const GraphBody&) = delete;
  GraphBody& operator=(const GraphBody&) = delete;
  ~GraphBody() { current() = outer_; }

  /// Null outside of a body.
  static GraphBody*& current() {
    static thread_local GraphBody* body = nullptr;
    return body;
  }
  static bool is_running() { return current() != nullptr; }
  /// The number of the body that this thread runs (each retry has a new one); 0 outside a body.
  static std::uint64_t current_number() { return is_running() ? current()->number_ : 0; }

  const ScaleFollower* const scales;

  /// State that the body relies on, added by its users.
  ReplayedStates states;
  /// The same for objects that only eager work creates: once one is destroyed, an iteration must
  /// run eagerly.
  std::vector<std::weak_ptr<const void>> made_eagerly;
  /// Memory of the caller's stream that the body no longer uses.
  std::vector<at::Tensor> kept;

 private:
  static std::uint64_t next_number() {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
  }

  GraphBody* outer_;
  std::uint64_t number_ = next_number();
};

}  // namespace torchamp::detail
