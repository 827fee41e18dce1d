// SPDX-License-Identifier: BSD-3-Clause
// Lists of tensors that are copied pair by pair.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>

#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Pairs of tensors of equal shape, for kernels that take all pairs of two kinds at once.
class TensorPairs {
 public:
  void add(at::Tensor to, at::Tensor from) {
    Batch& batch = group_of(batches_, Kinds{TensorKind::of(to), TensorKind::of(from)});
    batch.to.push_back(std::move(to));
    batch.from.push_back(std::move(from));
  }

  /// Copies each `from` to its `to`, casting.
  void copy() const {
    for (const Batch& batch : batches_) at::_foreach_copy_(batch.to, batch.from);
  }

  void accumulate() const {
    for (const Batch& batch : batches_) at::_foreach_add_(batch.to, batch.from);
  }

 private:
  struct Kinds {
    TensorKind of_to, of_from;
    bool operator==(const Kinds&) const = default;
  };
  struct Batch : Kinds {
    std::vector<at::Tensor> to{}, from{};
  };
  std::vector<Batch> batches_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
