// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/policy.h"

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY Policy Policy::standard() {
  return Policy(detail::unedited(detail::BaseTable::standard));
}

TORCHAMP_BODY Policy Policy::torch() {
  return Policy(detail::unedited(detail::BaseTable::torch));
}

TORCHAMP_BODY Policy& Policy::edit(Cast rule, const OpNames& ops, const When& when) {
  auto edited = std::make_shared<detail::PolicyData>(*data_);
  detail::add_edit(*edited, rule, ops, when);
  if (edited->edits.size() != data_->edits.size()) data_ = std::move(edited);
  return *this;
}

TORCHAMP_BODY Cast Policy::common_rule(const char* call, std::string_view op, at::DeviceType device,
                                       bool in_effect) const {
  (void)detail::device_index(device, call);
  const auto overloads = detail::find_ops(op, call);
  const auto rule_of = in_effect ? &detail::lookup_effect : &detail::lookup_rule;
  if (overloads.front().operator_name().overload_name.empty() || overloads.size() == 1) {
    return rule_of(*data_, overloads.front(), device);
  }
  Cast common = Cast::unchanged;
  std::string listing;
  bool agree = true;
  for (const auto& overload : overloads) {
    if (!detail::why_not_castable(overload.schema()).empty()) continue;
    const Cast cast = rule_of(*data_, overload, device);
    agree = agree && (listing.empty() || common == cast);
    common = cast;
    listing += detail::joined({listing.empty() ? "" : ", ", overload.operator_name().overload_name,
                               ": ", to_string(cast)});
  }
  TORCHAMP_CHECK(agree, call, ": the overloads of '", op, "' follow different rules (", listing,
                 "). Name one, as '", op, ".", overloads.front().operator_name().overload_name,
                 "'.");
  return common;
}

}  // namespace TORCHAMP_NAMESPACE
