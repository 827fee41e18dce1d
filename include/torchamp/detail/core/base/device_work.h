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

namespace TORCHAMP_NAMESPACE::detail {

// Work that a device does later or repeats, as the host can observe it.

/// The type of the machine's accelerator, if LibTorch has one.
inline std::optional<c10::DeviceType> accelerator() {
#if TORCHAMP_LIBTORCH >= 207
  return at::accelerator::getAccelerator();
#else
  return at::getAccelerator();
#endif
}

/// An uninitialised tensor on the host, for non-blocking copies from `device`. It is pinned if the
/// accelerator has pinned memory, because LibTorch waits for copies to other memory.
inline at::Tensor copy_target(at::Device device, at::IntArrayRef sizes,
                              at::ScalarType dtype = at::kFloat) {
  const c10::InferenceMode no_inference(false);
  const auto options = at::TensorOptions(at::kCPU).dtype(dtype);
  if (accelerator() != device.type()) return at::empty(sizes, options);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const c10::NotImplementedError&) {  // a device outside LibTorch, without pinned memory
    return at::empty(sizes, options);
  }
}

/// Numbers on a device, copied to host memory; nothing waits for the copy.
class HostMirror {
 public:
  /// Copies `numbers` after the device's present work. They are fp32, and equally many in each
  /// call. Until the copy arrives, the mirror shows `meanwhile`; if that is unset, the previous
  /// numbers; initially 0.
  void send(const at::Tensor& numbers, std::optional<float> meanwhile = {}) {
    if (!shown_.defined()) shown_ = copy_target(numbers.device(), numbers.sizes()).zero_();
    if (meanwhile) std::fill_n(shown_.mutable_data_ptr<float>(), shown_.numel(), *meanwhile);
    shown_.copy_(numbers, /*non_blocking=*/true);
  }

  bool empty() const { return !shown_.defined(); }

  /// Number `i` of the latest send() that has arrived.
  float operator[](int64_t i) const {
    return static_cast<const volatile float*>(shown_.const_data_ptr<float>())[i];
  }

 private:
  at::Tensor shown_;
};

/// State on the device that captured work uses and that each replay changes, as far as the host can
/// follow it.
class ReplayedState {
 public:
  virtual ~ReplayedState() = default;
  /// Called before a capture, not in it: reads the present state. Waits for the device.
  virtual void settle() = 0;
  /// Called before a replay: whether the captured work is still valid.
  virtual bool holds() = 0;
  /// Called before each replay except the first, which the capture has already counted.
  virtual void note_replay() {}
  /// Whether look() must be called after a replay, on the stream of the body.
  virtual bool wants_look() const = 0;
  virtual void look() = 0;
};

using ReplayedStates = std::vector<std::shared_ptr<ReplayedState>>;

/// While it lives, the calling thread runs the body of a CudaGraph (warm-ups included). Work that a
/// graph cannot hold then throws an error that names it, before anything is captured.
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

  /// Identifies the body. A new try after a failure has another identity.
  const std::shared_ptr<const void> identity = std::make_shared<char>();

  /// States that the body uses; the code that uses a state adds it.
  ReplayedStates states;
  /// Objects that only eager work creates. If one is destroyed, an iteration must run eagerly.
  std::vector<std::weak_ptr<const void>> made_eagerly;
  /// Memory of the caller's stream that the body no longer uses.
  std::vector<at::Tensor> kept;

  /// Throws an error with the text `why`, which names work that no graph can hold. In a warm-up
  /// that may_refuse, the text is recorded instead, and later iterations run eagerly. Outside of a
  /// body it does nothing.
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

}  // namespace TORCHAMP_NAMESPACE::detail
