// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// Note [Split weights]
// An fp32 master is kept as two halves: the bf16 weight that the model computes with (`high`), and
// the 16 bits that it lacks (`low`):
//
//     high = (bits + 0x8000) >> 16      low = int16(bits)      bits = (high << 16) + low
//
// modulo 2^32, so that every pattern comes back: ties, denormals, -0, infs, NaNs. `high` is the
// master rounded to the nearest bf16, ties away from zero; the largest finite values round to an
// inf, whose `low` brings them back. A NaN whose 16 upper bits are all ones but for the sign, as
// CUDA makes them, would carry into a `high` of 0 (and one of the smallest payload into an inf), so
// a step that is taken makes the NaNs that it leaves the usual one, 0x7fc00000 or its negative.
// What was given or loaded keeps its bits, and so do all where the step is skipped.
//
// `low` hangs at the weight's TensorImpl, so that whoever is given the weight finds it, and so that
// it lives as long as the weight. Gradients of split weights are fp32. Only the fused optimizers
// write both halves. That another one does not do so unnoticed:
//   - GradScaler's step and unscale_ look whether the optimizer is a FusedOptimizer
//   - MasterWeights looks whether the weights' versions are those that the last fused step has left
//   - LibTorch's SGD, which hides its writes, asks for the weight's data(). LibTorch asks this meta
//     for a clone() then. So where gradients are gone, or come to copy_to_model(), that no fused
//     optimizer has stepped with, MasterWeights looks whether data() was asked for meanwhile

/// The end of errors about split weights that other optimizers step.
inline constexpr const char* split_needs_fused =
    ". With MasterStorage::split half of each weight lies where only fused optimizers (FusedAdam, "
    "FusedAdamW, FusedSGD, FusedAdagrad) and MasterWeights::load() write it. Step it with one of "
    "those, or make the masters with MasterStorage::full.";

/// What a split weight has beside the weight itself.
struct SplitWeight final : WeightMeta {
  at::Tensor low;  ///< int16, laid out as the weight

  bool was_taken = false;  ///< a gradient was; neither stepped with by a fused one nor dropped
  uint32_t version = 0;    ///< of the weight, when both halves were written
  /// data() or detach() of the weight was asked for since a gradient was taken. Any thread may ask.
  mutable std::atomic<bool> has_alias = false;

  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    has_alias.store(true, std::memory_order_relaxed);
    return self;
  }

  at::ScalarType step_dtype(const at::Tensor& /*weight*/) const override { return at::kFloat; }
  void refuse_plain_step(ErrorPlace where) const override {
    TORCH_CHECK_TYPE(false, where(), " is that of a split weight, and this is no fused optimizer",
                     split_needs_fused);
  }
  void note_gradient_dropped() override { was_taken = false; }

  /// Whether `low` belongs to what `high` holds: the weight may have been moved.
  bool fits(const at::Tensor& high) const {
    return high.scalar_type() == at::kBFloat16 && high.device() == low.device() &&
           high.sizes() == low.sizes() && high.strides() == low.strides();
  }

  /// Whether nobody has written to `high` since note_version(), as far as LibTorch counts it.
  bool is_unwritten(const at::Tensor& high) const { return version == version_of(high); }
  void note_version(const at::Tensor& high) {
    version = version_of(high);
    was_taken = false;
  }
  /// A gradient of 16 bits has become one of fp32.
  void note_taken() {
    was_taken = true;
    has_alias = false;
  }
};

/// Null for a tensor that is no split weight.
inline SplitWeight* split_of(const at::Tensor& tensor) {
  c10::BackendMeta* const meta = tensor.unsafeGetTensorImpl()->get_backend_meta();
  return meta ? dynamic_cast<SplitWeight*>(meta) : nullptr;
}

inline constexpr const char* split_was_moved =
    " was moved, cast or given another shape since its MasterWeights, with MasterStorage::split, "
    "were made. Do that before.";

/// Throws for a split weight that was moved or written to. `where` begins the error.
template <class Where>
void check_split(const at::Tensor& weight, const Where& where) {
  const SplitWeight* const split = split_of(weight);
  if (!split) return;
  TORCH_CHECK_VALUE(split->fits(weight), where(), split_was_moved);
  TORCH_CHECK(split->is_unwritten(weight), where(),
              " was written to since its masters were made or stepped", split_needs_fused);
}

/// The same, and for one that cannot be stepped with `gradient`.
template <class Where>
void check_split(const at::Tensor& weight, const at::Tensor& gradient, const Where& where) {
  check_split(weight, where);
  TORCH_CHECK(!split_of(weight) || gradient.scalar_type() == at::kFloat, where(),
              " has a gradient of ", gradient.scalar_type(),
              ". It is a weight of MasterWeights with MasterStorage::split, whose gradients are "
              "fp32: call MasterWeights::take_gradients() after backward().");
}

/// Throws where somebody else may have stepped the weight with a gradient that no fused optimizer
/// has stepped with.
template <class Where>
void check_not_half_stepped(const at::Tensor& weight, const Where& where) {
  const SplitWeight* const split = split_of(weight);
  TORCH_CHECK(!split || !split->was_taken || !split->has_alias, where(),
              " was given a gradient that no fused optimizer has stepped with, and its data() or "
              "detach() was taken since, as LibTorch's SGD does to write it",
              split_needs_fused,
              " (If there was no step: drop such gradients by the zero_grad() of MasterWeights.)");
}

}  // namespace torchamp::detail
