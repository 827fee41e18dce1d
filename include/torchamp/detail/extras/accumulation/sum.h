// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/scaler/loss_scale.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Sums of an optimizer's gradients. A flag on the device decides whether a set of gradients is
/// added: see Note [A conditional add].
class GradientSum {
 public:
  /// Throws for gradients that cannot be summed, or that do not fit the present sums.
  void check(const torch::optim::Optimizer& optimizer) const;

  /// Throws if the parameters of the sums were removed, moved or reshaped.
  void check_parameters(const torch::optim::Optimizer& optimizer, const char* call) const;

  /// Returns a function that adds a set of gradients; all memory is already allocated. `found_inf`
  /// is 0-dim fp32, 0 or 1; if it is undefined, the gradients are added. A set without gradients
  /// counts as not added.
  std::function<void()> prepared(const torch::optim::Optimizer& optimizer,
                                 const at::Tensor& found_inf);

  /// Whether there is a set, added or not, that had gradients.
  bool any() const { return added_ + flagged_ > 0; }

  /// How many sets were added.
  ReadOnce kept() const;

  /// A mean over sets of gradients.
  struct Mean {
    /// 0-dim fp32: 1 if no set was added, or if the mean is not finite (finite gradients may add up
    /// to an inf). Undefined if no set had a flag.
    at::Tensor found_inf{};
    std::vector<GradientBatch> gradients{};
  };

  /// Sets the parameters' gradients to the mean over `kept` sets, in tensors separate from the
  /// sums.
  Mean give_mean_to(torch::optim::Optimizer& optimizer, const ReadOnce& kept) const;

  void clear() { *this = GradientSum(); }

 private:
  struct Batch : TensorKind {
    std::vector<at::Tensor> sums{}, gradients{};
    std::vector<std::size_t> slots{};
    std::optional<at::Tensor> flag{};

    void take(const at::Tensor& sum, const at::Tensor& gradient);
  };

  bool has_sum(std::size_t slot) const { return slot < sums_.size() && sums_[slot].defined(); }

  static at::Tensor real(const at::Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; }
  static at::ScalarType sum_dtype(const at::Tensor& gradient) {
    const at::ScalarType dtype = gradient.scalar_type();
    return is_16_bit(dtype) ? at::kFloat : dtype;
  }

  std::vector<at::Tensor> sums_;         // in the order of the parameters, if defined
  std::vector<const void*> parameters_;  // the parameter of each sum
  at::Tensor dropped_;                   // 0-dim fp32
  int64_t added_ = 0;                    // without a flag
  int64_t flagged_ = 0;
};

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/extras/accumulation/sum-inl.h"  // IWYU pragma: export
#endif
