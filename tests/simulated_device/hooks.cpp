// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include "simulated_device/generator.h"
#include "simulated_device/memory.h"
#include "simulated_device/pinned.h"
#include "simulated_device/register.h"

namespace simulated {

namespace {

/// What LibTorch asks any accelerator.
struct Hooks final : at::PrivateUse1HooksInterface {
#if TORCH_VERSION_MINOR >= 8
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
#endif
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override {
    return device_count;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return guard().getDevice().index();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    guard().setDevice({c10::kPrivateUse1, device});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard().exchangeDevice({c10::kPrivateUse1, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return {c10::kPrivateUse1, block_of(pointer)->device};
  }
  bool isPinnedPtr(const void* pointer) const override {
    return pinned_block(pointer) != nullptr;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(!WithoutPinnedMemory::missing(), "no pinned memory");
    return pinned_allocator();
  }

 private:
  static c10::impl::VirtualGuardImpl guard() {
    return c10::impl::VirtualGuardImpl(c10::kPrivateUse1);
  }
};

}  // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(c10::kPrivateUse1, device_allocator());
}

}  // namespace simulated
