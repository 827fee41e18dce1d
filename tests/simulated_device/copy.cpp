// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <string>

#include "simulated_device/capture.h"
#include "simulated_device/counts.h"
#include "simulated_device/kernel.h"
#include "simulated_device/pinned.h"
#include "simulated_device/recorded.h"
#include "simulated_device/register.h"

namespace simulated {

namespace {

using at::Tensor;

std::vector<Accesses*> accesses(const Tensor& tensor, Capture* capture = nullptr) {
  if (tensor.storage().nbytes() == 0) return {};
  Block* const block = block_of(tensor.storage().data());
  return {capture ? capture->accesses(*block) : &block->accesses};
}

void count_written(const Tensor& to) {
  count(&Totals::bytes_written, static_cast<int64_t>(to.nbytes()));
}

/// to.copy_(from), either of them on the device, by the device's hands.
void move_bytes(const Tensor& from, const Tensor& to, Capture* capture = nullptr) {
  HostView view(capture);
  const Tensor source = view.of(from), target = view.of(to);
  const Unprotected open(view.blocks());
  target.copy_(source);
  if (!to.is_cpu() && !capture) count_written(to);
}

/// Writes what was `taken` to pinned memory when the stream has got there.
void defer_to_host(int64_t stream, const std::shared_ptr<void>& pinned, const Tensor& taken,
                   char* target) {
  defer(stream,
        [pinned, taken, target] { std::memcpy(target, taken.const_data_ptr(), taken.nbytes()); });
}

/// Looks, when the stream has got there, whether the host has left pinned memory alone.
void defer_look_at(int64_t stream, const std::shared_ptr<void>& pinned, const Tensor& from) {
  const auto* const source = static_cast<const char*>(from.const_data_ptr());
  defer(stream, [pinned, source, taken = std::string(source, from.nbytes())] {
    if (pinned.use_count() == 1) return;  // given back meanwhile: nobody has written to it
    if (std::memcmp(source, taken.data(), taken.size()) != 0) {
      violated("the host wrote to pinned memory before a non-blocking copy had read it");
    }
  });
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<c10::Device> device,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided,
              "simulated device: it has no tensors of layout ", *layout);
  TORCH_CHECK(!pinned.value_or(false), "simulated device: only CPU tensors are pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

void within_device(const Tensor& from, const Tensor& to) {
  const c10::DeviceGuard guard(to.device());
  const int64_t stream = current_stream(to.device().index());
  Capture* const capture = capture_of(stream);
  if (!capture) count_launch({"copy_", 1, to.numel()});
  enqueue(stream, "copy_", accesses(from, capture), accesses(to, capture));
  move_bytes(from, to, capture);
  if (!capture) return;
  record_copy(*capture, "copy_", from, to, [](const Tensor& source, const Tensor& target, int64_t) {
    count_launch({"copy_", 1, target.numel()});
    count_written(target);
    target.copy_(source);
  });
}

/// On the source's stream, which waits for the target's, and the other way round after it.
void between_devices(const Tensor& from, const Tensor& to) {
  const int64_t source = current_stream(from.device().index());
  const int64_t target = current_stream(to.device().index());
  TORCH_CHECK(!is_capturing(source) && !is_capturing(target),
              "simulated device: a graph with a copy to another device");
  count(&Totals::device_to_device);
  join(source, target);
  enqueue(source, "copy_ to another device", accesses(from), accesses(to));
  join(target, source);
  move_bytes(from, to);
}

void to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::DeviceGuard guard(to.device());
  const int64_t stream = current_stream(to.device().index());
  const std::shared_ptr<void> pinned = pinned_block(from.storage().data());
  const bool direct = from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype();
  if (!pinned) refuse_in_capture(stream, "copy_ from pageable memory to the device");
  Capture* const capture = capture_of(stream);
  if (!capture) count(&Totals::host_to_device);
  enqueue(stream, "copy_ to the device", {}, accesses(to, capture));
  move_bytes(from, to, capture);
  if (!non_blocking) return wait_for(stream, "copy_ to the device");
  if (capture) {
    TORCH_CHECK(direct, "simulated device: a graph with a copy that casts or gathers on the host");
    record_copy(*capture, "copy_ to the device", from, to,
                [pinned](const Tensor& source, const Tensor& target, int64_t on) {
                  count(&Totals::host_to_device);
                  count_written(target);
                  target.copy_(source);
                  if (source.numel() > 0) defer_look_at(on, pinned, source);
                });
  } else if (pinned && direct && from.numel() > 0) {
    defer_look_at(stream, pinned, from);
  }
}

void to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::DeviceGuard guard(from.device());
  const int64_t stream = current_stream(from.device().index());
  Capture* const capture = capture_of(stream);
  if (!capture) count(&Totals::device_to_host);
  const std::shared_ptr<void> pinned = pinned_block(to.storage().data());
  const bool direct = from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype();
  enqueue(stream, "copy_ to the host", accesses(from, capture), {});
  if (!non_blocking || !pinned || !direct) {
    wait_for(stream, "copy_ to the host");
    return move_bytes(from, to);
  }
  if (from.numel() == 0) return;
  if (capture) {
    return record_copy(*capture, "copy_ to the host", from, to,
                       [pinned](const Tensor& source, const Tensor& target, int64_t on) {
                         count(&Totals::device_to_host);
                         defer_to_host(on, pinned, source.clone(),
                                       static_cast<char*>(target.mutable_data_ptr()));
                       });
  }
  const Tensor taken = at::empty(from.sizes(), from.options().device(at::kCPU));
  move_bytes(from, taken);
  defer_to_host(stream, pinned, taken, static_cast<char*>(to.mutable_data_ptr()));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const OnDevice on_device;
  const Tensor source = from.expand_as(to);
  if (from.is_cpu()) {
    to_device(source, to, non_blocking);
  } else if (to.is_cpu()) {
    to_host(source, to, non_blocking);
  } else if (from.device() == to.device()) {
    within_device(source, to);
  } else {
    between_devices(source, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  const OnDevice on_device;
  const int64_t stream = current_stream(tensor.device().index());
  count(&Totals::device_to_host);
  enqueue(stream, "_local_scalar_dense", accesses(tensor), {});
  wait_for(stream, "_local_scalar_dense (Tensor::item)");
  HostView view;
  const Tensor host = view.of(tensor);
  const Unprotected open(view.blocks());
  return at::_local_scalar_dense(host);
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

void record_stream(Tensor& self, c10::Stream stream) {
  for (Accesses* const a : accesses(self)) a->recorded.insert(stream.id());
}

}  // namespace

void register_copies(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("_local_scalar_dense", &item);
  aten.impl("record_stream", &record_stream);
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("set_.source_Tensor", &set_tensor);
}

}  // namespace simulated
