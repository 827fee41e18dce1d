// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "torchamp/detail/graph/device_graph.h"

// LibTorch has a registry of devices with graphs since 2.15 or a little before.
#if __has_include(<ATen/core/GraphImplInterface.h>)
#define TORCHAMP_REGISTERED_GRAPHS 1
#include <ATen/core/GraphImplInterface.h>

#include <utility>
#else
#define TORCHAMP_REGISTERED_GRAPHS 0
#endif

namespace torchamp::detail {

#if TORCHAMP_REGISTERED_GRAPHS

/// A graph of any device that has told LibTorch of its own.
class RegisteredGraph final : public DeviceGraph {
 public:
  explicit RegisteredGraph(std::unique_ptr<at::GraphImplInterface> graph)
      : graph_(std::move(graph)) {}

  /// Only this thread's calls are restricted: one that loads data may use the device meanwhile.
  void begin() override { graph_->capture_begin({0, 0}, at::GraphCaptureMode::ThreadLocal); }
  void end() override { graph_->capture_end(); }
  void replay() override { graph_->replay(); }
  void reset() override { graph_->reset(); }

  void abandon() noexcept override {
    attempt([&] { graph_->capture_end(); });
    attempt([&] { graph_->reset(); });
  }

 private:
  std::unique_ptr<at::GraphImplInterface> graph_;
};

inline bool has_registered_graphs(c10::DeviceType device) {
  return at::has_graph_impl(device);
}
inline std::unique_ptr<DeviceGraph> make_registered_graph(c10::Device device) {
  return std::make_unique<RegisteredGraph>(at::create_graph_impl(device.type()));
}

#else

inline bool has_registered_graphs(c10::DeviceType) {
  return false;
}
inline std::unique_ptr<DeviceGraph> make_registered_graph(c10::Device) {
  return nullptr;
}

#endif

}  // namespace torchamp::detail
