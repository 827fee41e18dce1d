// SPDX-License-Identifier: BSD-3-Clause
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <vector>

#include "simulated_device/memory.h"
#include "simulated_device/register.h"

namespace simulated {

namespace {

thread_local c10::DeviceIndex current_device = 0;

c10::Stream stream_of(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, {c10::kPrivateUse1, device}, id);
}

/// The next of the streams that are there for everyone.
c10::Stream pooled_stream(c10::DeviceIndex device, bool high_priority) {
  struct Pool {
    std::mutex mutex;
    std::vector<int64_t> streams;
    std::size_t next = 0;
  };
  static auto& pools = *new std::array<std::array<Pool, 2>, device_count>;
  Pool& pool = pools.at(static_cast<std::size_t>(device)).at(high_priority ? 1 : 0);
  const std::scoped_lock lock(pool.mutex);
  constexpr std::size_t size = 32;
  const std::size_t place = pool.next++ % size;
  if (place == pool.streams.size()) pool.streams.push_back(new_stream(device));
  return stream_of(device, pool.streams[place]);
}

constexpr bool is_noexcept = TORCH_VERSION_MINOR < 10;  // what older versions of LibTorch want

/// The current device and streams of each thread, and events.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {c10::kPrivateUse1, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        device.type() == c10::kPrivateUse1 && device.index() >= 0 && device.index() < device_count,
        "simulated device: there is no ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
#if TORCH_VERSION_MINOR >= 10
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }
#endif
  void synchronizeDevice(c10::DeviceIndex device) const override {
    wait_for_device(device);
  }

  c10::Stream getStream(c10::Device device) const noexcept(is_noexcept) override {
    const c10::DeviceIndex index = index_of(device);
    return stream_of(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), index_of(device));
  }
  /// One of 32, in turn, as CUDA's.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return pooled_stream(index_of(device), high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(index_of(device), new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept(is_noexcept) override {
    return stream_of(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for(stream.id(), "synchronizeStream");
  }
#if TORCH_VERSION_MINOR >= 15
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return is_capturing(stream.id());
  }
#endif
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get()) block_of(data.get())->accesses.recorded.insert(stream.id());
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (!*event) *event = new Event;
    simulated::record(*static_cast<Event*>(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) simulated::block(*static_cast<Event*>(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    return !event || query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.index() >= 0 ? device.index() : current_device;
  }
};

}  // namespace

void register_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::kPrivateUse1, new Guard);
}

}  // namespace simulated
