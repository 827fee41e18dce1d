// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Returns f(), which waits for other processes. Its exceptions (Gloo's are not c10::Errors) become
/// a c10::Error that begins with `call`.
template <class F>
decltype(auto) collective(const char* call, const F& f) {
  try {
    return f();
  } catch (const std::exception& error) {
    const auto* const own = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK_WITH(DistBackendError, false, call, ": ",
                     own ? own->what_without_backtrace() : error.what(),
                     " (Has another process failed or stalled, or does it have another model?)");
    throw;  // not reached
  }
}

/// The device for exchanges of host data: the host if the group supports it; otherwise, as with
/// NCCL alone, the current device of the group's type.
inline at::Device exchange_device(const c10d::ProcessGroup& group) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const auto is_cpu = [](const c10::Device& device) { return device.is_cpu(); };
  if (devices.empty() || std::ranges::any_of(devices, is_cpu)) return at::kCPU;
  return c10::impl::VirtualGuardImpl(devices[0].type()).getDevice();
}

// LibTorch renames c10d's collectives. A template tries the new name first.

/// Starts to send part r of `from` to process r, and to receive part r of `to` from process r. Both
/// are vectors of equal parts.
template <class Group>
c10::intrusive_ptr<c10d::Work> start_all_to_all(Group& group, at::Tensor& to, at::Tensor& from) {
  std::vector<int64_t> equal;
  if constexpr (requires { group.all_to_all_single(to, from, equal, equal); }) {
    return group.all_to_all_single(to, from, equal, equal);
  } else {
    return group.alltoall_base(to, from, equal, equal);
  }
}

/// Starts to fill part r of `to` with `from` of process r.
template <class Group>
c10::intrusive_ptr<c10d::Work> start_all_gather(Group& group, at::Tensor& to, at::Tensor& from) {
  if constexpr (requires { group.all_gather_single(to, from); }) {
    return group.all_gather_single(to, from);
  } else {
    return group._allgather_base(to, from);
  }
}

/// Reduces the elements of `tensor` over all processes: their sums, or as `op` says.
inline void reduce_over(const char* call, c10d::ProcessGroup& group, const at::Tensor& tensor,
                        c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  collective(call, [&] { group.allreduce(tensors, options)->wait(); });
}

/// Whether each value is true on any process. Collective, by means of `device`, which it reads;
/// `call` begins error messages.
inline std::vector<bool> on_any_process(const char* call, c10d::ProcessGroup& group,
                                        const std::vector<bool>& here, c10::Device device) {
  at::Tensor flags = at::tensor(std::vector<int32_t>(here.begin(), here.end())).to(device);
  reduce_over(call, group, flags);
  flags = flags.cpu();
  const auto* const sums = flags.const_data_ptr<int32_t>();
  std::vector<bool> result;
  for (int64_t i = 0; i < flags.numel(); ++i) result.push_back(sums[i] > 0);
  return result;
}

/// The values of all processes, by rank, on the host.
inline std::vector<at::Tensor> gather_all(const char* call,
                                          const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                          const at::Tensor& value) {
  std::vector<at::Tensor> own{value.to(exchange_device(*group))};
  std::vector<std::vector<at::Tensor>> gathered(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    gathered[0].push_back(at::zeros_like(own[0]));
  }
  collective(call, [&] { group->allgather(gathered, own)->wait(); });
  for (at::Tensor& one : gathered[0]) one = one.cpu();
  return std::move(gathered[0]);
}

inline std::vector<int64_t> gather_numbers(const char* call,
                                           const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                           int64_t number) {
  std::vector<int64_t> numbers;
  for (const at::Tensor& one : gather_all(call, group, at::full({1}, number, at::kLong))) {
    numbers.push_back(one.item<int64_t>());
  }
  return numbers;
}

/// FNV-1a over numbers.
class Fingerprint {
 public:
  void mix(int64_t number) { hash_ = (hash_ ^ static_cast<uint64_t>(number)) * 0x100000001b3U; }
  void mix(at::IntArrayRef numbers) {
    for (const int64_t number : numbers) mix(number);
  }
  int64_t value() const { return static_cast<int64_t>(hash_); }

 private:
  uint64_t hash_ = 0xcbf29ce484222325U;
};

/// Values that must agree on all processes.
class SameEverywhere {
 public:
  void add(const char* what, int64_t number) { all_.emplace_back(what, number); }

  /// Throws on all processes if a value differs from process 0's; names the first one. `call`
  /// begins the message. Collective.
  void check(const char* call, const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
    std::vector<int64_t> numbers;
    for (const auto& [what, number] : all_) numbers.push_back(number);
    const std::vector<at::Tensor> gathered = gather_all(call, group, at::tensor(numbers));
    for (std::size_t i = 0; i < all_.size(); ++i) {
      for (std::size_t process = 1; process < gathered.size(); ++process) {
        TORCH_CHECK_VALUE(gathered[process].const_data_ptr<int64_t>()[i] ==
                              gathered[0].const_data_ptr<int64_t>()[i],
                          call, ": process ", process, " has another ", all_[i].first,
                          " than process 0. Give all processes the same.");
      }
    }
  }

 private:
  std::vector<std::pair<const char*, int64_t>> all_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
