// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/recorded.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include "simulated_device/counts.h"
#include "simulated_device/generator.h"
#include "simulated_device/ivalues.h"
#include "simulated_device/kernel.h"

namespace simulated {

namespace {

/// A CPU tensor like `tensor`, over `storage`.
at::Tensor like(const at::Tensor& tensor, const c10::Storage& storage) {
  at::Tensor copy = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  c10::TensorImpl* const impl = copy.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return copy;
}

void add_place(std::vector<Place>& places, const at::Tensor& tensor) {
  if (!is_on_device(tensor) || tensor.storage().nbytes() == 0) return;
  places.push_back(place_of(*block_of(tensor.storage().data())));
}

std::vector<Block*> blocks_at(const std::vector<Place>& reads, const std::vector<Place>& writes) {
  std::vector<Block*> blocks;
  for (const auto* const places : {&reads, &writes}) {
    for (const Place& place : *places) blocks.push_back(find_block(place.base, place.serial));
  }
  return blocks;
}

}  // namespace

at::Tensor LaterView::of(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  const auto known = tensors_.find(tensor.unsafeGetTensorImpl());
  if (known != tensors_.end()) return known->second;
  const c10::Storage& storage = tensor.storage();
  const auto [place, is_new] = storages_.try_emplace(storage.unsafeGetStorageImpl());
  if (is_new) {
    place->second =
        c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                     c10::DataPtr(const_cast<void*>(storage.data()), c10::kCPU), nullptr, false);
  }
  return tensors_.emplace(tensor.unsafeGetTensorImpl(), like(tensor, place->second)).first->second;
}

void record_copy(Capture& capture, std::string what, const at::Tensor& from, const at::Tensor& to,
                 std::function<void(const at::Tensor&, const at::Tensor&, int64_t)> move_bytes) {
  Work work{std::move(what), {}, {}, nullptr};
  add_place(work.reads, from);
  add_place(work.writes, to);
  LaterView later;
  work.run = [from = later.of(from), to = later.of(to), reads = work.reads, writes = work.writes,
              move = std::move(move_bytes)](int64_t stream) {
    const OnDevice on_device;
    const Unprotected open(blocks_at(reads, writes));
    move(from, to, stream);
  };
  capture.add(std::move(work));
}

RecordedKernel::RecordedKernel(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args,
                               int64_t kernels, std::function<void(torch::jit::Stack*)> instead)
    : op_(op), args_(args.begin(), args.end()), kernels_(kernels), instead_(std::move(instead)) {
  for (c10::IValue& arg : args_) {
    for_each_tensor(arg, [](const at::Tensor& t) {  // a number goes with the launch
      return t.defined() && !is_on_device(t) ? like(t, t.clone().storage()) : t;
    });
  }
}

void RecordedKernel::record(Capture& capture) && {
  Work work{c10::toString(op_.operator_name()), {}, {}, nullptr};
  LaterView later;
  int64_t elements = 0, bytes_written = 0;
  for (std::size_t i = 0; i < args_.size(); ++i) {
    const auto* const alias = op_.schema().arguments()[i].alias_info();
    const bool written = alias && alias->isWrite();
    for_each_tensor(args_[i], [&](const at::Tensor& t) {
      add_place(written ? work.writes : work.reads, t);
      if (is_on_device(t)) elements += t.numel();
      if (is_on_device(t) && written) bytes_written += static_cast<int64_t>(t.nbytes());
      return later.of(t);
    });
    if (args_[i].isDevice()) args_[i] = c10::Device(c10::kCPU);
  }
  for (at::Tensor& result : results_) {
    if (!result.defined()) continue;
    add_place(work.writes, result);
    bytes_written += static_cast<int64_t>(result.nbytes());
    result = later.of(result);
  }
  const c10::Device device(c10::kPrivateUse1, capture.device());
  work.run = [kernel = std::move(*this), device, elements, bytes_written, what = work.what,
              reads = work.reads, writes = work.writes](int64_t) {
    const OnDevice on_device;
    const c10::DeviceGuard guard(device);
    count_launch({what, kernel.kernels_, elements});
    count(&Totals::bytes_written, bytes_written);
    const Unprotected open(blocks_at(reads, writes));
    torch::jit::Stack stack = kernel.args_;
    std::map<const void*, at::Tensor> copies;  // one tensor given twice stays one
    for (c10::IValue& arg : stack) {
      for_each_tensor(arg, [&](const at::Tensor& t) {
        if (!t.defined()) return t;
        const auto [copy, is_new] = copies.try_emplace(t.unsafeGetTensorImpl());
        if (is_new) copy->second = like(t, t.storage());
        return copy->second;
      });
    }
    for (const auto& [index, generator] : kernel.generators_) stack[index] = drawing(generator);
    if (kernel.instead_) {
      kernel.instead_(&stack);
    } else {
      kernel.op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }
    auto result = kernel.results_.begin();
    for (c10::IValue& value : stack) {
      for_each_tensor(value, [&](const at::Tensor& t) {
        if (result->defined() && result->numel() > 0) result->copy_(t);
        ++result;
        return t;
      });
    }
  };
  capture.add(std::move(work));
}

}  // namespace simulated
