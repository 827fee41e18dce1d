// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <functional>
#include <utility>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/separate.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

TORCHAMP_BODY void GradientSeparator::add(const at::Tensor& parameter) {
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

TORCHAMP_BODY void GradientSeparator::add_range(const Range& range) {
  if (!shared_.empty()) {
    const Range& last = shared_.back();
    may_overlap_ |= range.memory == last.memory ? range.begin < last.end
                                                : std::less<>()(range.memory, last.memory);
  }
  shared_.push_back(range);
}

TORCHAMP_BODY void GradientSeparator::add_memory(const at::Tensor& parameter,
                                                 const at::Tensor& values) {
  if (values.numel() == 0) return;
  const auto size = static_cast<std::size_t>(values.itemsize());
  const std::size_t begin = static_cast<std::size_t>(values.storage_offset()) * size;
  add_range({parameter.unsafeGetTensorImpl(), values.storage().unsafeGetStorageImpl(), begin,
             begin + extent_of(values) * size});
}

TORCHAMP_BODY std::size_t GradientSeparator::extent_of(const at::Tensor& tensor) {
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

TORCHAMP_BODY void GradientSeparator::replace_overlapping() {
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

TORCHAMP_BODY void separate_gradients(const torch::optim::Optimizer& optimizer) {
  GradientSeparator separator;
  any_parameter(optimizer, [&](const at::Tensor& parameter) {
    separator.add(parameter);
    return false;
  });
  separator.separate();
}

}  // namespace TORCHAMP_NAMESPACE::detail
