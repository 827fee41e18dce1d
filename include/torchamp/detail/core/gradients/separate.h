// SPDX-License-Identifier: BSD-3-Clause
// Gives gradients that share memory their own memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"

namespace torchamp::detail {

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
  void add(const at::Tensor& parameter) {
    const at::Tensor& gradient = gradient_of(parameter);
    if (!gradient.defined()) return;
    if (gradient.is_sparse()) {  // it consists of other tensors, which may share memory
      add_memory(parameter, gradient._values());
    } else if (!gradient.has_storage()) {
      add_range({parameter.unsafeGetTensorImpl(), gradient.unsafeGetTensorImpl(), 0, 1});
    } else if (gradient.use_count() > 1 || gradient.storage().use_count() > 1) {
      add_memory(parameter, gradient);
    }
  }

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
  void add_range(const Range& range) {
    if (!shared_.empty()) {
      const Range& last = shared_.back();
      may_overlap_ |= range.memory == last.memory ? range.begin < last.end
                                                  : std::less<>()(range.memory, last.memory);
    }
    shared_.push_back(range);
  }

  void add_memory(const at::Tensor& parameter, const at::Tensor& values) {
    if (values.numel() == 0) return;
    const auto size = static_cast<std::size_t>(values.itemsize());
    const std::size_t begin = static_cast<std::size_t>(values.storage_offset()) * size;
    add_range({parameter.unsafeGetTensorImpl(), values.storage().unsafeGetStorageImpl(), begin,
               begin + extent_of(values) * size});
  }

  /// The elements from the first to the last one of a tensor that is not empty, with gaps.
  static std::size_t extent_of(const at::Tensor& tensor) {
    int64_t extent = 1;
    if (tensor.is_non_overlapping_and_dense()) {
      extent = tensor.numel();
    } else {
      for (int64_t d = 0; d < tensor.dim(); ++d) {
        extent += (tensor.size(d) - 1) * tensor.stride(d);
      }
    }
    return static_cast<std::size_t>(extent);
  }

  void replace_overlapping() {
    std::stable_sort(shared_.begin(), shared_.end(), [](const Range& a, const Range& b) {
      return a.memory == b.memory ? a.begin < b.begin : std::less<>()(a.memory, b.memory);
    });
    const InternalOps internal;
    std::vector<std::pair<c10::TensorImpl*, at::Tensor>> clones;  // of parameters' gradients
    const Range* last = &shared_.front();  // of gradients that keep their memory
    for (const Range& range : shared_) {
      if (range.memory != last->memory || range.begin >= last->end) {
        last = &range;
      } else if (range.parameter != last->parameter) {
        clones.emplace_back(range.parameter, range.parameter->grad().clone());
      }
    }
    for (auto& [parameter, clone] : clones) parameter->mutable_grad() = std::move(clone);
  }

  std::vector<Range> shared_;
  bool may_overlap_ = false;
};

/// Gives each gradient of `optimizer` its own memory: see Note [Gradients in one memory]. Either
/// replaces all gradients that need it, or throws.
inline void separate_gradients(const torch::optim::Optimizer& optimizer) {
  GradientSeparator separator;
  any_parameter(optimizer, [&](const at::Tensor& parameter) {
    separator.add(parameter);
    return false;
  });
  separator.separate();
}

}  // namespace torchamp::detail
