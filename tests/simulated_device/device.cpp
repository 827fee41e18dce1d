// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/device.h"

#include <ATen/Context.h>
#include <c10/core/DeviceType.h>
#include <c10/core/TensorImpl.h>

#include "simulated_device/memory.h"
#include "simulated_device/register.h"

namespace simulated {

namespace {

bool start() {
  if (at::hasCUDA()) return false;
  c10::register_privateuse1_backend("sim");
  install_fault_handler();
  register_guard();
  register_hooks();
  const auto library = [](const char* ns, c10::DispatchKey key) {
    return new torch::Library(torch::Library::IMPL, ns, key, __FILE__, __LINE__);
  };
  torch::Library* const aten = library("aten", c10::DispatchKey::PrivateUse1);
  register_fallback(*library("_", c10::DispatchKey::PrivateUse1), *aten);
  register_copies(*aten);
  register_checked_kernels(*aten);
  register_scaled_mm(*aten);
  library("_", c10::DispatchKey::AutocastPrivateUse1)
      ->fallback(torch::CppFunction::makeFallthrough());
  register_autocast(*library("aten", c10::DispatchKey::AutocastPrivateUse1));
  return true;
}

// Before main: LibTorch makes its backward threads for the devices that it knows then.
const bool started = start();

/// A tensor's protected parts.
struct Parts : c10::TensorImpl {
  static void copy(const c10::TensorImpl* from, c10::TensorImpl* to) {
    copy_tensor_metadata(from, to, to->version_counter(), to->allow_tensor_metadata_change());
  }
};

}  // namespace

bool available() {
  return started;
}

void move_in_place(at::Tensor& tensor, c10::Device device) {
  if (tensor.device() == device) return;
  const at::Tensor moved = tensor.detach().to(device);
  Parts::copy(moved.unsafeGetTensorImpl(), tensor.unsafeGetTensorImpl());
}

}  // namespace simulated
