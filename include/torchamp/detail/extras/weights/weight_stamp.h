// SPDX-License-Identifier: BSD-3-Clause
// A record of a weight at some time, and a check whether its values have changed since.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The tensor with a weight's version counter: the weight itself, or the base of the view.
inline const c10::TensorImpl* owner_of(const at::Tensor& weight) {
  return weight.is_view() ? weight._base().unsafeGetTensorImpl() : weight.unsafeGetTensorImpl();
}

/// Whether the tensor that owns a weight's version counter has only a part of its memory, as after
/// torch::nn::utils::vector_to_parameters(): then another tensor over the whole memory may be
/// written, and its writes have a separate counter. False if masters have done this, because they
/// report their writes.
inline bool has_part_of_memory(const at::Tensor& weight) {
  const at::TensorBase& owner = weight.is_view() ? weight._base() : weight;
  if (owner.numel() == 0 || weight_meta_of(owner)) return false;
  std::int64_t elements = 1;  // from the first to the last in memory
  for (std::int64_t d = 0; d < owner.dim(); ++d) {
    elements += (owner.size(d) - 1) * owner.stride(d);
  }
  return owner.storage_offset() != 0 ||
         owner.storage().nbytes() > static_cast<std::size_t>(elements) * owner.itemsize();
}

/// Whether the tensor has a tangent, for forward-mode derivatives. Then its cast also has a
/// tangent.
inline bool has_tangent(const at::TensorBase& tensor) {
  return tensor._fw_grad(/*level=*/0).defined();
}

/// Whether LibTorch counts this tensor's changes. Also false for tensors without their own memory
/// or without strides (functorch, sparse, nested), and those with a tangent.
inline bool counts_changes(const at::Tensor& weight) {
  return weight.defined() && weight.layout() == at::kStrided && !weight.is_nested() &&
         !weight.is_inference() && weight.has_storage() && !weight.is_neg() &&
         !has_tangent(weight) && !has_part_of_memory(weight);
}

/// Whether work for this tensor is now being captured, for replays.
template <class Guard = c10::impl::VirtualGuardImpl>
bool stream_is_captured(const at::Tensor& weight) {
  if (weight.device().is_cpu()) return false;
  if constexpr (requires(const Guard& guard, c10::Stream stream) {
                  guard.isStreamCapturing(stream);
                }) {
    const Guard guard(weight.device().type());
    return guard.isStreamCapturing(guard.getStream(weight.device()));
  }
  return false;  // before LibTorch 2.12 only a CudaGraph is detected
}

// Note [How a changed weight is detected]
// LibTorch counts writes by ops in a version counter, which a tensor shares with its views and
// which has no identity. So a weight is identified by the tensor that owns the counter, and by its
// memory: set_data() and Module::to() give the same tensor other memory. A stamp holds a weak
// reference to the memory. Code that stores a stamp must hold a weak reference to the owner or the
// weight, so that addresses are not reused.
//
// Writes through pointers, through `.data()` and by replayed kernels are not counted: the code that
// writes must report them, see DerivedWeights::changed(). Writes to another tensor over the same
// memory are not counted either. If has_part_of_memory() is true, nothing is stored. If the other
// tensor is as large as the weight, the code that writes must report the write.

/// A record of a weight: tensor, memory, part of the memory, version. While holds() is true, its
/// values are unchanged.
class WeightStamp {
 public:
  /// Error: a tensor for which counts_changes() is false.
  explicit WeightStamp(const at::Tensor& weight)
      : storage_(weight.storage().getWeakStorageImpl()),
        data_(weight.storage().data()),
        version_(weight._version()),
        offset_(weight.storage_offset()),
        sizes_(weight.sizes()),
        strides_(weight.strides()),
        dtype_(weight.scalar_type()),
        stream_(current_stream(weight)) {}

  /// Whether it refers to the same part of the same owner's memory, with any values, and to the
  /// current stream: another stream would have to wait for the results.
  bool is_of(const at::Tensor& weight) const {
    return dtype_ == weight.scalar_type() && offset_ == weight.storage_offset() &&
           weight.sizes() == sizes_ && weight.strides() == strides_ &&
           (!stream_ || stream_ == current_stream(weight));
  }

  /// The weight's memory; only for comparison.
  const c10::StorageImpl* memory() const { return storage_._unsafe_get_target(); }

  /// Whether the weight, for which is_of() is true, has the same values, as far as LibTorch counts
  /// writes.
  bool holds(const at::Tensor& weight) const {
    const c10::StorageImpl* const now = weight.storage().unsafeGetStorageImpl();
    return now == memory() && now->data() == data_ && weight._version() == version_;
  }

 private:
  static std::optional<c10::Stream> current_stream(const at::Tensor& weight) {
    if (weight.device().is_cpu()) return std::nullopt;
    return c10::impl::VirtualGuardImpl(weight.device().type()).getStream(weight.device());
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  // protects its address from reuse
  const void* data_;
  int64_t version_;
  int64_t offset_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
  at::ScalarType dtype_;
  std::optional<c10::Stream> stream_;  // unset on a CPU, which computes at once
};

}  // namespace TORCHAMP_NAMESPACE::detail
