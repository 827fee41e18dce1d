// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "torchamp/version.h"

namespace torchamp::detail {

/// How often the tensor's memory was written to in place, as far as LibTorch counts it.
inline std::uint32_t version_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return 0;
  return static_cast<std::uint32_t>(tensor._version());
}

}  // namespace torchamp::detail
