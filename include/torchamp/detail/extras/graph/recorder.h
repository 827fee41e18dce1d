// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Interface that records a piece of work once and repeats it. CudaGraph's tests also implement it.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;

  /// The type of devices whose values the host cannot read in a recording.
  virtual c10::DeviceType device_type() const = 0;

  /// Runs `work` on the stream of recordings, so one-time initialisation happens here.
  virtual void run(const std::function<void()>& work) = 0;

  /// Calls `work` once and records its device work, without executing it, in place of an earlier
  /// recording. If `work` throws, there is no recording, and the device is unchanged.
  virtual void record(const std::function<void()>& work) = 0;

  /// Repeats the recorded work. Does not wait for its end.
  virtual void replay() = 0;

  /// Lets go of the recording and its memory.
  virtual void reset() = 0;

  /// A recorder on the same stream, whose recordings share memory with this recorder's: they are
  /// replayed in turn.
  virtual std::unique_ptr<GraphRecorder> another() const = 0;
};

/// Interface of a device with graphs: records the work of one stream, and replays it. An object
/// records at most once.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;

  /// From now on records the work of the current device's current stream without executing it. Its
  /// allocations belong to the graph while the graph lives.
  virtual void begin() = 0;

  /// Ends the recording and prepares it for replay.
  virtual void end() = 0;

  /// Drops a recording that an exception interrupted, or that end() refused.
  virtual void abandon() noexcept = 0;

  /// Repeats the recorded work on the current stream. Does not wait for its end.
  virtual void replay() = 0;

  /// Lets go of the recording and its memory.
  virtual void reset() = 0;

 protected:
  /// For abandon(): returns whether `call` did not throw. The error behind the abandonment is
  /// already propagating.
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

/// A stream of LibTorch's pool that no other OwnStream has while it lives. LibTorch hands out its
/// streams in turn, so two graphs could share one; when one of them is destroyed, it clears that
/// stream's workspaces, into which the other still replays.
class OwnStream {
 public:
  explicit OwnStream(c10::Device device) : stream_(take(device)) {}
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() {
    const std::scoped_lock lock(registry().mutex);
    auto& taken = registry().taken;
    taken.erase(std::find(taken.begin(), taken.end(), stream_));
  }

  c10::Stream get() const { return stream_; }

 private:
  struct Registry {
    std::mutex mutex;
    std::vector<c10::Stream> taken;
  };
  static Registry& registry() {
    static auto& registry = *new Registry;  // never destroyed: graphs may live until the exit
    return registry;
  }

  static c10::Stream take(c10::Device device) {
    // More than CUDA's pool has for one priority.
    constexpr int draws = 64;
    const c10::impl::VirtualGuardImpl backend(device.type());
    const std::scoped_lock lock(registry().mutex);
    auto& taken = registry().taken;
    for (const bool high_priority : {false, true}) {
      for (int draw = 0; draw < draws; ++draw) {
        const c10::Stream stream = backend.getStreamFromGlobalPool(device, high_priority);
        if (std::find(taken.begin(), taken.end(), stream) != taken.end()) continue;
        taken.push_back(stream);
        return stream;
      }
    }
    TORCH_CHECK(false, "CudaGraph: ", taken.size(),
                " graphs exist and use all of LibTorch's streams for ", device,
                ". Destroy one before you make another.");
    return c10::Stream(c10::Stream::DEFAULT, device);  // not reached, but GCC warns without it
  }

  c10::Stream stream_;
};

/// Records with a device's graphs, on a separate stream.
class StreamRecorder final : public GraphRecorder {
 public:
  using MakeGraph = std::function<std::unique_ptr<DeviceGraph>(c10::Device)>;

  StreamRecorder(c10::Device device, MakeGraph make_graph)
      : StreamRecorder(device, std::make_shared<OwnStream>(device), std::move(make_graph)) {}
  ~StreamRecorder() override {
    try {
      reset();
    } catch (const std::exception&) {  // at the program's end the device may be destroyed before
                                       // this object
      (void)graph_.release();
    }
  }

  c10::DeviceType device_type() const override { return device_.type(); }

  void run(const std::function<void()>& work) override {
    const c10::Stream caller = backend().getStream(device_);
    order(caller, side_->get());
    try {
      const c10::StreamGuard on_side(side_->get());
      work();
    } catch (...) {
      order(side_->get(), caller);  // the caller's stream waits for the work
      throw;
    }
    order(side_->get(), caller);
  }

  void record(const std::function<void()>& work) override {
    const c10::DeviceGuard on_device(device_);
    reset();
    backend().synchronizeDevice(device_.index());
    empty_cache();  // else memory of the eager iterations would be unused
    const c10::StreamGuard on_side(side_->get());
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
    // Memory that warm-ups allocated belongs to this stream: once freed, it must not be reused
    // before that.
    order(backend().getStream(device_), side_->get());
  }

  void reset() override {
    if (graph_) graph_->reset();  // here, because it may throw and a destructor must not
    graph_.reset();
  }

  std::unique_ptr<GraphRecorder> another() const override {
    return std::unique_ptr<GraphRecorder>(new StreamRecorder(device_, side_, make_graph_));
  }

 private:
  StreamRecorder(c10::Device device, std::shared_ptr<const OwnStream> side, MakeGraph make_graph)
      : device_(device),
        side_(std::move(side)),
        event_(device.type()),
        make_graph_(std::move(make_graph)) {}

  c10::impl::VirtualGuardImpl backend() const {
    return c10::impl::VirtualGuardImpl(device_.type());
  }

  void empty_cache() const {
#if TORCHAMP_LIBTORCH >= 209
    auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device_.type()));
    if (allocator) allocator->emptyCache();
#endif
  }

  /// Makes later work of `later` wait for the present work of `earlier`.
  void order(c10::Stream earlier, c10::Stream later) {
    event_.record(earlier);
    event_.block(later);
  }

  c10::Device device_;
  std::shared_ptr<const OwnStream> side_;
  c10::Event event_;
  MakeGraph make_graph_;
  std::unique_ptr<DeviceGraph> graph_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
