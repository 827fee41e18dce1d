// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchamp/detail/distributed/collective.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// What is true on any process. Collective, by way of `device`, which it reads; `call` begins the
/// errors.
inline std::vector<bool> on_any_process(c10d::ProcessGroup& group, const std::vector<bool>& here,
                                        c10::Device device, const char* call) {
  at::Tensor flags = at::zeros({static_cast<int64_t>(here.size())}, at::kInt);
  for (std::size_t i = 0; i < here.size(); ++i) flags.mutable_data_ptr<int32_t>()[i] = here[i];
  std::vector<at::Tensor> tensors{flags.to(device)};
  collective(call, [&] { group.allreduce(tensors)->wait(); });
  flags = tensors[0].cpu();
  std::vector<bool> result(here.size());
  for (std::size_t i = 0; i < here.size(); ++i) {
    result[i] = flags.const_data_ptr<int32_t>()[i] > 0;
  }
  return result;
}

}  // namespace torchamp::detail
