// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "torchamp/version.h"

namespace torchamp::detail {

/// The tensor that counts a weight's changes: the weight itself, or what it is a view of.
inline const c10::TensorImpl* owner_of(const at::Tensor& weight) {
  return weight.is_view() ? weight._base().unsafeGetTensorImpl() : weight.unsafeGetTensorImpl();
}

/// Whether LibTorch counts the changes of this tensor. False as well for tensors without memory of
/// their own (of functorch, sparse) and those with a tangent, whose casts have one, too.
inline bool counts_changes(const at::Tensor& weight) {
  return weight.defined() && weight.layout() == at::kStrided && !weight.is_inference() &&
         weight.has_storage() && !weight.is_neg() && !weight._fw_grad(/*level=*/0).defined();
}

/// Whether what is computed for this tensor now goes into a graph, to be computed at replays.
template <class Guard = c10::impl::VirtualGuardImpl>
bool stream_is_captured(const at::Tensor& weight) {
  if (weight.device().is_cpu()) return false;
  if constexpr (requires(const Guard& guard, c10::Stream stream) {
                  guard.isStreamCapturing(stream);
                }) {
    const Guard guard(weight.device().type());
    return guard.isStreamCapturing(guard.getStream(weight.device()));
  }
  return false;  // before LibTorch 2.12 only CudaGraph tells
}

// Note [What tells that a weight has changed]
// LibTorch counts writes by ops in a version counter, which a tensor shares with its views, and
// which has no identity of its own. So a weight is known by the tensor that owns the counter, and
// by the memory that it looks at: set_data() and Module::to() give the same tensor other memory. A
// stamp holds weak references to both, which keep their addresses from being given to others.
//
// Nobody counts writes through pointers, through `.data()` and by kernels that are replayed. Who
// makes them has to tell: see DerivedWeights::changed().

/// What a weight was at some moment: which tensor, which memory, which part of it, how often
/// written to. The values that it had then are those that it has while the stamp holds.
class WeightStamp {
 public:
  /// Error: a tensor for which counts_changes() is false.
  explicit WeightStamp(const at::Tensor& weight)
      : storage_(weight.storage().getWeakStorageImpl()),
        address_(weight.storage().unsafeGetStorageImpl()),
        data_(weight.storage().data()),
        version_(weight._version()),
        offset_(weight.storage_offset()),
        sizes_(weight.sizes()),
        strides_(weight.strides()),
        dtype_(weight.scalar_type()),
        stream_(current_stream(weight)) {}

  /// Whether it is of the same part of the same owner's memory, whatever its values, and of the
  /// stream that is current: what one stream computes, another would have to wait for.
  bool is_of(const at::Tensor& weight) const {
    return dtype_ == weight.scalar_type() && offset_ == weight.storage_offset() &&
           weight.sizes() == sizes_ && weight.strides() == strides_ &&
           (!stream_ || stream_ == current_stream(weight));
  }

  /// Of the weight; only to be compared.
  const c10::StorageImpl* memory() const { return address_; }

  /// Whether the weight, which it is_of(), has the same values as then, as far as LibTorch counts.
  bool holds(const at::Tensor& weight) const {
    const c10::StorageImpl* const now = weight.storage().unsafeGetStorageImpl();
    return now == address_ && now->data() == data_ && weight._version() == version_;
  }

 private:
  static std::optional<c10::Stream> current_stream(const at::Tensor& weight) {
    if (weight.device().is_cpu()) return std::nullopt;
    return c10::impl::VirtualGuardImpl(weight.device().type()).getStream(weight.device());
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  // keeps address_ from being used again
  const c10::StorageImpl* address_;
  const void* data_;
  int64_t version_;
  int64_t offset_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
  at::ScalarType dtype_;
  std::optional<c10::Stream> stream_;  // unset on a CPU, which computes at once
};

}  // namespace torchamp::detail
