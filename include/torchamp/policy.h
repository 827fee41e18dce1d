// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. Policy: which ops run in which dtype.

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {
class PolicyData;
}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

/// The table that decides which ops run in which dtype inside an AutocastGuard. To print it,
/// include torchamp/policy_text.h.
///
/// A value: a copy costs a reference count, and an edit first copies shared contents. Later edits
/// do not change the policy of an existing guard. Threads may use copies concurrently.
///
///     auto policy = torchamp::Policy::standard().fp32("pow").lower_precision("mylib::attention");
///     torchamp::AutocastGuard autocast(torch::kCUDA, {.policy = policy});
///
/// Edits apply in order: a later edit replaces an earlier edit of the same overload. Exception: an
/// edit with a condition (`When`) keeps the earlier rules, which apply if the condition does not
/// hold. An edit without a condition removes all earlier rules of the overload.
class Policy {
 public:
  /// fp16 (or bf16) for matmul, conv and linear ops; fp32 for additions, reductions, sums over
  /// indices and windows (see Note [Sums in 16 bits]) and binary_cross_entropy (see
  /// Note [Binary cross entropy]). Other ops keep LibTorch's own kernels. If LibTorch has
  /// no autocast kernel for an op on a device, but the op is on one of LibTorch's CUDA lists, the
  /// op has the rule of that list. If LibTorch would reject a call because of its dtypes, the
  /// arguments are cast: see Note [What LibTorch refuses]. In-place and out= calls are cast only if
  /// LibTorch would reject them. If autograd adds gradients, the sum keeps their dtype:
  /// see Note [Sums of gradients].
  static Policy standard();

  /// LibTorch's own lists for each device, exactly.
  static Policy torch();

  /// Sets the rule of the named ops, always or if `when` holds. A name without overload means all
  /// overloads; with a rule that casts, all overloads that can be cast. Running statistics of norms
  /// keep their precision, because a cast never narrows them: see
  /// Note [Casts of running statistics].
  ///
  /// Errors, which leave the policy unchanged and name the edit (`Policy::fp32`): an op that
  /// LibTorch does not have (the error suggests the nearest name); for a rule that casts, an op
  /// that cannot be cast (with the reason); a condition in `when` that can never hold; Cast::fp8 in
  /// a program that does not include torchamp/labs/fp8.h.
  Policy& set(Cast rule, const OpNames& ops, const When& when = {}) {
    return edit(rule, ops, when);
  }

  /// Casts arguments to the region's dtype. Errors: as set().
  Policy& lower_precision(const OpNames& ops, const When& when = {}) {
    return edit(Cast::lower_precision, ops, when);
  }
  /// Casts arguments to fp32. Errors: as set().
  Policy& fp32(const OpNames& ops, const When& when = {}) { return edit(Cast::fp32, ops, when); }
  /// Casts arguments to the widest dtype among them. An op in place casts the arguments that it
  /// reads to the dtype of the tensor that it writes. Errors: as set().
  Policy& promote(const OpNames& ops, const When& when = {}) {
    return edit(Cast::promote, ops, when);
  }
  /// Casts nothing, neither for these ops nor for the ops that they call. Errors: as set().
  Policy& unchanged(const OpNames& ops, const When& when = {}) {
    return edit(Cast::unchanged, ops, when);
  }
  /// Restores LibTorch's own rule for the device. Errors: as set().
  Policy& native(const OpNames& ops, const When& when = {}) {
    return edit(Cast::native, ops, when);
  }

  /// The rule of one overload on one type of device, without conditional rules. "softmax.int" names
  /// an overload; "matmul" names the overload without a name. If an op has none, like "softmax",
  /// its name means all overloads that can be cast. An op on no list gives `unchanged`, but unlike
  /// after an edit the ops that it calls are cast by their own rules. Errors: an op that LibTorch
  /// does not have; several overloads with different rules (the error lists them); a device type
  /// without autocast.
  Cast lookup(std::string_view op, at::DeviceType device) const {
    return common_rule("Policy::lookup", op, device, /*in_effect=*/false);
  }
  /// The rule on the type of `device`.
  Cast lookup(std::string_view op, at::Device device) const { return lookup(op, device.type()); }

  /// What that rule does to the op's arguments. Like lookup(), but instead of `native` this returns
  /// what the kernel does: for `linear` on a CPU lookup() returns `native`, and effect() returns
  /// `lower_precision`. It returns `native` in two cases: the kernel only throws, or it is a CPU
  /// kernel of a LibTorch that is newer than torchamp's list.
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

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/core/policy/policy-inl.h"  // IWYU pragma: export
#endif
