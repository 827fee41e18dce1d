// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. first_non_finite_op: the op that computed the first inf or NaN.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// The first op that computed an inf or a NaN.
struct NonFiniteOp {
  std::string op;  ///< the dispatched op with its overload: `aten::mul.Tensor`
  /// Whether backward called it.
  bool in_backward = false;
  std::string node;        ///< in backward: the autograd node, `AddmmBackward0`
  std::string forward_op;  ///< in backward: the op whose gradient it computes
  /// Parameters, and views of parameters, among the inputs of the op (in backward: of forward_op).
  std::vector<std::string> parameters;
  /// False: an input (data or a parameter) already held an inf or a NaN. Infs that the program
  /// creates on purpose do not count.
  bool inputs_were_finite = true;
  /// Dtype, shape and largest absolute value of each tensor. For a tensor with infs or NaNs their
  /// number; for a parameter its name.
  std::vector<std::string> inputs;
  at::ScalarType dtype = at::kFloat;  ///< of the output
  int64_t infs = 0;                   ///< in the output
  int64_t nans = 0;                   ///< in the output
  int64_t ops_before = 0;             ///< ops that ran before it
};

namespace detail {
std::optional<NonFiniteOp> find_non_finite_op(const std::function<void()>& forward_and_backward,
                                              const NamedParameters& named);
}

/// Runs `forward_and_backward` again, checks each op's results, and returns the first op that
/// computes an inf or a NaN; nullopt if there is none. Call it after a skipped step, with the same
/// batch and the same scale:
///
///     auto replay = [&] {
///       torchamp::AutocastGuard autocast(torch::kCUDA);
///       scaler.scale(torch::mse_loss(model->forward(data), target)).backward();
///     };
///     if (auto op = torchamp::first_non_finite_op(replay, model)) std::cout << *op;
///
/// Only ops that the program calls count; ops inside these ops do not. Infs that the program
/// creates on purpose (a mask filled with -inf) and uninitialised memory do not count.
///
/// The data, a mask or a parameter may hold infs or NaNs before the run. The op that reads them is
/// returned only if they reach a gradient (without backward(): a result). For example, a mask of
/// -inf that ends in a softmax reaches none.
///
/// Synchronises several times per op, so it is slow. The backward() in
/// `forward_and_backward` adds to the gradients. Not checked: ops on threads other than the
/// caller's and autograd's, nested tensors, and dtypes for which LibTorch has no functions, such as
/// fp4.
///
/// Errors: exceptions of `forward_and_backward`; an empty function; an owner that is a null pointer
/// or an empty holder; more than 32 observers at once (see CastRecorder).
///
/// Parameters have their names in `owner`: a module or an optimizer, a pointer of any kind to one,
/// a module holder, or a range of pairs of a name and a parameter. Pass nullptr for no names.
template <class Owner = std::nullptr_t>
std::optional<NonFiniteOp> first_non_finite_op(const std::function<void()>& forward_and_backward,
                                               const Owner& owner = nullptr) {
  detail::NamedParameters named;
  if constexpr (!std::is_null_pointer_v<Owner>) {
    named = detail::named_parameters_of(owner, "first_non_finite_op");
  }
  return detail::find_non_finite_op(forward_and_backward, named);
}

/// `aten::mul.Tensor in backward (MulBackward0, of aten::addmm on fc1.weight) made 3 inf, 0 NaN in
/// Half of Half [64, 32] up to 3.2e+04, …`
std::ostream& operator<<(std::ostream& out, const NonFiniteOp& found);

}  // namespace TORCHAMP_NAMESPACE

#if TORCHAMP_BODIES
#include "torchamp/detail/extras/observe/non_finite_op-inl.h"  // IWYU pragma: export
#endif
