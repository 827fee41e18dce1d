// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>

#include "simulated_device/capture.h"
#include "simulated_device/memory.h"

namespace simulated {

namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device, at::Generator inner)
      : c10::GeneratorImpl({c10::kPrivateUse1, device},
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner_(std::move(inner)) {}

  void set_current_seed(std::uint64_t seed) override {
    refuse("set_current_seed of a generator");
    inner_.set_current_seed(seed);
    draws_ = 0;
  }
  void set_offset(std::uint64_t) override {
    TORCH_CHECK(false, "simulated device: its generators have no settable offset");
  }
  std::uint64_t get_offset() const override { return draws_; }
  std::uint64_t current_seed() const override {
    refuse("current_seed of a generator");
    return inner_.current_seed();
  }
  std::uint64_t seed() override {
    refuse("seed of a generator");
    return inner_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    refuse("set_state of a generator");
    inner_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    refuse("get_state of a generator");
    return inner_.unsafeGetGeneratorImpl()->get_state();
  }

  const at::Generator& draw() {
    if (Capture* const capture = capture_of(current_stream(device().index()))) {
      TORCH_CHECK(capture->device() == device().index() && this == of_device(),
                  "simulated device: a generator that is not a device's own is not in the graph");
      return capture->rehearsing(inner_);
    }
    ++draws_;
    return inner_;
  }

 private:
  const DeviceGenerator* of_device() const {
    return static_cast<DeviceGenerator*>(
        default_generator(device().index()).unsafeGetGeneratorImpl());
  }
  void refuse(const char* what) const {
    refuse_in_capture(current_stream(device().index()), what, false);
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), inner_.clone());
  }

  at::Generator inner_;
  std::uint64_t draws_ = 0;
};

c10::DeviceIndex or_current(c10::DeviceIndex device) {
  return device >= 0 ? device : c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getDevice().index();
}

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(or_current(device), at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* const all =
      new std::array<at::Generator, device_count>{new_generator(0), new_generator(1)};
  return all->at(static_cast<std::size_t>(or_current(device)));
}

at::Generator drawing(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == c10::kPrivateUse1,
              "simulated device: the generator is on ", generator.device());
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->draw();
}

}  // namespace simulated
