// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/overlay/binary_cross_entropy.h"
#include "torchamp/detail/overlay/cast_arguments.h"
#include "torchamp/detail/overlay/kernel.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/ops.h"

namespace torchamp::detail {

/// The rows of Policy::standard() that LibTorch's lists do not have; they come before those.
struct StandardRow {
  OpFamily family;
  Cast cast;
};
inline constexpr StandardRow standard_rows[] = {
    {ops::addition, Cast::fp32},
    {ops::reduction, Cast::fp32},
    {ops::order_statistic, Cast::unchanged},
    {OpFamily("probability_loss", probability_loss_ops), Cast::fp32},
};

inline bool contains(const OpFamily& family, const c10::OperatorName& op) {
  std::string_view base = op.name;
  if (!base.starts_with("aten::")) return false;
  base.remove_prefix(6);
  for (const std::string_view name : family) {
    if (name == base) return true;
  }
  return false;
}

/// Whether the op computes in the widest dtype of its arguments by itself: see
/// Note [One cast for an addition].
inline bool promotes_its_arguments(const c10::OperatorName& op) {
  return contains(ops::addition, op);
}

/// The rule of a base table for one overload, before any edit.
inline Cast base_rule(BaseTable base, const c10::OperatorHandle& op, at::DeviceType device) {
  if (base == BaseTable::torch) {
    return has_native_kernel(op, device) ? Cast::native : Cast::unchanged;
  }
  const bool castable = why_not_castable(op.schema()).empty();
  for (const StandardRow& row : standard_rows) {
    if (castable && contains(row.family, op.operator_name())) return row.cast;
  }
  if (has_native_kernel(op, device)) return Cast::native;
  const Cast listed = listed_rule(full_name(op.operator_name()));
  return castable && listed != Cast::native ? listed : Cast::unchanged;
}

/// The castable ops that a base table speaks of itself, LibTorch's kernels aside.
inline std::vector<c10::OperatorHandle> base_candidates(BaseTable base) {
  std::vector<c10::OperatorHandle> candidates;
  if (base == BaseTable::torch) return candidates;
  const auto add = [&](std::string_view name) {
    for (auto& op : find_ops(name, "Policy::standard", /*missing_ok=*/true)) {
      if (why_not_castable(op.schema()).empty()) candidates.push_back(op);
    }
  };
  for (const StandardRow& row : standard_rows) {
    for (const std::string_view name : row.family) add(name);
  }
  for (const auto& [name, rules] : libtorch_cuda_lists()) add(name);
  return candidates;
}

}  // namespace torchamp::detail
