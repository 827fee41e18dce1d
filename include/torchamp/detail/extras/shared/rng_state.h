// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Whether this process has the device.
inline bool device_is_here(at::Device device) {
  if (device.is_cpu()) return true;
  const auto type = accelerator();
  if (type != device.type()) return false;
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*type);
  return std::max<c10::DeviceIndex>(device.index(), 0) < hooks.deviceCount();
}

/// The default generators of the CPU and of every accelerator that the process has used so far.
inline std::vector<at::Generator> default_generators() {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (const auto type = accelerator()) {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*type);
    for (c10::DeviceIndex index = 0; index < hooks.deviceCount(); ++index) {
      if (hooks.hasPrimaryContext(index)) generators.push_back(hooks.getDefaultGenerator(index));
    }
  }
  return generators;
}

/// The states of LibTorch's default generators, stored on the host; no device is waited for.
class RngState {
 public:
  static RngState now() {
    RngState state;
    for (at::Generator& generator : default_generators()) {
      const std::lock_guard lock(generator.mutex());
      at::Tensor bytes = generator.get_state();
      state.states_.emplace_back(generator, std::move(bytes));
    }
    return state;
  }

  /// By device: "cpu", "cuda:0", … For files.
  std::map<std::string, at::Tensor> by_device() const {
    std::map<std::string, at::Tensor> bytes_of;
    for (const auto& [generator, bytes] : states_) bytes_of[generator.device().str()] = bytes;
    return bytes_of;
  }

  /// The states of the default generators of these devices. Throws for a device that the process
  /// does not have, and for a tensor that is no state of its generator.
  static RngState from(const std::map<std::string, at::Tensor>& by_device) {
    RngState state;
    for (const auto& [name, bytes] : by_device) {
      const at::Device device(name);
      TORCH_CHECK(device_is_here(device), "it holds the random state of ", name,
                  ", and this machine has no such device. Resume where there is one, or call "
                  "load_shared(), which ignores random states.");
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard lock(generator.mutex());
      generator.clone().set_state(bytes);
      state.states_.emplace_back(generator, bytes);
    }
    return state;
  }

  void apply() const {
    for (const auto& [generator, bytes] : states_) {
      at::Generator same = generator;
      const std::lock_guard lock(same.mutex());
      same.set_state(bytes);
    }
  }

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// A region in which random functions continue from `state`; restores the previous states.
class RngScope {
 public:
  explicit RngScope(const RngState& state) : before_(RngState::now()) { state.apply(); }
  RngScope(const RngScope&) = delete;
  RngScope& operator=(const RngScope&) = delete;
  ~RngScope() { before_.apply(); }

 private:
  RngState before_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
