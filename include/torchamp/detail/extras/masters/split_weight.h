// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/optim/kernels.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Split weights]
// An fp32 master is stored as two halves: the bf16 weight that the model uses (`high`), and the
// other 16 bits (`low`):
//
//     high = (bits + 0x8000) >> 16      low = int16(bits)      bits = (high << 16) + low
//
// modulo 2^32, so every number is restored: ties, denormals, -0, infs. `high` is the master rounded
// to the nearest bf16, ties away from zero; the largest finite values round to an inf, from which
// `low` restores them. The rounding of a NaN can carry into a `high` of 0 (CUDA's NaNs have all
// bits but the sign set) or drop to an inf. So every NaN is stored as 0x7fc00000 or its negative.
//
// `low` is attached to the weight's TensorImpl, so that all code with the weight can find it, and
// so that it lives as long as the weight. Gradients of split weights are fp32. Only the fused
// optimizers write both halves. Steps of other optimizers are detected as follows:
//   - GradScaler's step and unscale_ check whether the optimizer is a FusedOptimizer
//   - MasterWeights checks whether the weights' versions have changed since the last fused step
//   - LibTorch's SGD writes through the weight's data(), which no version counts. But data() calls
//     clone() of this meta. So if a gradient disappears without a fused step, or still exists at
//     copy_to_model(), MasterWeights checks whether data() was called meanwhile

/// The end of messages about split weights that other optimizers step.
inline std::string split_needs_fused() {
  return ". With MasterStorage::split only fused optimizers (" + FusedNames::text() +
         ") and MasterWeights::load() write both halves of a weight. Step it with a fused "
         "optimizer, or make the masters with MasterStorage::full.";
}

/// The data of a split weight besides the weight itself.
struct SplitWeight final : WeightMeta {
  at::Tensor low;  ///< int16, laid out as the weight

  bool was_taken = false;  ///< whether a gradient waits for a fused step
  uint32_t version = 0;    ///< of the weight, when both halves were written
  /// Whether data() or detach() of the weight was called since a gradient was taken. Any thread may
  /// call.
  mutable std::atomic<bool> has_alias = false;

  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    has_alias.store(true, std::memory_order_relaxed);
    return self;
  }

  at::ScalarType step_dtype(const at::Tensor& /*weight*/) const override { return at::kFloat; }
  void refuse_plain_step(ErrorPlace where) const override {
    TORCH_CHECK_TYPE(false, where(), " belongs to a split weight, and this optimizer is not fused",
                     split_needs_fused());
  }
  void note_gradient_dropped() override { was_taken = false; }
  /// Called only if unscale_ or the step has a gradient, so it is recorded as taken.
  void note_gradient_taken(uint64_t /*times*/) override { note_taken(); }

  /// Whether `low` belongs to the values of `high`: the weight may have been moved.
  bool fits(const at::Tensor& high) const {
    return high.scalar_type() == at::kBFloat16 && high.device() == low.device() &&
           high.sizes() == low.sizes() && high.strides() == low.strides();
  }

  /// Whether `high` is unwritten since note_version(), as far as LibTorch counts.
  bool is_unwritten(const at::Tensor& high) const { return version == version_of(high); }
  void note_version(const at::Tensor& high) {
    version = version_of(high);
    was_taken = false;
  }
  /// Records that a 16-bit gradient has become an fp32 gradient.
  void note_taken() {
    was_taken = true;
    has_alias = false;
  }
};

/// Null for a tensor that is not a split weight.
inline SplitWeight* split_of(const at::Tensor& tensor) {
  c10::BackendMeta* const meta = tensor.unsafeGetTensorImpl()->get_backend_meta();
  return meta ? dynamic_cast<SplitWeight*>(meta) : nullptr;
}

inline constexpr const char* split_was_moved =
    " was moved, cast or given another shape since its MasterWeights, with MasterStorage::split, "
    "were made. Do that before.";

/// Throws for a split weight that was moved or written to. `where` begins the message.
template <class Where>
void check_split(const at::Tensor& weight, const Where& where) {
  const SplitWeight* const split = split_of(weight);
  if (!split) return;
  TORCH_CHECK_VALUE(split->fits(weight), where(), split_was_moved);
  TORCH_CHECK(split->is_unwritten(weight), where(),
              " was written to since its masters were made or stepped", split_needs_fused());
}

/// The same; also throws if the weight cannot be stepped with `gradient`.
template <class Where>
void check_split(const at::Tensor& weight, const at::Tensor& gradient, const Where& where) {
  check_split(weight, where);
  TORCH_CHECK(!split_of(weight) || gradient.scalar_type() == at::kFloat, where(),
              " has a gradient of ", gradient.scalar_type(),
              ". It is a weight of MasterWeights with MasterStorage::split, whose gradients are "
              "fp32: call MasterWeights::take_gradients() after backward().");
}

/// Throws if another optimizer may have stepped the weight with a gradient that no fused optimizer
/// has used.
template <class Where>
void check_not_half_stepped(const at::Tensor& weight, const Where& where) {
  const SplitWeight* const split = split_of(weight);
  TORCH_CHECK(!split || !split->was_taken || !split->has_alias, where(),
              " was given a gradient that no fused optimizer has stepped with, and its data() or "
              "detach() was taken since, as LibTorch's SGD does to write it",
              split_needs_fused(),
              " (If there was no step: drop such gradients by the zero_grad() of MasterWeights.)");
}

/// Consecutive runs of elements in memory order: the halves of masters, and the fp32 numbers made
/// of them.
class SplitRuns {
 public:
  explicit SplitRuns(at::Device device) : device_(device) {}

  /// Two runs of equal length: bf16 and int16.
  void add(const at::Tensor& high, const at::Tensor& low) {
    high_.push_back(high);
    low_.push_back(low);
    elements_ += high.numel();
  }

  /// The masters, one run each, in the memory of `buffer` (fp32, large enough) until its next use.
  std::vector<at::Tensor> join(const at::Tensor& buffer) const {
    std::vector<at::Tensor> wide = cut(buffer);
    if (device_.is_cpu()) {
      for (std::size_t i = 0; i < wide.size(); ++i) join_on_cpu(high_[i], low_[i], wide[i]);
      return wide;
    }
    const at::Tensor low_bits = buffer.narrow(0, 0, elements_).view(at::kInt);
    const at::Tensor high_bits = at::empty_like(low_bits);
    at::_foreach_copy_(cut(high_bits), as_int16(high_));
    at::_foreach_copy_(cut(low_bits), low_);
    low_bits.add_(high_bits, 1 << 16);
    return wide;
  }

  /// Writes masters in the layout of join().
  void split(const at::Tensor& buffer) const {
    const std::vector<at::Tensor> wide = cut(buffer);
    if (device_.is_cpu()) {
      for (std::size_t i = 0; i < wide.size(); ++i) split_on_cpu(wide[i], high_[i], low_[i]);
      return;
    }
    const at::Tensor values = buffer.narrow(0, 0, elements_);
    values.masked_fill_(values.isnan(), std::numeric_limits<double>::quiet_NaN());
    const at::Tensor bits = values.view(at::kInt);
    const at::Tensor high_bits = at::add(bits, 0x8000).bitwise_right_shift_(16);
    at::_foreach_copy_(as_int16(high_), cut(high_bits));
    at::_foreach_copy_(low_, cut(bits));
  }

 private:
  static constexpr int64_t grain = int64_t{1} << 15;  // elements for a thread

  std::vector<at::Tensor> cut(const at::Tensor& buffer) const {
    std::vector<at::Tensor> runs;
    int64_t begin = 0;
    for (const at::Tensor& high : high_) {
      runs.push_back(buffer.narrow(0, begin, high.numel()));
      begin += high.numel();
    }
    return runs;
  }

  static std::vector<at::Tensor> as_int16(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> views;
    views.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) views.push_back(tensor.view(at::kShort));
    return views;
  }

  /// Calls `function(i, n)` for ranges that cover 0 to `size`: n is a constant, for vector
  /// instructions, except in the last ranges.
  template <class Function>
  static void for_each_block(int64_t size, const Function& function) {
    at::parallel_for(0, size, grain, [&](int64_t i, int64_t end) {
      constexpr std::integral_constant<int, 64> block;
      for (; i + block <= end; i += block) function(i, block);
      for (; i < end; ++i) function(i, std::integral_constant<int, 1>());
    });
  }

  // With local arrays the compiler can assume that nothing overlaps.

  static void join_on_cpu(const at::Tensor& high, const at::Tensor& low, const at::Tensor& wide) {
    const auto* const from_high = static_cast<const uint16_t*>(high.const_data_ptr());
    const auto* const from_low = low.const_data_ptr<int16_t>();
    auto* const to = static_cast<uint32_t*>(wide.mutable_data_ptr());
    for_each_block(wide.numel(), [&](int64_t i, auto size) {
      uint16_t h[size];
      int16_t l[size];
      uint32_t bits[size];
      std::memcpy(h, from_high + i, sizeof h);
      std::memcpy(l, from_low + i, sizeof l);
      for (int k = 0; k < size; ++k) {
        bits[k] = (uint32_t{h[k]} << 16) + static_cast<uint32_t>(int32_t{l[k]});
      }
      std::memcpy(to + i, bits, sizeof bits);
    });
  }

  static void split_on_cpu(const at::Tensor& wide, const at::Tensor& high, const at::Tensor& low) {
    const auto* const from = static_cast<const uint32_t*>(wide.const_data_ptr());
    auto* const to_high = static_cast<uint16_t*>(high.mutable_data_ptr());
    auto* const to_low = static_cast<uint16_t*>(low.mutable_data_ptr());
    for_each_block(wide.numel(), [&](int64_t i, auto size) {
      uint32_t bits[size];
      uint16_t h[size], l[size];
      std::memcpy(bits, from + i, sizeof bits);
      for (int k = 0; k < size; ++k) {
        const bool is_nan = static_cast<int32_t>(bits[k] & 0x7fffffffU) > 0x7f800000;
        const uint32_t mask = 0U - uint32_t{is_nan};
        const uint32_t kept = (bits[k] & ~(mask & 0x7fffffffU)) | (mask & 0x7fc00000U);
        h[k] = static_cast<uint16_t>((kept + 0x8000U) >> 16);
        l[k] = static_cast<uint16_t>(kept);
      }
      std::memcpy(to_high + i, h, sizeof h);
      std::memcpy(to_low + i, l, sizeof l);
    });
  }

  at::Device device_;
  std::vector<at::Tensor> high_, low_;
  int64_t elements_ = 0;
};

/// The fp32 master of a split weight, laid out as the weight.
inline at::Tensor joined(const at::Tensor& high, const SplitWeight& split) {
  at::Tensor wide = at::empty_like(high, high.options().dtype(at::kFloat).requires_grad(false));
  if (wide.numel() == 0) return wide;
  SplitRuns whole(high.device());
  whole.add(in_memory_order(high.detach()), in_memory_order(split.low));
  whole.join(in_memory_order(wide));
  return wide;
}

}  // namespace TORCHAMP_NAMESPACE::detail
