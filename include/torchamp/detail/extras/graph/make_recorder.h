// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/extras/graph/recorder.h"
#include "torchamp/detail/extras/shared/cuda_versions.h"

// Whether CUDA graphs are compiled in: by default if CUDA's headers are found.
#if !defined(TORCHAMP_CUDA_GRAPHS)
#if __has_include(<cuda_runtime_api.h>) && __has_include(<ATen/cuda/CUDAGraph.h>)
#define TORCHAMP_CUDA_GRAPHS 1
#else
#define TORCHAMP_CUDA_GRAPHS 0
#endif
#endif

#if TORCHAMP_CUDA_GRAPHS
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>
#endif

// LibTorch has a registry of devices with graphs since 2.15 or a little before.
#if __has_include(<ATen/core/GraphImplInterface.h>)
#define TORCHAMP_REGISTERED_GRAPHS 1
#include <ATen/core/GraphImplInterface.h>
#else
#define TORCHAMP_REGISTERED_GRAPHS 0
#endif

namespace TORCHAMP_NAMESPACE::detail {

#if TORCHAMP_CUDA_GRAPHS

/// The memory of graphs that are replayed in turn. LibTorch drops a pool with the last of its
/// graphs, and does not add graphs to it afterwards.
class SharedPool {
 public:
  using Pool = decltype(at::cuda::graph_pool_handle());

  std::shared_ptr<const Pool> get() {
    auto pool = pool_.lock();
    if (!pool) pool_ = pool = std::make_shared<const Pool>(at::cuda::graph_pool_handle());
    return pool;
  }

 private:
  std::weak_ptr<const Pool> pool_;
};

/// LibTorch's CUDAGraph.
class CudaDeviceGraph final : public DeviceGraph {
 public:
  CudaDeviceGraph(c10::Device device, std::shared_ptr<const SharedPool::Pool> pool)
      : device_(device), pool_(std::move(pool)), graph_(std::make_unique<at::cuda::CUDAGraph>()) {}

  /// Restricts only this thread's calls: a thread that loads data may use CUDA meanwhile.
  void begin() override { graph_->capture_begin(*pool_, cudaStreamCaptureModeThreadLocal); }
  void end() override { graph_->capture_end(); }
  void replay() override { graph_->replay(); }
  void reset() override {
    graph_->reset();
    pool_.reset();
  }

  /// LibTorch's destructor does not end a capture. If CUDA invalidates the capture, then after
  /// LibTorch's capture_end() the allocators still call this graph to find its allocations, at the
  /// latest in the next capture. So they must be reset before the graph is destroyed.
  void abandon() noexcept override {
    if (!attempt([&] { graph_->capture_end(); })) {
      attempt([&] {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(device_.index(), *pool_);
        c10::cuda::CUDACachingAllocator::releasePool(device_.index(), *pool_);
      });
#if TORCHAMP_LIBTORCH >= 208
      attempt([this, host = at::getHostAllocator(at::kCUDA)] { leave_pool(*host, *pool_); });
#endif
    }
    graph_.reset();
    pool_.reset();
    // The thread still has the error of the failed capture, which the next op would report as its
    // own. LibTorch's check clears the error that it reports. (cudaGetLastError() itself would have
    // to be linked.)
    attempt([] { C10_CUDA_CHECK(cudaErrorIllegalState); });
  }

 private:
  /// Some versions of LibTorch also give a graph a pool of host memory.
  template <class Allocator, class Pool>
  static void leave_pool(Allocator& allocator, const Pool& pool) {
    if constexpr (requires { allocator.end_allocate_to_pool(pool); }) {
      allocator.end_allocate_to_pool(pool);
      allocator.release_pool(pool);
    }
  }

  c10::Device device_;
  std::shared_ptr<const SharedPool::Pool> pool_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

#endif

#if TORCHAMP_REGISTERED_GRAPHS

/// A graph of any device that has registered its graphs with LibTorch.
class RegisteredGraph final : public DeviceGraph {
 public:
  explicit RegisteredGraph(std::unique_ptr<at::GraphImplInterface> graph)
      : graph_(std::move(graph)) {}

  /// Restricts only this thread's calls: a thread that loads data may use the device meanwhile.
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

#endif

inline bool has_registered_graphs([[maybe_unused]] c10::DeviceType device) {
#if TORCHAMP_REGISTERED_GRAPHS
  return at::has_graph_impl(device);
#else
  return false;
#endif
}

/// The recorder for `device`. Errors: a device without graphs; CUDA, if this program was compiled
/// without CUDA's headers or with other headers than LibTorch.
inline std::unique_ptr<GraphRecorder> make_graph_recorder(c10::Device device) {
  StreamRecorder::MakeGraph make_graph;
  if (device.is_cuda()) {
#if TORCHAMP_CUDA_GRAPHS
    check_cuda_headers(CUDART_VERSION, at::detail::getCUDAHooks().versionCUDART());
    make_graph = [pool = std::make_shared<SharedPool>()](c10::Device its) {
      return std::make_unique<CudaDeviceGraph>(its, pool->get());
    };
#else
    TORCH_CHECK(
        false,
        "CudaGraph: this program was compiled without CUDA's headers (cuda_runtime_api.h). "
        "Compile it with the CUDA toolkit's include folder, or pass {.enabled = false} to run "
        "eagerly.");
#endif
  } else {
    TORCH_CHECK(has_registered_graphs(device.type()),
                "CudaGraph: the optimizers' parameters are on ", device,
                ", for which LibTorch has no graphs. Move the model to a device that has them "
                "(CUDA, say) before you make the optimizer, or pass {.enabled = false} to run "
                "eagerly.");
#if TORCHAMP_REGISTERED_GRAPHS
    make_graph = [](c10::Device its) {
      return std::make_unique<RegisteredGraph>(at::create_graph_impl(its.type()));
    };
#endif
  }
  return std::make_unique<StreamRecorder>(device, std::move(make_graph));
}

}  // namespace TORCHAMP_NAMESPACE::detail
