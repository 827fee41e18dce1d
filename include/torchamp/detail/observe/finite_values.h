// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "torchamp/detail/libtorch.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// `zero_` of `aten::zero_.overload`.
inline std::string_view short_name(std::string_view name) {
  name.remove_prefix(name.find("::") + 2);
  return name.substr(0, name.find('.'));
}
/// Ops whose first argument comes out with other values, whatever it held.
inline bool overwrites_first(std::string_view op) {
  static constexpr std::array<std::string_view, 14> ops{
      "bernoulli_",     "cauchy_",        "copy_",   "exponential_", "fill_",
      "geometric_",     "log_normal_",    "normal_", "random_",      "uniform_",
      "_foreach_copy_", "_foreach_zero_", "zero_",   "resize_as_"};
  return std::ranges::find(ops, op) != ops.end();
}
/// Whether an op looks at an argument's shape and dtype only, as `zeros_like` does.
inline bool ignores_values(std::string_view name, std::size_t argument) {
  const std::string_view op = short_name(name);
  if (argument == 0 && overwrites_first(op)) return true;
  if (!name.starts_with("aten::")) return false;
  return argument == 0 ? op.ends_with("_like") || op.starts_with("new_")
                       : op.ends_with("_as") || op.ends_with("_as_");
}
/// Ops that compute nothing.
inline bool only_arranges(std::string_view op) {
  return op == "detach_" || op == "requires_grad_" || op == "set_" || op == "resize_";
}

/// The numbers that a tensor holds, where there are any that LibTorch can look at; else
/// undefined.
inline at::Tensor values_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || tensor.is_nested()) return {};
  if (!tensor.is_floating_point() && !tensor.is_complex()) return {};
  if (is_packed(tensor.scalar_type())) return {};
  const at::Tensor values = [&]() -> at::Tensor {
    switch (tensor.layout()) {
      case at::kStrided:
        return tensor;
      case at::kSparse:
        return tensor._values();
      case at::kSparseCsr:
      case at::kSparseCsc:
      case at::kSparseBsr:
      case at::kSparseBsc:
        return tensor.values();
      default:
        return {};
    }
  }();
  return values.defined() && values.numel() > 0 ? values : at::Tensor();
}
/// In a dtype that LibTorch's functions know.
inline at::Tensor readable(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kComplexHalf) return tensor.to(at::kComplexFloat);
  return at::isFloat8Type(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}
inline bool holds_finite(const at::Tensor& tensor) {
  return readable(tensor).isfinite().all().item<bool>();
}

inline bool has_nan(const at::Tensor& tensor) {
  return readable(tensor).isnan().any().item<bool>();
}

}  // namespace torchamp::detail
