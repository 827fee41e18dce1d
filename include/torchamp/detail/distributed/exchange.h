// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Where processes exchange what lies on the host: there if the group can, else on the current
/// device of those that it can, as with NCCL alone.
inline at::Device exchange_device(const c10d::ProcessGroup& group) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const auto is_cpu = [](const c10::Device& device) { return device.is_cpu(); };
  if (devices.empty() || std::ranges::any_of(devices, is_cpu)) return at::kCPU;
  return c10::impl::VirtualGuardImpl(devices[0].type()).getDevice();
}

// LibTorch renames c10d's collectives. A template asks for the new name first.

/// Begins to send part r of `from` to process r, and to fill part r of `to` with what it sends:
/// vectors of equal parts.
template <class Group>
c10::intrusive_ptr<c10d::Work> start_all_to_all(Group& group, at::Tensor& to, at::Tensor& from) {
  std::vector<int64_t> equal;
  if constexpr (requires { group.all_to_all_single(to, from, equal, equal); }) {
    return group.all_to_all_single(to, from, equal, equal);
  } else {
    return group.alltoall_base(to, from, equal, equal);
  }
}

/// Begins to fill part r of `to` with `from` of process r.
template <class Group>
c10::intrusive_ptr<c10d::Work> start_all_gather(Group& group, at::Tensor& to, at::Tensor& from) {
  if constexpr (requires { group.all_gather_single(to, from); }) {
    return group.all_gather_single(to, from);
  } else {
    return group._allgather_base(to, from);
  }
}

}  // namespace torchamp::detail
