// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace support {

namespace detail {

/// LibTorch's CPU allocator with a count: each block has its size written in front of it.
class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& instance() {
    static CountingAllocator allocator;
    return allocator;
  }

  c10::DataPtr allocate(std::size_t size) override {
    void* block = c10::alloc_cpu(size + header);
    std::memcpy(block, &size, sizeof size);
    const std::int64_t now = current_ += static_cast<std::int64_t>(size);
    for (std::int64_t peak = peak_; peak < now && !peak_.compare_exchange_weak(peak, now);) {
    }
    void* data = static_cast<char*>(block) + header;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

  void reset_peak() { peak_ = current_.load(); }
  std::int64_t peak() const { return peak_; }

 private:
  static constexpr std::size_t header = 64;  // keeps the alignment of what follows

  static void release(void* data) {
    if (!data) return;
    void* block = static_cast<char*>(data) - header;
    std::size_t size = 0;
    std::memcpy(&size, block, sizeof size);
    instance().current_ -= static_cast<std::int64_t>(size);
    c10::free_cpu(block);
  }

  std::atomic<std::int64_t> current_ = 0, peak_ = 0;
};

}  // namespace detail

/// Makes LibTorch count the bytes of CPU tensors. Call it before the first tensor is made: what is
/// older is not counted.
inline void count_cpu_memory() {
  c10::SetCPUAllocator(&detail::CountingAllocator::instance(), 1);
}

/// The most bytes that tensors took up at once since construction: on an accelerator by its
/// allocator's own statistics, on a CPU after count_cpu_memory(). What libraries allocate for
/// themselves, and what allocators keep in reserve, is not in it.
class PeakMemory {
 public:
  explicit PeakMemory(c10::Device device) : device_(device) {
    if (device_.is_cpu()) {
      detail::CountingAllocator::instance().reset_peak();
    } else {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
      at::accelerator::resetPeakStats(index());
#else
      TORCH_CHECK(false, "PeakMemory: LibTorch before 2.9 has no statistics of a ", device_.type(),
                  " device's allocator. Take a newer LibTorch, or a CPU.");
#endif
    }
  }

  std::int64_t bytes() const {
    if (device_.is_cpu()) return detail::CountingAllocator::instance().peak();
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
    return at::accelerator::getDeviceStats(index()).allocated_bytes[0].peak;  // 0: all pools
#else
    return 0;
#endif
  }

 private:
  c10::DeviceIndex index() const {
    return device_.has_index() ? device_.index() : c10::DeviceIndex{0};
  }

  c10::Device device_;
};

/// Gives back what an accelerator's allocator keeps for tensors to come.
inline void empty_device_cache() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
  at::accelerator::emptyCache();
#endif
}

}  // namespace support
