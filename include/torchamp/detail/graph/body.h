// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Something on the device that captured work relies on and changes with each replay, as far as the
/// host can follow it.
class ReplayedState {
 public:
  virtual ~ReplayedState() = default;
  /// Called before a capture, not in it: finds out what there is now. Waits for the device.
  virtual void settle() = 0;
  /// Called before a replay: whether what was captured still holds.
  virtual bool holds() = 0;
  /// Called before each replay but the first, for which the capture counts.
  virtual void note_replay() = 0;
  /// Whether look() is to be called behind a replay, on the stream of the body.
  virtual bool wants_look() const = 0;
  virtual void look() = 0;
};
class ScaleFollower;  // the scaler's

using ReplayedStates = std::vector<std::shared_ptr<ReplayedState>>;

/// Marks the calling thread as one that runs the body of a CudaGraph, warm-ups included, while it
/// lives: what a graph cannot hold is refused there by name, before anything is captured.
class GraphBody {
 public:
  /// `follower`: what follows the scales of scalers; null where nothing does.
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
  /// Which body this thread runs, of all that there were, a failed one's next try being another; 0
  /// outside of a body.
  static std::uint64_t current_number() { return is_running() ? current()->number_ : 0; }

  const ScaleFollower* const scales;

  /// What the body relies on, as those add to it who use it.
  ReplayedStates states;
  /// The same, of what only eager work makes: once one is gone, an iteration has to run eagerly.
  std::vector<std::weak_ptr<const void>> made_eagerly;
  /// Memory of the caller's stream that the body has used for the last time.
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
