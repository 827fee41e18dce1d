// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Policy: which ops run in which dtype.

#include <ATen/core/dispatch/Dispatcher.h>
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
class OpRule;
class PolicyData;
}  // namespace torchamp::detail

namespace TORCHAMP_NAMESPACE {

namespace detail {
/// What torchamp/fp8.h brings: see Note [Extras].
template <class AnyPolicy>
struct Fp8Extra {
  static_assert(sizeof(AnyPolicy) == 0,
                "torchamp: include torchamp/fp8.h, which has Policy::fp8 and its options.");
  using Options = When;
};
}  // namespace detail

/// A dtype policy table: which ops run in which precision inside an AutocastGuard.
///
/// A value: copying costs a reference count, an edit copies the contents first if they are shared,
/// and a guard keeps what it was given. Different threads may use copies freely.
///
///     auto policy = torchamp::Policy::standard().fp32("pow").lower_precision("mylib::attention");
///     torchamp::AutocastGuard autocast(torch::kCUDA, {.policy = policy});
///
/// Edits come in order: a later one replaces an earlier one for the same overload. A rule with a
/// condition (`When`) lies on top of what was there and leaves it in force where it does not hold;
/// an edit without one removes the conditional rules below it.
class Policy {
 public:
  /// fp16 (or bf16) for matmul, conv and linear ops, fp32 for additions, reductions and
  /// binary_cross_entropy (see Note [Binary cross entropy]), LibTorch's own kernels for the rest;
  /// where a device lacks a kernel for an op on LibTorch's CUDA lists, that list's rule. Calls that
  /// LibTorch would refuse for their dtypes are cast so that it takes them, as far as
  /// Note [What LibTorch refuses] goes; other in-place and out= forms are left alone. Sums of
  /// gradients that autograd makes keep their dtype: see Note [Sums of gradients].
  /// On a CPU without LSTMs in the region's dtype (oneDNN's bf16 ones take avx512), LSTMs, GRUs and
  /// RNNs run in fp32, with one warning.
  static Policy standard();

  /// LibTorch's own lists for each device, bit for bit.
  static Policy torch();

  /// Lets the named ops follow a rule from now on, always or when `when` holds. A name without
  /// overload means those of its overloads that can be cast, for a rule that casts. Running
  /// statistics of norms are updated as without a cast, which never narrows them: see
  /// Note [Casts of running statistics].
  ///
  /// Errors, each leaving the policy as it was and naming the edit (`Policy::fp32`): a name that
  /// LibTorch does not know (with the nearest known one); for the rules that cast, an op that
  /// cannot be cast (with the reason); a dtype in `when` that no region has; Cast::fp8 in a program
  /// none of whose source files includes torchamp/fp8.h.
  Policy& set(Cast rule, const OpNames& ops, const When& when = {}) {
    return edit(rule, ops, when);
  }

  /// The named ops take their arguments in the region's dtype. As set().
  Policy& lower_precision(const OpNames& ops, const When& when = {}) {
    return edit(Cast::lower_precision, ops, when);
  }
  /// The named ops take their arguments in fp32. As set().
  Policy& fp32(const OpNames& ops, const When& when = {}) { return edit(Cast::fp32, ops, when); }
  /// The named ops take their arguments in the widest dtype among them. As set().
  Policy& promote(const OpNames& ops, const When& when = {}) {
    return edit(Cast::promote, ops, when);
  }
  /// The named ops run in the dtypes that they are given, and so do the ops that they call. As
  /// set().
  Policy& unchanged(const OpNames& ops, const When& when = {}) {
    return edit(Cast::unchanged, ops, when);
  }
  /// The named ops go back to LibTorch's own rule for the device. As set().
  Policy& native(const OpNames& ops, const When& when = {}) {
    return edit(Cast::native, ops, when);
  }

  /// The named products run in fp8 (needs torchamp/fp8.h, which has Fp8Options): their factors
  /// become 8-bit numbers at scales of this very call, and so does the gradient that arrives in
  /// backward; the result has the region's dtype. The ops are `linear`, `addmm`, `mm` and `matmul`
  /// (ops::dense), with a matrix as their second factor.
  ///
  ///     auto policy = torchamp::Policy::standard().fp8(torchamp::ops::dense);
  ///
  /// On GPUs with fp8 units the products are made by these; on a CPU they are rehearsed, with the
  /// same 8-bit operands and scales. Where a call cannot be in fp8 it runs as lower_precision,
  /// which a CastRecorder counts. An fp32 region is left alone. An inf or NaN in a factor makes NaN
  /// all of the result that its scale takes part in: under `tensorwise` and `nvfp4` the whole.
  /// There is no second derivative, which is an error when it is asked for. A region that ends
  /// without a single product in fp8 warns once, and names those that it has called. Never reads
  /// the device. Keeps no statistics from call to call; 8-bit forms of parameters are kept as casts
  /// of weights are (see AutocastOptions::cache).
  ///
  /// Errors: as set(), and any other op; at the guard (of a module's policy: at its
  /// forward), with `options.strict`, a device that cannot.
  template <class AnyPolicy = Policy>
  Policy& fp8(const OpNames& ops, const typename detail::Fp8Extra<AnyPolicy>::Options& options = {},
              const When& when = {}) {
    return edit(Cast::fp8, ops, when, detail::Fp8Extra<AnyPolicy>::rule(options));
  }

  /// The rule in force for one overload on one type of device, conditional rules left out.
  /// A name without overload is the overload without a name, else what all castable overloads have
  /// in common; if they differ, an error that lists them. An op on no list is `unchanged`. Where a
  /// CPU has recurrent layers in one 16-bit dtype only, the rule is that for the calling thread's
  /// autocast dtype; the first such question tries.
  Cast lookup(std::string_view op, at::DeviceType device) const;
  /// The rule in force on the type of `device`: see the other lookup().
  Cast lookup(std::string_view op, at::Device device) const { return lookup(op, device.type()); }

  /// What that rule does to the op's arguments: as lookup(), but where LibTorch's own kernel
  /// decides, what that kernel does: `linear` on a CPU is `native` for lookup() and
  /// `lower_precision` here. `native` is left where that is not known: a kernel that only throws,
  /// or one of a LibTorch that is newer than torchamp's list of a CPU's kernels.
  Cast effect(std::string_view op, at::DeviceType device) const;
  /// What the rule does on the type of `device`: see the other effect().
  Cast effect(std::string_view op, at::Device device) const { return effect(op, device.type()); }

  /// The contents, for the library's own headers.
  const std::shared_ptr<const detail::PolicyData>& data() const { return data_; }
  /// For the library's own headers: a policy with these contents.
  explicit Policy(std::shared_ptr<const detail::PolicyData> data) : data_(std::move(data)) {}

 private:
  Policy& edit(Cast rule, const OpNames& ops, const When& when,
               std::shared_ptr<const detail::OpRule> op_rule = nullptr);

  using RuleOf = Cast (*)(const detail::PolicyData&, const c10::OperatorHandle&, at::DeviceType);
  Cast common_rule(const char* call, RuleOf rule_of, std::string_view op,
                   at::DeviceType device) const;

  std::shared_ptr<const detail::PolicyData> data_;
};

namespace detail {
/// What torchamp/policy_text.h brings: see Note [Extras].
template <class AnyPolicy>
struct PolicyPrinter {
  static_assert(sizeof(AnyPolicy) == 0,
                "torchamp: include torchamp/policy_text.h, which prints policies.");
};
}  // namespace detail

/// Prints the table: the edits, then per rule the ops that follow it on a CPU and on CUDA; for
/// LibTorch's own kernels, what they do (see Policy::effect). Needs torchamp/policy_text.h.
template <std::same_as<Policy> AnyPolicy>
std::ostream& operator<<(std::ostream& out, const AnyPolicy& policy) {
  return detail::PolicyPrinter<AnyPolicy>::print(out, policy);
}

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/policy/policy-inl.h"  // IWYU pragma: export
#endif
