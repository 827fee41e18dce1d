// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/distributed/collective.h"

/// A group whose tensors may lie on any device: each call copies them to memory of the host, which
/// LibTorch's allocators do not know of, has another group do the work, and waits for it. Counts
/// what this process gives to it.
class StagingGroup final : public c10d::ProcessGroup {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  explicit StagingGroup(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : ProcessGroup(group->getRank(), group->getSize()), group_(std::move(group)) {}

  /// Makes it a group without a backend for CPU tensors, as one with NCCL alone.
  void take_only(c10::DeviceType type) {
    only_ = type;
    setBackend(type, BackendType::CUSTOM, std::nullopt);
  }

  std::int64_t exchanged_bytes = 0;  ///< by all_to_all_single()
  std::int64_t gathered_bytes = 0;   ///< by all_gather_single()

  // These override what one LibTorch or another has.

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
    return staged(tensors, [&](Tensors& host) { return group_->broadcast(host, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
    return staged(tensors, [&](Tensors& host) { return group_->allreduce(host, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) {
    Tensors input{on_host(inputs[0])};
    return staged(outputs[0], [&](Tensors& host) {
      std::vector<Tensors> to{host};
      return group_->allgather(to, input, options);
    });
  }
  WorkPtr all_to_all_single(at::Tensor& to, at::Tensor& from, std::vector<std::int64_t>&,
                            std::vector<std::int64_t>&, const c10d::AllToAllOptions& = {}) {
    exchanged_bytes += static_cast<std::int64_t>(from.nbytes());
    at::Tensor input = on_host(from);
    Tensors output{to};
    return staged(output, [&](Tensors& host) {
      return torchamp::detail::start_all_to_all(*group_, host[0], input);
    });
  }
  WorkPtr alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<std::int64_t>& to_sizes,
                        std::vector<std::int64_t>& from_sizes,
                        const c10d::AllToAllOptions& options) {
    return all_to_all_single(to, from, to_sizes, from_sizes, options);
  }
  WorkPtr all_gather_single(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& = {}) {
    gathered_bytes += static_cast<std::int64_t>(from.nbytes());
    at::Tensor input = on_host(from);
    Tensors output{to};
    return staged(output, [&](Tensors& host) {
      return torchamp::detail::start_all_gather(*group_, host[0], input);
    });
  }
  WorkPtr _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) {
    return all_gather_single(to, from, options);
  }

 private:
  at::Tensor on_host(const at::Tensor& tensor) const {
    TORCH_CHECK(!only_ || tensor.device().type() == *only_,
                "No backend type associated with device type ", tensor.device().type());
    auto memory = std::make_shared<std::vector<std::byte>>(tensor.nbytes() + 1);
    at::Tensor copy = at::from_blob(
        memory->data(), tensor.sizes(), [memory](void*) {},
        at::device(at::kCPU).dtype(tensor.scalar_type()));
    copy.copy_(tensor.detach());
    return copy;
  }

  template <class Call>
  WorkPtr staged(Tensors& tensors, const Call& call) const {
    const at::NoGradGuard no_grad;
    Tensors host;
    for (const at::Tensor& tensor : tensors) host.push_back(on_host(tensor));
    WorkPtr work = call(host);
    work->wait();
    for (std::size_t i = 0; i < host.size(); ++i) tensors[i].copy_(host[i]);
    return work;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::optional<c10::DeviceType> only_;
};
