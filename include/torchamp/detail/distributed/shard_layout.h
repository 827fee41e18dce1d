// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/distributed/same_everywhere.h"
#include "torchamp/detail/split_bits.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Where the pieces of a weight lie]
// Every weight is cut, in the order of memory, into as many pieces of equal size as there are
// processes; the last ones are padded with zeros, by less than one element for each process. A
// bucket of some weights is a vector of one slot for each process, and a slot holds that process's
// pieces, one weight after the other:
//
//     slot 0: a[0..3) b[0..1)    slot 1: a[3..6) b[1..2)
//
// So one exchange of slots brings each process all gradients of its pieces, and one gathers all
// weights. Every process has a piece of every weight, which is why they all have the same
// parameters, groups and states, of the same sizes. Those of a device and dtype share buckets.

/// A weight that is cut into pieces.
struct ShardedWeight {
  std::string name;
  std::vector<int64_t> sizes, strides;
  int64_t elements;
  int64_t piece;           ///< elements of each piece
  std::size_t bucket = 0;  ///< where its pieces lie,
  int64_t offset = 0;      ///< in each slot
};

struct ShardBucket : TensorKind {
  std::vector<std::size_t> weights{};
  int64_t slot = 0;  ///< elements of each slot
  bool is_padded = false;
};

/// A tensor of its own that shares the memory of `flat`, a vector, and is no view for autograd.
inline at::Tensor sharing(const at::Tensor& flat, int64_t offset, at::IntArrayRef sizes,
                          at::IntArrayRef strides) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(flat.storage()),
                                                               flat.key_set(), flat.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides,
                                                      flat.storage_offset() + offset);
  return tensor;
}
inline at::Tensor sharing(const at::Tensor& flat, int64_t offset, int64_t elements) {
  return sharing(flat, offset, {elements}, {1});
}

/// Which piece of which weight lies where; the same on all processes.
class ShardLayout {
 public:
  ShardLayout(int64_t processes, int64_t bucket_elements)
      : processes_(processes), bucket_elements_(bucket_elements) {}

  /// Weights come in the order in which backward is likely to come to them. `dtype`: the one that
  /// the model keeps the weight in.
  void add(std::string name, const at::Tensor& weight, at::ScalarType dtype) {
    const TensorKind kind{weight.device(), dtype};
    std::size_t b = buckets_.size();
    while (b > 0 && !(static_cast<const TensorKind&>(buckets_[b - 1]) == kind)) --b;
    if (b == 0 || buckets_[b - 1].slot * processes_ >= bucket_elements_) {
      buckets_.push_back({kind});
      b = buckets_.size();
    }
    ShardBucket& bucket = buckets_[--b];
    const int64_t elements = weight.numel();
    const int64_t piece = (elements + processes_ - 1) / processes_;
    bucket.weights.push_back(weights_.size());
    bucket.is_padded |= piece * processes_ != elements;
    weights_.push_back({std::move(name), weight.sizes().vec(), weight.strides().vec(), elements,
                        piece, b, bucket.slot});
    bucket.slot += piece;
  }

  /// Once all are added: has the buckets that are complete first come first.
  void sort_buckets() {
    std::ranges::sort(buckets_, {},
                      [](const ShardBucket& bucket) { return bucket.weights.back(); });
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      for (const std::size_t w : buckets_[b].weights) weights_[w].bucket = b;
    }
  }

  int64_t processes() const { return processes_; }

  /// A number that differs, but for chance, between different layouts.
  int64_t fingerprint() const {
    Fingerprint print;
    const auto mix = [&print](int64_t number) { print.mix(number); };
    for (const ShardedWeight& weight : weights_) {
      for (const int64_t number : weight.sizes) mix(number);
      for (const int64_t number : weight.strides) mix(number);
      mix(static_cast<int64_t>(weight.bucket));
      mix(static_cast<int64_t>(buckets_[weight.bucket].dtype));
    }
    return print.value();
  }
  const std::vector<ShardedWeight>& weights() const { return weights_; }
  const std::vector<ShardBucket>& buckets() const { return buckets_; }

  /// Calls visit(part of `slots`, part of `whole`) for what both hold: a vector of all slots of the
  /// weight's bucket, and a tensor that is laid out as the weight.
  template <class Visit>
  void for_each_part(std::size_t w, const at::Tensor& slots, const at::Tensor& whole,
                     const Visit& visit) const {
    const ShardedWeight& weight = weights_[w];
    if (weight.elements == 0) return;
    const int64_t slot = buckets_[weight.bucket].slot, piece = weight.piece;
    const int64_t full = weight.elements / piece, rest = weight.elements - full * piece;
    const at::Tensor memory = in_memory_order(whole);
    visit(slots.as_strided({full, piece}, {slot, 1}, slots.storage_offset() + weight.offset),
          memory.narrow(0, 0, full * piece).view({full, piece}));
    if (rest > 0) {
      visit(slots.narrow(0, full * slot + weight.offset, rest),
            memory.narrow(0, full * piece, rest));
    }
  }

  /// The piece of process `rank` of a tensor that is laid out as the weight, without the padding:
  /// it may be empty.
  at::Tensor piece_of(std::size_t w, int64_t rank, const at::Tensor& whole) const {
    const ShardedWeight& weight = weights_[w];
    const int64_t begin = std::min(rank * weight.piece, weight.elements);
    return in_memory_order(whole).narrow(0, begin, std::min(weight.piece, weight.elements - begin));
  }

 private:
  int64_t processes_, bucket_elements_;
  std::vector<ShardedWeight> weights_;
  std::vector<ShardBucket> buckets_;
};

/// `tensor` itself if it is laid out as `like`; else a copy that is.
inline at::Tensor laid_out_as(const at::Tensor& like, const at::Tensor& tensor) {
  if (tensor.strides() == like.strides() && tensor.is_non_overlapping_and_dense()) return tensor;
  at::Tensor copy =
      at::empty_like(like, like.options().dtype(tensor.scalar_type()).requires_grad(false));
  copy.copy_(tensor);
  return copy;
}

}  // namespace torchamp::detail
