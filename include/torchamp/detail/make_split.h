// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/optim/split_step.h"
#include "torchamp/detail/split_bits.h"
#include "torchamp/detail/split_weight.h"
#include "torchamp/detail/tensor_pairs.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// What MasterWeights do with weights, split ones above all, beside steps.

/// Writes both halves of `value`.
inline void write_split(const at::Tensor& value, const at::Tensor& high, const at::Tensor& low) {
  if (value.numel() == 0) return;
  at::Tensor wide = value;
  if (!(TensorKind::of(value) == TensorKind{high.device(), at::kFloat}) ||
      value.strides() != high.strides()) {
    wide = at::empty_like(high, high.options().dtype(at::kFloat).requires_grad(false));
    wide.copy_(value);
  }
  SplitRuns whole(high.device());
  whole.add(in_memory_order(high.detach()), in_memory_order(low));
  whole.split(in_memory_order(wide), SplitNaNs::as_they_are);
}

/// `gradient` of a split weight in fp32; dense ones are filled by `copies`.
inline at::Tensor widened(const at::Tensor& weight, const at::Tensor& gradient,
                          TensorPairs& copies) {
  if (gradient.layout() != at::kStrided) return gradient.to(at::kFloat);
  at::Tensor wide = at::empty_like(weight, weight.options().dtype(at::kFloat).requires_grad(false));
  copies.add(wide, gradient);
  return wide;
}

// ---- Weights that are split and no longer split -------------------------------------------------

inline bool can_be_split(const at::Tensor& parameter) {
  return weight_meta_of(parameter) || !parameter.unsafeGetTensorImpl()->get_backend_meta();
}

/// Takes off what earlier MasterWeights, which are gone, have put there.
inline void remove_weight_meta(const at::Tensor& parameter) {
  if (weight_meta_of(parameter)) parameter.unsafeGetTensorImpl()->set_backend_meta({});
}

/// Has a model's weight tell that `masters` keep its master, for as long as they live, and whether
/// in a tensor apart. Not one that carries data of its device's own.
inline void note_masters(const at::Tensor& weight, const std::shared_ptr<const void>& masters,
                         bool apart) {
  c10::TensorImpl* const tensor = weight.unsafeGetTensorImpl();
  if (!tensor->get_backend_meta()) tensor->set_backend_meta(c10::make_intrusive<WeightMeta>());
  if (WeightMeta* const meta = weight_meta_of(weight)) {
    meta->masters = masters;
    meta->has_master_apart = apart;
  }
}

/// What a weight's value becomes, in memory of its own: the weight in 16 bits, and those that it
/// lacks, where it is split.
struct NarrowWeight {
  static NarrowWeight of(const at::Tensor& value, at::ScalarType dtype) {
    return {value.to(dtype, /*non_blocking=*/false, /*copy=*/true), {}};
  }
  /// Laid out as `like`.
  static NarrowWeight split(const at::Tensor& value, const at::Tensor& like) {
    const auto options = like.options().requires_grad(false);
    NarrowWeight halves{at::empty_like(like, options.dtype(at::kBFloat16)), {}};
    halves.low = at::empty_like(like, options.dtype(at::kShort));
    write_split(value, halves.high, halves.low);
    return halves;
  }

  /// Has `parameter` be that, and carry what it lacks.
  void give_to(const at::Tensor& parameter) const {
    parameter.set_data(high);
    if (!low.defined()) return;
    auto split = make_split_weight(low);
    split->note_version(parameter);
    parameter.unsafeGetTensorImpl()->set_backend_meta(std::move(split));
  }

  at::Tensor high, low{};
};

}  // namespace torchamp::detail
