// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "simulated_device/graph.h"
#include "support/repeating_recorder.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/detail/extras/graph/make_recorder.h"
#include "torchamp/detail/extras/graph/recorder.h"

/// The simulated device's graphs, for LibTorch without a registry of graphs (2.11).
class UnregisteredGraph final : public torchamp::detail::DeviceGraph {
 public:
  void begin() override { graph_.begin(); }
  void end() override { graph_.end(); }
  void replay() override { graph_.replay(); }
  void reset() override { graph_.reset(); }
  void abandon() noexcept override {
    try {
      graph_.end();
    } catch (const c10::Error&) {
    }
    graph_.reset();
  }

 private:
  simulated::Graph graph_;
};

/// Whether a graph on `device` replays what it captured, as on CUDA; the CPU's does the work again.
inline bool has_graphs(at::DeviceType device) {
  return device != at::kCPU;
}

/// A CudaGraph on `device`: a real one if the device has graphs; on a CPU one that repeats the
/// work.
template <class Body>
std::unique_ptr<torchamp::CudaGraph> make_graph(at::DeviceType device,
                                                torchamp::CudaGraph::Optimizers optimizers,
                                                Body body, Repeater::Log& log,
                                                torchamp::CudaGraphOptions options = {}) {
  using torchamp::CudaGraph;
  using torchamp::detail::DeviceGraph;
  const bool repeats = device == at::kCPU;
  const bool unregistered =
      device == at::kPrivateUse1 && !torchamp::detail::has_registered_graphs(device);
  if (!repeats && !unregistered) {
    return std::make_unique<CudaGraph>(std::move(optimizers), std::move(body), options);
  }
  const auto wrapped =
      [body = std::move(body)](const CudaGraph::Tensors& batch) mutable -> CudaGraph::Tensors {
    return {body(batch)};
  };
  if (repeats) {
    return std::make_unique<CudaGraph>(std::move(optimizers), wrapped, options, repeating(log));
  }
  return std::make_unique<CudaGraph>(std::move(optimizers), wrapped, options,
                                     [](c10::Device where) {
                                       return std::make_unique<torchamp::detail::StreamRecorder>(
                                           where, [](c10::Device) -> std::unique_ptr<DeviceGraph> {
                                             return std::make_unique<UnregisteredGraph>();
                                           });
                                     });
}
