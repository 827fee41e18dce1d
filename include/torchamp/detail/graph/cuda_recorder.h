// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <functional>
#include <memory>

#include "torchamp/detail/cuda_versions.h"
#include "torchamp/detail/graph/own_stream.h"
#include "torchamp/detail/graph/recorder.h"

// Whether CUDA graphs are compiled in: where CUDA's headers are found, unless said otherwise.
#if !defined(TORCHAMP_CUDA_GRAPHS)
#if __has_include(<cuda_runtime_api.h>) && __has_include(<ATen/cuda/CUDAGraph.h>)
#define TORCHAMP_CUDA_GRAPHS 1
#else
#define TORCHAMP_CUDA_GRAPHS 0
#endif
#endif

#if TORCHAMP_CUDA_GRAPHS
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <exception>
#endif

namespace torchamp::detail {

#if TORCHAMP_CUDA_GRAPHS

/// Records with LibTorch's CUDAGraph, on a stream of its own.
class CudaGraphRecorder final : public GraphRecorder {
 public:
  explicit CudaGraphRecorder(c10::Device device) : device_(device), side_(device) {}
  ~CudaGraphRecorder() override {
    try {
      reset();
    } catch (const std::exception&) {  // at the program's end CUDA may be gone before this is
      (void)graph_.release();
    }
  }

  c10::DeviceType device_type() const override { return at::kCUDA; }

  void run(const std::function<void()>& work) override {
    const c10::Stream caller = current_stream();
    order(caller, side_.get());
    {
      const c10::StreamGuard on_side(side_.get());
      work();
    }
    order(side_.get(), caller);
  }

  void record(const std::function<void()>& work) override {
    const c10::DeviceGuard on_device(device_);
    reset();
    at::accelerator::synchronizeDevice(device_.index());
    at::accelerator::emptyCache();  // what the eager iterations leave would lie idle
    const c10::StreamGuard on_side(side_.get());
    graph_ = std::make_unique<at::cuda::CUDAGraph>();
    const auto pool = at::cuda::graph_pool_handle();
    try {
      // Only this thread's calls are restricted: one that loads data may use CUDA meanwhile.
      graph_->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
      work();
      graph_->capture_end();
    } catch (...) {
      const std::exception_ptr reason = std::current_exception();
      abandon(pool);
      std::rethrow_exception(reason);
    }
  }

  void replay() override {
    const c10::DeviceGuard on_device(device_);
    graph_->replay();
  }

  void reset() override {
    if (graph_) graph_->reset();  // which may throw, as a destructor may not
    graph_.reset();
  }

 private:
  c10::Stream current_stream() const {
    return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device_);
  }

  /// What `later` does from now on waits for what `earlier` was given.
  static void order(c10::Stream earlier, c10::Stream later) {
    c10::Event event(at::kCUDA);
    event.record(earlier);
    event.block(later);
  }

  /// Ends a capture that an exception broke off, which LibTorch's destructor does not do. Where
  /// CUDA calls the capture invalid, LibTorch's capture_end() leaves with the allocators still set
  /// to ask this graph which allocations are its own, at the latest in the next capture: they must
  /// forget it before it is gone.
  void abandon(c10::MempoolId_t pool) noexcept {
    const auto attempt = [](const auto& call) noexcept {
      try {
        call();
        return true;
      } catch (const std::exception&) {  // the reason for all this is on its way already
        return false;
      }
    };
    if (!attempt([&] { graph_->capture_end(); })) {
      attempt([&] {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(device_.index(), pool);
        c10::cuda::CUDACachingAllocator::releasePool(device_.index(), pool);
      });
      attempt([&] {
        at::HostAllocator* const host = at::getHostAllocator(at::kCUDA);
        host->end_allocate_to_pool(pool);
        host->release_pool(pool);
      });
    }
    graph_.reset();
  }

  c10::Device device_;
  OwnStream side_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

#endif

/// The recorder of a program with CUDA. An error where there is no CUDA device or this program was
/// compiled without CUDA's headers.
inline std::unique_ptr<GraphRecorder> make_cuda_graph_recorder(c10::Device device) {
  TORCH_CHECK(device.is_cuda(), "CudaGraph: the optimizers' parameters are on ", device,
              ", but only a CUDA device has graphs. Move the model there before the optimizer is "
              "made, or pass {.enabled = false} to run eagerly.");
#if TORCHAMP_CUDA_GRAPHS
  check_cuda_headers(CUDART_VERSION, at::detail::getCUDAHooks().versionCUDART());
  return std::make_unique<CudaGraphRecorder>(device);
#else
  TORCH_CHECK(
      false,
      "CudaGraph: this program was compiled without CUDA's headers (cuda_runtime_api.h). "
      "Compile it with the CUDA toolkit's include folder, or pass {.enabled = false} to run "
      "eagerly.");
#endif
}

}  // namespace torchamp::detail
