// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/kernel.h"

#include <ATen/Utils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "simulated_device/capture.h"
#include "simulated_device/counts.h"
#include "simulated_device/generator.h"
#include "simulated_device/ivalues.h"
#include "simulated_device/recorded.h"

namespace simulated {

namespace {

/// Ops whose result's shape, or whose result on the host, depends on values: the host waits.
bool makes_the_host_wait(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  static constexpr std::array<std::string_view, 9> names{
      "aten::nonzero",  "aten::masked_select", "aten::_unique",
      "aten::_unique2", "aten::unique_dim",    "aten::unique_consecutive",
      "aten::bincount", "aten::equal",         "aten::allclose"};
  const std::string& name = op.schema().name();
  if (name == "aten::repeat_interleave") {
    return op.schema().overload_name() == "Tensor" && args[1].isNone();
  }
  if (name == "aten::_index_put_impl_") {
    bool by_mask = false;
    look_at_each_tensor(args[1], [&](const at::Tensor& index) {
      by_mask |= index.defined() && (index.scalar_type() == at::kBool || !is_on_device(index));
    });
    return by_mask;
  }
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool takes_indices_from_the_host(const std::string& name) {
  return name == "aten::index" || name == "aten::_index_put_impl_";
}

/// The arguments' device. As CUDA's: every tensor lies there, but for numbers (0-dim CPU tensors).
c10::Device device_of_arguments(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  std::optional<c10::Device> device;
  for (const c10::IValue& arg : args) {
    look_at_each_tensor(arg, [&](const at::Tensor& t) {
      if (is_on_device(t) && !device) device = t.device();
    });
    if (!device && arg.isDevice()) device = arg.toDevice();
  }
  TORCH_CHECK(device && device->type() == c10::kPrivateUse1,
              "simulated device: ", op.operator_name(), " has no argument on the device");
  for (const c10::IValue& arg : args) {
    look_at_each_tensor(arg, [&](const at::Tensor& t) {
      if (!t.defined() || t.device() == *device) return;
      if (t.is_cpu() && t.dim() == 0) return;
      if (t.is_cpu() && takes_indices_from_the_host(op.schema().name())) {
        return refuse_in_capture(current_stream(device->index()), "indices from the host");
      }
      TORCH_CHECK(
          false, "simulated device: ", op.operator_name(),
          ": Expected all tensors to be on the same device, but found at least two devices, ",
          *device, " and ", t.device());
    });
  }
  return *device;
}

/// How many kernels CUDA launches for a `_foreach_` op: one if the lists are alike (a copy may
/// cast), else one for each tensor. (It makes several of one for lists of hundreds, which is not
/// counted here.)
int64_t kernels_of(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  if (op.schema().name().rfind("aten::_foreach_", 0) != 0) return 1;
  const std::vector<at::Tensor> first = args[0].toTensorVector();
  bool alike = true;
  for (const c10::IValue& arg : args) {
    if (!arg.isTensorList()) continue;
    const std::vector<at::Tensor> list = arg.toTensorVector();
    const at::Tensor& same = op.schema().name() == "aten::_foreach_copy_" ? list[0] : first[0];
    for (std::size_t i = 0; i < list.size() && i < first.size(); ++i) {
      alike = alike && list[i].scalar_type() == same.scalar_type() &&
              list[i].strides() == first[i].strides() && list[i].is_non_overlapping_and_dense();
    }
  }
  return alike ? 1 : static_cast<int64_t>(first.size());
}

/// Whether a kernel stores the argument at `i`. CUDA's fused optimizers may store gradients, and do
/// if they divide them.
bool stores(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args, std::size_t i) {
  const auto& arguments = op.schema().arguments();
  if (!arguments[i].alias_info() || !arguments[i].alias_info()->isWrite()) return false;
  if (op.schema().name().rfind("aten::_fused_", 0) != 0 || arguments[i].name() != "grads") {
    return true;
  }
  for (std::size_t k = 0; k < args.size(); ++k) {
    if (arguments[k].name() == "grad_scale") return args[k].isTensor();
  }
  return true;
}

/// Whether a kernel loads the argument at `i`, and does not only store it.
bool loads(const c10::OperatorHandle& op, std::size_t i) {
  static constexpr std::array<std::string_view, 6> copies{
      "aten::copy_", "aten::_foreach_copy_", "aten::fill_",
      "aten::zero_", "aten::_foreach_zero_", "aten::_foreach_fill_"};
  if (op.schema().arguments()[i].is_out()) return false;
  return i > 0 || std::find(copies.begin(), copies.end(), op.schema().name()) == copies.end();
}

void check_device(const Capture& capture, c10::Device device, const std::string& what) {
  TORCH_CHECK(capture.device() == device.index(), "simulated device: ", what, " on ", device,
              " in a capture of sim:", static_cast<int>(capture.device()));
}

}  // namespace

// ---- HostView ----------------------------------------------------------------------------------

at::Tensor HostView::of(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  const auto [found, is_new] = place_of_.try_emplace(tensor.unsafeGetTensorImpl(), tensors_.size());
  if (!is_new) return tensors_[found->second].host;
  const c10::Storage& storage = tensor.storage();
  const auto [at, is_new_storage] =
      place_of_.try_emplace(storage.unsafeGetStorageImpl(), storages_.size());
  const std::size_t place = at->second;
  if (is_new_storage) {
    void* const data = bytes_of(storage);
    storages_.push_back({storage,
                         c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                                      c10::DataPtr(data, c10::kCPU), c10::GetCPUAllocator(), true),
                         tensor.key_set()});
  }
  at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storages_[place].host), c10::DispatchKeySet(c10::DispatchKey::CPU),
      tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    host.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  tensors_.push_back({tensor, host});
  return host;
}

/// Where its bytes are for the view.
void* HostView::bytes_of(const c10::Storage& storage) const {
  void* const data = storage.mutable_data();
  if (!capture_ || storage.nbytes() == 0) return data;
  const Block& block = *block_of(data);
  return capture_->copy_of(block) + (static_cast<char*>(data) - block.base);
}

at::Tensor HostView::back(const at::Tensor& result, c10::Device device, bool& is_fresh) {
  is_fresh = false;
  if (!result.defined()) return result;
  for (const Pair& pair : tensors_) {
    if (pair.host.is_same(result)) return pair.device;
  }
  TORCH_CHECK(result.layout() == at::kStrided, "simulated device: it has no tensors of layout ",
              result.layout());
  for (const StoragePair& pair : storages_) {
    if (!pair.host.is_alias_of(result.storage())) continue;
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(pair.device), pair.keys, result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                      result.storage_offset());
    return view;
  }
  is_fresh = true;
  at::Tensor fresh = empty_like_on(device, result);
  if (fresh.numel() > 0) {
    HostView view(capture_);
    at::Tensor host = view.of(fresh);
    const Unprotected open(view.blocks());
    host.copy_(result);
    if (!capture_) count(&Totals::bytes_written, static_cast<int64_t>(fresh.nbytes()));
  }
  return fresh;
}

void HostView::resize_arguments() {
  for (const Pair& pair : tensors_) {
    c10::TensorImpl* const impl = pair.device.unsafeGetTensorImpl();
    c10::StorageImpl* const storage = pair.device.storage().unsafeGetStorageImpl();
    const c10::Storage& host = pair.host.storage();
    if (host.data() != bytes_of(pair.device.storage())) {  // grown: the CPU has made it a new place
      const c10::DeviceGuard guard(pair.device.device());
      c10::DataPtr grown = device_allocator()->allocate(host.nbytes());
      if (host.nbytes() > 0) {
        Block* const block = block_of(grown.get());
        const Unprotected open({block});
        std::memcpy(capture_ ? capture_->copy_of(*block) : block->base, host.data(), host.nbytes());
      }
      storage->set_data_ptr(std::move(grown));
      storage->set_nbytes(host.nbytes());
    }
    if (impl->sizes() != pair.host.sizes() || impl->strides() != pair.host.strides()) {
      impl->set_sizes_and_strides(pair.host.sizes(), pair.host.strides(),
                                  pair.host.storage_offset());
    }
  }
}

std::vector<Block*> HostView::blocks() const {
  std::vector<Block*> blocks;
  if (capture_) return blocks;  // it works on copies
  for (const StoragePair& pair : storages_) {
    if (pair.device.nbytes() > 0) blocks.push_back(block_of(pair.device.data()));
  }
  return blocks;
}

at::Tensor empty_like_on(c10::Device device, const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(),
                           like.options().device(device).pinned_memory(false));
}

// ---- One kernel --------------------------------------------------------------------------------

void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                const std::function<void(torch::jit::Stack*)>& instead) {
  const OnDevice on_device;
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack->size() - arguments.size();
  const c10::ArrayRef<c10::IValue> args(stack->data() + first, arguments.size());
  const auto& returns = op.schema().returns();
  const bool is_view =
      !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();

  const c10::Device device = device_of_arguments(op, args);
  const c10::DeviceGuard guard(device);
  const int64_t stream = current_stream(device.index());
  Capture* const capture = is_view ? nullptr : capture_of(stream);
  const std::string name = c10::toString(op.operator_name());
  if (makes_the_host_wait(op, args)) wait_for(stream, name);
  const int64_t kernels = is_view ? 0 : kernels_of(op, args);
  int64_t elements = 0;
  std::optional<RecordedKernel> recorded;
  if (capture) {
    check_device(*capture, device, name);
    recorded.emplace(op, args, kernels, instead);
  }

  HostView view(capture);
  const auto accesses_of = [&](const at::Tensor& t) {
    Block* const block = block_of(t.storage().data());
    return capture ? capture->accesses(*block) : &block->accesses;
  };
  std::vector<bool> stored;
  for (std::size_t i = 0; i < arguments.size(); ++i) stored.push_back(stores(op, args, i));
  std::vector<Accesses*> reads, writes;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& arg = (*stack)[first + i];
    const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    const bool is_stored = stored[i];
    for_each_tensor(arg, [&](const at::Tensor& t) {
      if (is_on_device(t) && t.storage().nbytes() > 0) {
        (written ? writes : reads).push_back(accesses_of(t));
        elements += t.numel();
        const auto bytes = static_cast<int64_t>(t.nbytes());
        if (is_stored && !capture) count(&Totals::bytes_written, bytes);
        if (!is_view && !capture && loads(op, i)) count(&Totals::bytes_read, bytes);
      }
      return view.of(t);
    });
    if (arg.isDevice()) {
      arg = c10::Device(c10::kCPU);
    } else if (arg.isGenerator() || (arg.isNone() && arguments[i].type()->str() == "Generator?")) {
      const at::Generator generator =
          arg.isNone() ? default_generator(device.index()) : arg.toGenerator();
      arg = drawing(generator);
      if (recorded) recorded->draws_from(i, generator);
    }
  }
  if (!is_view) {
    if (!capture) count_launch({name, kernels, elements});
    enqueue(stream, name, reads, writes);
  }
  {
    const Unprotected open(is_view ? std::vector<Block*>() : view.blocks());
    if (instead) {
      instead(stack);
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
  }
  if (!is_view) view.resize_arguments();
  std::vector<Accesses*> fresh;
  for (std::size_t i = stack->size() - returns.size(); i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const at::Tensor& t) {
      bool is_fresh = false;
      at::Tensor result = view.back(t, device, is_fresh);
      if (!is_view && result.defined() && result.storage().nbytes() > 0) {
        fresh.push_back(accesses_of(result));
      }
      if (recorded) recorded->returns(is_fresh ? result : at::Tensor());
      return result;
    });
  }
  if (recorded) std::move(*recorded).record(*capture);
  // Fresh results are this kernel's too; what it was given, it has been seen to use above.
  std::erase_if(fresh, [&](Accesses* a) { return a->written.stream >= 0 || !a->read.empty(); });
  if (!fresh.empty()) enqueue(stream, name, {}, fresh);
}

}  // namespace simulated
