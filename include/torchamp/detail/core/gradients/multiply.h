// SPDX-License-Identifier: BSD-3-Clause
// Multiplies gradients in place: all of them, or none if memory runs out.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"
#include "torchamp/detail/core/gradients/unscale.h"

namespace TORCHAMP_NAMESPACE::detail {

/// fp32 copies of 16-bit gradients, a bounded number of elements at a time.
class WideCopies {
 public:
  /// Allocates the memory of all copies.
  explicit WideCopies(const GradientBatch& batch, int64_t elements_at_once = int64_t{1} << 24)
      : narrow_(batch), at_once_(elements_at_once) {
    int64_t most = 0;
    for (std::size_t begin = 0; begin < narrow_.gradients.size();) {
      const Run run = run_from(begin);
      most = std::max(most, run.memory);
      begin = run.end;
    }
    memory_ = at::empty({most}, at::device(batch.device).dtype(at::kFloat));
  }

  /// Calls `function` with copies of all gradients, part by part, and copies its results back.
  template <class Function>
  void through(const Function& function) const {
    const at::TensorList all = narrow_.gradients;
    for (std::size_t begin = 0; begin < all.size();) {
      const Run run = run_from(begin);
      GradientBatch wide{{narrow_.device, at::kFloat}};
      int64_t offset = 0;
      for (std::size_t i = begin; i < run.end; ++i) {
        const at::Tensor& gradient = all[i];
        const bool is_dense = gradient.is_non_overlapping_and_dense();
        const at::Tensor copy = memory_.narrow(0, offset, gradient.numel());
        wide.gradients.push_back(is_dense ? copy.as_strided(gradient.sizes(), gradient.strides())
                                          : copy.view(gradient.sizes()));
        offset += aligned(gradient.numel());
      }
      const at::TensorList narrow = all.slice(begin, run.end - begin);
      at::_foreach_copy_(wide.gradients, narrow);
      function(wide);
      at::_foreach_copy_(narrow, wide.gradients);
      begin = run.end;
    }
  }

 private:
  /// Gradients that are copied together.
  struct Run {
    std::size_t end;       ///< behind the last one
    int64_t elements = 0;  ///< of all of them
    int64_t memory = 0;    ///< for them, in elements
  };
  Run run_from(std::size_t begin) const {
    Run run{begin};
    for (; run.end < narrow_.gradients.size(); ++run.end) {
      const int64_t elements = narrow_.gradients[run.end].numel();
      if (run.end > begin && run.elements + elements > at_once_) break;
      run.elements += elements;
      run.memory += aligned(elements);
    }
    return run;
  }
  /// So that kernels read several elements at once.
  static int64_t aligned(int64_t elements) { return (elements + 15) / 16 * 16; }

  const GradientBatch& narrow_;
  int64_t at_once_;
  at::Tensor memory_;
};

/// Multiplies gradients in place. The constructor reads the gradients and allocates all memory, so
/// that nothing is written if memory runs out. The batch outlives this object.
class Multiplication {
 public:
  /// By `factor`, 0-dim on their device.
  Multiplication(const GradientBatch& batch, const at::Tensor& factor)
      : batch_(batch), factor_(factor.to(batch.dtype)) {}
  /// By `factor`, 0-dim fp32 on their device (exactly 1 changes nothing). The constructor or run()
  /// sets `flag` as check_batch() does for the previous values.
  Multiplication(const GradientBatch& batch, const at::Tensor& factor, at::Tensor flag)
      : batch_(batch), factor_(factor), flag_(std::move(flag)) {
    if (unscale_kernel_takes(batch)) return;
    const bool is_narrow = is_16_bit(batch.dtype);
    if (is_narrow) copies_.emplace(batch);
    if (is_narrow && unscale_kernel_takes({{batch.device, at::kFloat}, {batch.gradients[0]}})) {
      return;  // it checks the copies
    }
    check_batch(batch, flag_);
    flag_.reset();
    if (!is_narrow) factor_ = factor.to(batch.dtype);
  }

  void run() {
    if (copies_) return copies_->through([this](const GradientBatch& wide) { multiply(wide); });
    multiply(batch_);
  }

 private:
  void multiply(const GradientBatch& batch) {
    if (flag_.defined()) {
      at::_amp_foreach_non_finite_check_and_unscale_(batch.gradients, flag_, factor_);
    } else {
      at::_foreach_mul_(batch.gradients, factor_);
    }
  }

  const GradientBatch& batch_;
  at::Tensor factor_;
  at::Tensor flag_{};  // set by ATen's kernel; undefined if other ops multiply
  std::optional<WideCopies> copies_{};
};

/// Multiplies every gradient in place by `factor(device)`, a 0-dim fp32 tensor there (a factor of
/// exactly 1 changes nothing), and sets `found_inf`, 0-dim fp32, 0 or 1, to 1 if any was not finite
/// before. A few kernels for each device and dtype; for reads see DeviceFlags.
inline void multiply_and_check(const std::vector<GradientBatch>& batches,
                               c10::function_ref<at::Tensor(at::Device)> factor,
                               at::Tensor& found_inf) {
  DeviceFlags flags(found_inf);
  std::vector<at::Tensor> factors;  // one for each device
  std::vector<Multiplication> multiplications;
  multiplications.reserve(batches.size());
  for (const GradientBatch& batch : batches) {
    std::size_t d = 0;
    while (d < factors.size() && factors[d].device() != batch.device) ++d;
    if (d == factors.size()) factors.push_back(factor(batch.device));
    multiplications.emplace_back(batch, factors[d], flags.on(batch.device));
  }
  for (Multiplication& multiplication : multiplications) multiplication.run();
  flags.gather();
}

}  // namespace TORCHAMP_NAMESPACE::detail
