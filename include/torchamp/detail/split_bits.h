// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/split_weight.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// What becomes of NaNs when masters are split; see Note [Split weights].
enum class SplitNaNs { as_they_are, usual };

/// Some runs of elements, in the order of memory, one after the other: the halves of masters, and
/// fp32 numbers made of them.
class SplitRuns {
 public:
  explicit SplitRuns(at::Device device) : device_(device) {}

  /// Two runs of equal length, of which the first is bf16 and the second int16.
  void add(const at::Tensor& high, const at::Tensor& low) {
    high_.push_back(high);
    low_.push_back(low);
    elements_ += high.numel();
  }

  /// The masters, as long as `buffer` is not used for others: one run each, in its memory. `buffer`
  /// is fp32 and large enough.
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

  /// Writes masters that lie as join() has laid them. `skipped`, 0-dim fp32: where it is there and
  /// 1, NaNs are left as they are.
  void split(const at::Tensor& buffer, SplitNaNs nans,
             const std::optional<at::Tensor>& skipped = std::nullopt) const {
    const std::vector<at::Tensor> wide = cut(buffer);
    if (device_.is_cpu()) {
      if (skipped && *skipped->const_data_ptr<float>() == 1.F) nans = SplitNaNs::as_they_are;
      for (std::size_t i = 0; i < wide.size(); ++i) split_on_cpu(wide[i], high_[i], low_[i], nans);
      return;
    }
    const at::Tensor values = buffer.narrow(0, 0, elements_);
    if (nans == SplitNaNs::usual) {
      at::Tensor is_nan = values.isnan();
      if (skipped) is_nan = is_nan.logical_and_(skipped->ne(1));
      values.masked_fill_(is_nan, std::numeric_limits<double>::quiet_NaN());
    }
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

  /// Calls `function(i, n)` for ranges that make up 0 to `size`: n is a constant that compilers
  /// make vectors of, but for the last few.
  template <class Function>
  static void for_each_block(int64_t size, const Function& function) {
    at::parallel_for(0, size, grain, [&](int64_t i, int64_t end) {
      constexpr std::integral_constant<int, 64> block;
      for (; i + block <= end; i += block) function(i, block);
      for (; i < end; ++i) function(i, std::integral_constant<int, 1>());
    });
  }

  // Arrays of their own tell the compiler that nothing overlaps.

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

  static void split_on_cpu(const at::Tensor& wide, const at::Tensor& high, const at::Tensor& low,
                           SplitNaNs nans) {
    const auto* const from = static_cast<const uint32_t*>(wide.const_data_ptr());
    auto* const to_high = static_cast<uint16_t*>(high.mutable_data_ptr());
    auto* const to_low = static_cast<uint16_t*>(low.mutable_data_ptr());
    const int32_t largest = nans == SplitNaNs::usual ? 0x7f800000 : 0x7fffffff;
    for_each_block(wide.numel(), [&](int64_t i, auto size) {
      uint32_t bits[size];
      uint16_t h[size], l[size];
      std::memcpy(bits, from + i, sizeof bits);
      for (int k = 0; k < size; ++k) {
        const bool is_nan = static_cast<int32_t>(bits[k] & 0x7fffffffU) > largest;
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

/// How many elements of split weights are put together at a time: few enough for a CPU's cache,
/// enough to keep a device busy.
inline int64_t split_elements_at_once(at::Device device) {
  return device.is_cpu() ? int64_t{1} << 16 : int64_t{1} << 21;
}

/// The fp32 master of a split weight, laid out as the weight.
inline at::Tensor joined(const at::Tensor& high, const SplitWeight& split) {
  at::Tensor wide = at::empty_like(high, high.options().dtype(at::kFloat).requires_grad(false));
  if (wide.numel() == 0) return wide;
  SplitRuns whole(high.device());
  whole.add(in_memory_order(high.detach()), in_memory_order(split.low));
  whole.join(in_memory_order(wide));
  return wide;
}

}  // namespace torchamp::detail
