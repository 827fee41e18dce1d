// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>

#include <vector>

#include "torchamp/detail/core/base/tensors.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Whether tensors of one kind and shape hold the same numbers; NaNs are never the same.
inline bool same_numbers(const at::Tensor& one, const at::Tensor& other) {
  const bool dense = one.layout() == at::kStrided;
  return at::equal(dense ? one : one.to_dense(), dense ? other : other.to_dense());
}

/// Whether tensors are of one kind and shape.
inline bool is_alike(const at::Tensor& one, const at::Tensor& other) {
  return one.layout() == other.layout() && TensorKind::of(one) == TensorKind::of(other) &&
         one.sizes() == other.sizes();
}

/// The values of tensors at construction, to restore them. Call with gradients off.
class WriteBack {
 public:
  /// Where the copies of values are.
  enum class Copies {
    none,
    on_device,  ///< on the tensor's device; only tensors that were written are restored
    on_host,    ///< no copies of tensors that repeat elements, which nothing fills
  };

  void add(const at::Tensor& tensor, Copies copies) {
    if (!tensor.defined()) return;
    const at::Tensor memory = tensor.detach();
    at::Tensor values;
    if (copies == Copies::on_device) values = memory.clone();
    if (copies == Copies::on_host && !repeats_elements(memory)) {
      values = memory.to(at::kCPU, memory.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
    all_.push_back({tensor, memory, values, copies, tensor.requires_grad()});
  }

  /// A tensor's memory, and a copy of its values.
  struct Kept {
    at::Tensor tensor, memory, values;
    Copies copies;
    bool requires_grad;
  };
  const std::vector<Kept>& all() const { return all_; }

  /// Needs no device memory if the copies are on the host.
  void put_back() const {
    for (auto one = all_.rbegin(); one != all_.rend(); ++one) {  // a tensor may be listed twice
      const auto& [tensor, memory, values, copies, requires_grad] = *one;
      const bool lies_there =
          is_alike(tensor, memory) && tensor.has_storage() && tensor.is_alias_of(memory);
      if (!lies_there) at::Tensor(tensor).set_data(memory);
      const bool is_written =
          values.defined() && (copies == Copies::on_host || !same_numbers(memory, values));
      if (is_written) memory.copy_(values);
      if (tensor.requires_grad() != requires_grad) tensor.set_requires_grad(requires_grad);
    }
  }

 private:
  std::vector<Kept> all_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
