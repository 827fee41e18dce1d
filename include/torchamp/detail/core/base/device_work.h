// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceType.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// What the host knows of work that a device does later, or once more.

/// The type of the machine's accelerator, if LibTorch has one.
inline std::optional<c10::DeviceType> accelerator() {
#if TORCHAMP_LIBTORCH >= 207
  return at::accelerator::getAccelerator();
#else
  return at::getAccelerator();
#endif
}

/// A tensor on the host that nobody has written, for non-blocking copies from `device`:
/// pinned where the accelerator has pinned memory, since copies to any other are waited for.
inline at::Tensor copy_target(at::Device device, at::IntArrayRef sizes,
                              at::ScalarType dtype = at::kFloat) {
  const c10::InferenceMode no_inference(false);
  const auto options = at::TensorOptions(at::kCPU).dtype(dtype);
  if (accelerator() != device.type()) return at::empty(sizes, options);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const c10::NotImplementedError&) {  // of a device outside LibTorch, without it
    return at::empty(sizes, options);
  }
}

/// Numbers that only a device knows, copied to host memory without anyone waiting for the copy.
class HostMirror {
 public:
  /// Copies `numbers`, fp32 and always as many, behind what their device is doing. Until the copy
  /// arrives, the mirror shows `meanwhile`, or else what it has shown before; 0 at first.
  void send(const at::Tensor& numbers, std::optional<float> meanwhile = {}) {
    if (!shown_.defined()) shown_ = copy_target(numbers.device(), numbers.sizes()).zero_();
    if (meanwhile) std::fill_n(shown_.mutable_data_ptr<float>(), shown_.numel(), *meanwhile);
    shown_.copy_(numbers, /*non_blocking=*/true);
  }

  bool empty() const { return !shown_.defined(); }

  /// What has arrived of number `i`, from the latest send() or one before.
  float operator[](int64_t i) const {
    return static_cast<const volatile float*>(shown_.const_data_ptr<float>())[i];
  }

 private:
  at::Tensor shown_;
};

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
  virtual void note_replay() {}
  /// Whether look() is to be called behind a replay, on the stream of the body.
  virtual bool wants_look() const = 0;
  virtual void look() = 0;
};

using ReplayedStates = std::vector<std::shared_ptr<ReplayedState>>;

/// Marks the calling thread as one that runs the body of a CudaGraph, warm-ups included, while it
/// lives: what a graph cannot hold is refused there by name, before anything is captured.
class GraphBody {
 public:
  GraphBody() : outer_(current()) { current() = this; }
  GraphBody(const GraphBody&) = delete;
  GraphBody& operator=(const GraphBody&) = delete;
  ~GraphBody() { current() = outer_; }

  /// Null outside of a body.
  static GraphBody*& current() {
    static thread_local GraphBody* body = nullptr;
    return body;
  }
  static bool is_running() { return current() != nullptr; }

  /// Of which body something is: a failed one's next try is another.
  const std::shared_ptr<const void> identity = std::make_shared<char>();

  /// What the body relies on, as those add to it who use it.
  ReplayedStates states;
  /// The same, of what only eager work makes: once one is gone, an iteration has to run eagerly.
  std::vector<std::weak_ptr<const void>> made_eagerly;
  /// Memory of the caller's stream that the body has used for the last time.
  std::vector<at::Tensor> kept;

  /// An error that names what no graph can hold, as `why` says; but in a warm-up that may_refuse,
  /// and goes on eagerly afterwards, it is noted. Outside of a body, nothing.
  static void check(const std::string& why) {
    GraphBody* const body = current();
    if (!body) return;
    TORCHAMP_CHECK(body->may_refuse, why);
    if (body->refusal.empty()) body->refusal = why;
  }
  bool may_refuse = false;
  std::string refusal;

 private:
  GraphBody* outer_;
};

}  // namespace torchamp::detail
