// SPDX-License-Identifier: BSD-3-Clause
// Gives gradients that share memory their own memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Gradients in one memory]
// If nobody else holds the tensor that a backward function returns, autograd stores this tensor as
// the gradient of a parameter, without a copy. Two such tensors may be views of one memory: both
// gradients of (a.unsqueeze(0) + b.unsqueeze(0)).sum() are. A write to one gradient then changes
// the other gradient as well. So before torchamp writes to gradients, or a further backward adds to
// them, each gradient gets its own memory: of gradients that overlap, the first one keeps its
// memory, and clones replace the others. Disjoint views of one memory, as stack, cat and flat
// buffers make them, stay as they are.
//
// A storage counts its tensors, and a tensor its owners. If both counts are 1, the gradient shares
// nothing, and is not compared with others. Gradients overlap if their ranges of bytes do. (The
// ranges of columns of a matrix overlap, although the columns do not. Autograd stores no such
// gradients: they would have another layout than their parameters.)

/// Replaces gradients that share memory: add() all, then separate().
class GradientSeparator {
 public:
  /// Adds the gradient of `parameter`, if there is one. The parameter outlives this object.
  void add(const at::Tensor& parameter);

  /// Gives each gradient its own memory. Either replaces all gradients that need it, or throws.
  void separate() {
    if (may_overlap_) replace_overlapping();
  }

 private:
  /// The memory of a gradient, in bytes.
  struct Range {
    c10::TensorImpl* parameter;
    const void* memory;  ///< the storage, or the tensor if it has none
    std::size_t begin, end;
  };

  /// Gradients in the order of memory need no comparison.
  void add_range(const Range& range);

  void add_memory(const at::Tensor& parameter, const at::Tensor& values);

  /// The elements from the first to the last one of a tensor that is not empty, with gaps.
  static std::size_t extent_of(const at::Tensor& tensor);

  void replace_overlapping();

  std::vector<Range> shared_;
  bool may_overlap_ = false;
};

/// Gives each gradient of `optimizer` its own memory: see Note [Gradients in one memory]. Either
/// replaces all gradients that need it, or throws.
void separate_gradients(const torch::optim::Optimizer& optimizer);

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/gradients/separate-inl.h"  // IWYU pragma: export
#endif
