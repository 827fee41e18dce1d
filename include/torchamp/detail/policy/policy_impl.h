// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/catalog.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/edit.h"
#include "torchamp/detail/policy/resolve.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/ops.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY Policy Policy::standard() {
  return Policy(detail::unedited(detail::BaseTable::standard));
}

TORCHAMP_BODY Policy Policy::torch() {
  return Policy(detail::unedited(detail::BaseTable::torch));
}

TORCHAMP_BODY Policy& Policy::edit(Cast rule, const OpNames& ops, const When& when,
                                   std::shared_ptr<const detail::OpRule> op_rule) {
  data_ = detail::edited(data_, rule, ops, when, std::move(op_rule));
  return *this;
}

TORCHAMP_BODY Cast Policy::lookup(std::string_view op, at::DeviceType device) const {
  return common_rule("Policy::lookup", &detail::rule_in_force, op, device);
}

TORCHAMP_BODY Cast Policy::effect(std::string_view op, at::DeviceType device) const {
  return common_rule("Policy::effect", &detail::effect_of_rule, op, device);
}

TORCHAMP_BODY Cast Policy::common_rule(const char* call, RuleOf rule_of, std::string_view op,
                                       at::DeviceType device) const {
  (void)detail::device_index(device, call);
  const auto overloads = detail::find_ops(op, call);
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
    (listing += listing.empty() ? "" : ", ")
        .append(overload.operator_name().overload_name)
        .append(": ")
        .append(to_string(cast));
  }
  TORCH_CHECK(agree, call, ": the overloads of '", op, "' follow different rules (", listing,
              "). Name one, as '", op, ".", overloads.front().operator_name().overload_name, "'.");
  return common;
}

}  // namespace TORCHAMP_NAMESPACE
