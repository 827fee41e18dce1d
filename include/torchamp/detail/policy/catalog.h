// SPDX-License-Identifier: BSD-3-Clause
// What LibTorch has registered and listed, and the rules that policies have for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/lists.h"
#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// ---- Ops ----------------------------------------------------------------------------------------

/// Handles of the overloads that `text` names, by their names. Without any: an error naming `call`,
/// the op and the nearest known name; or nothing, if `missing_ok`. Any thread.
std::vector<c10::OperatorHandle> find_ops(std::string_view text, std::string_view call,
                                          bool missing_ok = false);

/// Whether `type` is `Tensor`, `Tensor?`, `Tensor[]`, `Tensor[]?` or `Tensor?[]`.
bool holds_tensors(const c10::Type& type);

/// Whether `argument` is `ScalarType dtype`, or, if `optional`, `ScalarType? dtype`.
bool is_dtype(const c10::Argument& argument, bool optional);

/// Whether the op takes named dimensions, which newer LibTorchs do not have. It can be covered, as
/// LibTorch boxes names as strings, but the table does not cast it.
bool takes_named_dimensions(const c10::FunctionSchema& schema);

/// Calls `function` with each tensor that an argument or result of an op holds (`Tensor`,
/// `Tensor[]`, `Tensor?[]`), undefined ones included.
template <class Function>
void for_each_tensor_of(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) function(element.toTensor());
    }
  }
}

/// Whether an op updates the argument without saying so: see
/// Note [Ops that write to what they do not declare].
bool is_running_statistic(const c10::Argument& argument);

/// Why the tensor arguments of an op cannot be cast; empty if they can.
std::string_view why_not_castable(const c10::FunctionSchema& schema);

/// Whether there is a kernel for the op under a device's autocast key.
bool has_autocast_kernel(const c10::OperatorHandle& op, at::DeviceType device);

/// Whether LibTorch itself has an autocast kernel for the op and device, overlays left out of
/// account.
bool has_native_kernel(const c10::OperatorHandle& op, at::DeviceType device);

// ---- Lists --------------------------------------------------------------------------------------

/// Whether the family has the op, whatever its overload.
bool contains(const OpFamily& family, const c10::OperatorName& op);

/// The row of an op, by its own name or else its overload's, whether it is for a device or not;
/// null if it has none.
const StandardRow* standard_row(const c10::OperatorName& op);

/// The rule on LibTorch's own CUDA lists; native if there is none.
Cast listed_cast(const c10::OperatorName& op);

/// What LibTorch's own autocast kernel for the device, which must be there, does; native if this is
/// not known.
Cast kernel_rule(const c10::OperatorName& op, at::DeviceType device);

// ---- Rules --------------------------------------------------------------------------------------

/// The rule in force for one overload in regions of the dtype that the calling thread has for the
/// device, conditional rules left out.
Cast rule_in_force(const PolicyData& policy, const c10::OperatorHandle& op, at::DeviceType device);

/// What that rule does, where LibTorch's own kernel decides what this does; native if that is not
/// known.
Cast effect_of_rule(const PolicyData& policy, const c10::OperatorHandle& op, at::DeviceType device);

/// An overload, and what Policy::standard() says of it; native if nothing, or if the overload
/// cannot be cast.
struct TabledOp {
  c10::OperatorHandle op;
  StandardRule standard;

  explicit TabledOp(const c10::OperatorHandle& overload);
  TabledOp(const c10::OperatorHandle& overload, const StandardRule& rule);
};

/// What the overlay of an op has to do under `policy`; native if LibTorch alone does it.
OverlayEntry overlay_entry(const PolicyData& policy, const TabledOp& op, at::DeviceType device);

/// The ops that a policy speaks of, LibTorch's kernels aside. Some come more than once.
std::vector<TabledOp> candidates(const PolicyData& policy);

/// Adds an edit: see Policy::set. Where it throws, `policy` is as it was. `op_rule`: of the rule
/// fp8, whose own by default.
void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
              std::shared_ptr<const OpRule> op_rule = nullptr);

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/policy/policy-inl.h"  // IWYU pragma: export
#endif
