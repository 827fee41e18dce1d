// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "torchamp/detail/graph/device_graph.h"
#include "torchamp/detail/graph/own_stream.h"
#include "torchamp/detail/graph/recorder.h"
#include "torchamp/detail/libtorch.h"

namespace torchamp::detail {

/// Records with a device's graphs, on a stream of its own.
class StreamRecorder final : public GraphRecorder {
 public:
  using MakeGraph = std::function<std::unique_ptr<DeviceGraph>(c10::Device)>;

  StreamRecorder(c10::Device device, MakeGraph make_graph)
      : device_(device), side_(device), event_(device.type()), make_graph_(std::move(make_graph)) {}
  ~StreamRecorder() override {
    try {
      reset();
    } catch (const std::exception&) {  // at the program's end the device may be gone before this is
      (void)graph_.release();
    }
  }

  c10::DeviceType device_type() const override { return device_.type(); }

  void run(const std::function<void()>& work) override {
    const c10::Stream caller = backend().getStream(device_);
    order(caller, side_.get());
    try {
      const c10::StreamGuard on_side(side_.get());
      work();
    } catch (...) {
      order(side_.get(), caller);  // what was done is there
      throw;
    }
    order(side_.get(), caller);
  }

  void record(const std::function<void()>& work) override {
    const c10::DeviceGuard on_device(device_);
    reset();
    backend().synchronizeDevice(device_.index());
    empty_cache();  // what the eager iterations leave would lie idle
    const c10::StreamGuard on_side(side_.get());
    auto graph = make_graph_(device_);
    try {
      graph->begin();
      work();
      graph->end();
    } catch (...) {
      const std::exception_ptr reason = std::current_exception();
      graph->abandon();
      std::rethrow_exception(reason);
    }
    graph_ = std::move(graph);
  }

  void replay() override {
    const c10::DeviceGuard on_device(device_);
    graph_->replay();
    // What warm-ups made is memory of this stream: freed, it must not be used before that.
    order(backend().getStream(device_), side_.get());
  }

  void reset() override {
    if (graph_) graph_->reset();  // which may throw, as a destructor may not
    graph_.reset();
  }

 private:
  c10::impl::VirtualGuardImpl backend() const {
    return c10::impl::VirtualGuardImpl(device_.type());
  }

  void empty_cache() const {
#if TORCHAMP_LIBTORCH >= 209
    auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device_.type()));
    if (allocator) allocator->emptyCache();
#endif
  }

  /// What `later` does from now on waits for what `earlier` was given.
  void order(c10::Stream earlier, c10::Stream later) {
    event_.record(earlier);
    event_.block(later);
  }

  c10::Device device_;
  OwnStream side_;
  c10::Event event_;
  MakeGraph make_graph_;
  std::unique_ptr<DeviceGraph> graph_;
};

}  // namespace torchamp::detail
