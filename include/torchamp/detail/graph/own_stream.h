// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// A stream of LibTorch's pool that no other OwnStream has while it lives. LibTorch hands its
/// streams out in turn, so that two graphs could get one; and where one of them goes, it clears
/// workspaces of that stream that the other still replays into.
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
    // More than a pool of CUDA's has for one priority.
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
                " graphs are alive and hold all streams that LibTorch has for ", device,
                ". Let go of one before another is made.");
    return c10::Stream(c10::Stream::DEFAULT, device);  // not reached, which GCC does not see
  }

  c10::Stream stream_;
};

}  // namespace torchamp::detail
