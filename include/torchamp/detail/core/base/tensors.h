// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/TensorBase.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <utility>

#include "torchamp/detail/core/base/devices.h"  // IWYU pragma: export
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The library's own arithmetic, neither recorded by autograd nor cast by autocast.
class InternalOps {
 private:
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

/// `tensor` on `device`, without waiting. Only a copy from a device to the host waits, because host
/// kernels read it at once (LibTorch's non_blocking copies to the host return early).
inline at::Tensor to_device_async(at::Device device, const at::Tensor& tensor) {
  if (tensor.device() == device) return tensor;
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

/// Undefined if there is none. (Tensor::grad() checks whether to warn about non-leaves.)
inline const at::Tensor& gradient_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->grad();
}

/// How often the tensor's memory was written in place, as far as LibTorch counts it.
inline uint32_t version_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return 0;
  return static_cast<uint32_t>(tensor._version());
}

// Note [Weights that are written]
// Code that writes to weights reports it to code that stores copies of them, in this shared library
// or another. Code that stores copies defines an op of this name, whose schema "(int address=…) ->
// ()" carries the address of a WeightsWritten. Later versions of torchamp must not change either.
inline constexpr const char* weights_written_op = "torchamp::_weights_written";

/// Drops copies of these weights: the weights may have other values, even if LibTorch has counted
/// no write. With an empty list, drops copies that are kept until a step. Any thread.
using WeightsWritten = void (*)(at::TensorList weights);

// ---- Tensors that others keep alive -------------------------------------------------------------

/// A reference to a tensor that does not keep it alive. While the reference exists, no other tensor
/// gets the tensor's address.
class WeakTensor {
 public:
  WeakTensor() = default;
  explicit WeakTensor(const at::TensorBase& tensor) : tensor_(tensor.getIntrusivePtr()) {}

  /// Undefined if the tensor is destroyed.
  at::Tensor lock() const { return at::Tensor(tensor_.lock()); }
  bool is_gone() const { return tensor_.expired(); }
  bool is(const at::TensorBase& other) const { return address() == other.unsafeGetTensorImpl(); }
  const c10::TensorImpl* address() const { return tensor_._unsafe_get_target(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

/// A reference to the memory of a tensor that does not keep it alive. Unlike a WeakTensor it keeps
/// no data that is attached to the tensor.
class WeakMemory {
 public:
  explicit WeakMemory(const at::Tensor& tensor) : memory_(tensor.storage().getWeakStorageImpl()) {}
  bool is_gone() const { return memory_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> memory_;
};

/// The tensor's memory, which its views share; null if it has no memory.
inline const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// ---- What one batch kernel takes ----------------------------------------------------------------

/// A tensor's device and dtype.
struct TensorKind {
  at::Device device;
  at::ScalarType dtype;

  static TensorKind of(const at::Tensor& tensor) { return {tensor.device(), tensor.scalar_type()}; }
  bool operator==(const TensorKind&) const = default;
};

/// The elements of a tensor without gaps or overlaps, in the order of memory.
inline at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1});
}
/// `size` of these elements, from `begin` on.
inline at::Tensor part_of(const at::Tensor& tensor, int64_t begin, int64_t size) {
  return tensor.as_strided({size}, {1}, tensor.storage_offset() + begin);
}

/// Whether two tensors hold their elements in the same order. The fused kernels process elements in
/// the order of memory, and do not check it (on a CPU not even to throw).
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

/// Whether elements of a dense tensor share memory, as after expand().
inline bool repeats_elements(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
}

/// The group with `key`, appended if missing. `Group` is an aggregate with the base `Key`. There
/// are few groups, and mostly the last one matches.
template <class Groups, class Key, class Group = typename Groups::value_type>
Group& group_of(Groups& groups, Key key) {
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    if (static_cast<const Key&>(*group) == key) return *group;
  }
  groups.push_back(Group{{std::move(key)}});
  return groups.back();
}

}  // namespace TORCHAMP_NAMESPACE::detail
