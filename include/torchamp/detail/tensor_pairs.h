// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>

#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Pairs of tensors of equal shape, for kernels that take all pairs of one device and one pair of
/// dtypes at once.
class TensorPairs {
 public:
  void add(at::Tensor to, at::Tensor from) {
    for (Batch& batch : batches_) {
      const at::Tensor &first_to = batch.to.front(), &first_from = batch.from.front();
      if (first_to.device() != to.device() || first_from.device() != from.device() ||
          first_to.dtype() != to.dtype() || first_from.dtype() != from.dtype()) {
        continue;
      }
      batch.to.push_back(std::move(to));
      batch.from.push_back(std::move(from));
      return;
    }
    batches_.push_back({{std::move(to)}, {std::move(from)}});
  }

  /// Copies each `from` to its `to`, casting.
  void copy() const {
    for (const Batch& batch : batches_) at::_foreach_copy_(batch.to, batch.from);
  }

  /// Adds each `from` to its `to`.
  void accumulate() const {
    for (const Batch& batch : batches_) at::_foreach_add_(batch.to, batch.from);
  }

 private:
  struct Batch {
    std::vector<at::Tensor> to, from;
  };
  std::vector<Batch> batches_;
};

}  // namespace torchamp::detail
