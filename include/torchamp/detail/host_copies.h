// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Tensors, where their values lie, and the values, which are kept on the host. Not the values of
/// those that repeat elements: no load fills them.
class HostCopies {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const at::Tensor memory = tensor.detach();
    at::Tensor values;
    if (!repeats_elements(memory)) {
      values = memory.to(at::kCPU, memory.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
    all_.push_back({tensor, memory, values});
  }

  /// Without memory of a device.
  void put_back() const {
    for (const auto& [tensor, memory, values] : all_) {
      if (memory.has_storage() && !tensor.is_alias_of(memory)) tensor.set_data(memory);
      if (values.defined()) memory.copy_(values);
    }
  }

 private:
  struct Held {
    at::Tensor tensor, memory, values;
  };
  std::vector<Held> all_;
};

}  // namespace torchamp::detail
