// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. Policy: which ops run in which dtype.

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <concepts>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace torchamp::detail {
class PolicyData;
}  // namespace torchamp::detail

namespace TORCHAMP_NAMESPACE {

/// The table that decides which ops run in which dtype inside an AutocastGuard.
///
/// A value: a copy costs a reference count, an edit first copies shared contents, and a guard keeps
/// the policy that it was given. Threads may use copies concurrently.
///
///     auto policy = torchamp::Policy::standard().fp32("pow").lower_precision("mylib::attention");
///     torchamp::AutocastGuard autocast(torch::kCUDA, {.policy = policy});
///
/// Edits apply in order: a later one replaces an earlier one for the same overload. A rule with a
/// condition (`When`) leaves the rules below it in force where it does not hold; a rule without one
/// removes the conditional rules below it.
class Policy {
 public:
  /// fp16 (or bf16) for matmul, conv and linear ops; fp32 for additions, reductions, sums over
  /// indices and windows (see Note [Sums in 16 bits]) and binary_cross_entropy (see
  /// Note [Binary cross entropy]); LibTorch's own kernels for the rest, and where a device lacks a
  /// kernel for an op on LibTorch's CUDA lists, the rule of that list.
  /// Calls that LibTorch would reject for their dtypes are cast as Note [What LibTorch refuses]
  /// says; other in-place and out= forms are unchanged. Sums of gradients that autograd makes keep
  /// their dtype: see Note [Sums of gradients].
  static Policy standard();

  /// LibTorch's own lists for each device, exactly.
  static Policy torch();

  /// Sets the rule of the named ops, always or when `when` holds. A name without overload means all
  /// its overloads; with a rule that casts, those that can be cast. Running statistics of norms are
  /// updated as without a cast, which never narrows them: see Note [Casts of running statistics].
  ///
  /// Errors, which leave the policy unchanged and name the edit (`Policy::fp32`): a name that
  /// LibTorch does not know (with the nearest known one); for a rule that casts, an op that cannot
  /// be cast (with the reason); a dtype in `when` that no region has; Cast::fp8 in a program that
  /// does not include torchamp/labs/fp8.h.
  Policy& set(Cast rule, const OpNames& ops, const When& when = {}) {
    return edit(rule, ops, when);
  }

  /// Casts arguments to the region's dtype. Errors: set()'s.
  Policy& lower_precision(const OpNames& ops, const When& when = {}) {
    return edit(Cast::lower_precision, ops, when);
  }
  /// Casts arguments to fp32. Errors: set()'s.
  Policy& fp32(const OpNames& ops, const When& when = {}) { return edit(Cast::fp32, ops, when); }
  /// Casts arguments to the widest dtype among them; an op in place gets what it reads in the dtype
  /// of what it writes to. Errors: set()'s.
  Policy& promote(const OpNames& ops, const When& when = {}) {
    return edit(Cast::promote, ops, when);
  }
  /// Casts nothing, neither for these ops nor for the ops that they call. Errors: set()'s.
  Policy& unchanged(const OpNames& ops, const When& when = {}) {
    return edit(Cast::unchanged, ops, when);
  }
  /// Restores LibTorch's own rule for the device. Errors: set()'s.
  Policy& native(const OpNames& ops, const When& when = {}) {
    return edit(Cast::native, ops, when);
  }

  /// The rule of one overload on one type of device, without conditional rules. A name without
  /// overload means the overload without a name, or else all castable overloads, if they have one
  /// rule; otherwise an error lists them. An op on no list is `unchanged`.
  Cast lookup(std::string_view op, at::DeviceType device) const {
    return common_rule("Policy::lookup", op, device, /*in_effect=*/false);
  }
  /// The rule on the type of `device`.
  Cast lookup(std::string_view op, at::Device device) const { return lookup(op, device.type()); }

  /// What that rule does to the op's arguments: like lookup(), but `native` is resolved to the
  /// kernel's actual behaviour: `linear` on a CPU is `native` for lookup() and `lower_precision`
  /// here. `native` remains where that is not known: for a kernel that only throws, or one of a
  /// LibTorch newer than torchamp's list of CPU kernels.
  Cast effect(std::string_view op, at::DeviceType device) const {
    return common_rule("Policy::effect", op, device, /*in_effect=*/true);
  }
  /// The effect on the type of `device`.
  Cast effect(std::string_view op, at::Device device) const { return effect(op, device.type()); }

  /// For the library's own headers: the contents.
  const std::shared_ptr<const detail::PolicyData>& data() const { return data_; }
  /// For the library's own headers: a policy with these contents.
  explicit Policy(std::shared_ptr<const detail::PolicyData> data) : data_(std::move(data)) {}

 private:
  Policy& edit(Cast rule, const OpNames& ops, const When& when);

  Cast common_rule(const char* call, std::string_view op, at::DeviceType device,
                   bool in_effect) const;

  std::shared_ptr<const detail::PolicyData> data_;
};

namespace detail {
/// What torchamp/policy_text.h adds: see .github/CONTRIBUTING.md, An extra.
template <class AnyPolicy>
struct PolicyPrinter {
  static_assert(sizeof(AnyPolicy) == 0,
                "torchamp: include torchamp/policy_text.h to print policies.");
};
}  // namespace detail

/// Prints the table: the edits, then per rule the ops that follow it on a CPU and on CUDA, with the
/// effect of LibTorch's own kernels (see Policy::effect). Needs torchamp/policy_text.h.
template <std::same_as<Policy> AnyPolicy>
std::ostream& operator<<(std::ostream& out, const AnyPolicy& policy) {
  return detail::PolicyPrinter<AnyPolicy>::print(out, policy);
}

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/core/policy/policy-inl.h"  // IWYU pragma: export
#endif
