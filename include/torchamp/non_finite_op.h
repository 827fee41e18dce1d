// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Which op made the first inf or NaN.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

#include "torchamp/detail/observe/report.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// The first op that made an inf or a NaN, as first_non_finite_op() found it.
struct NonFiniteOp {
  std::string op;  ///< as dispatched: `aten::addmm`, with its overload if it has one
  /// Whether backward called it.
  bool in_backward = false;
  std::string node;        ///< in backward: the autograd node, `AddmmBackward0`
  std::string forward_op;  ///< in backward: the op whose gradient it computes
  /// Parameters among the inputs of the op (in backward: of forward_op), views of them included.
  std::vector<std::string> parameters;
  /// False: what came in was inf or NaN already, and no op had made it: the input data or a
  /// parameter. (Infs that the program asked for, of which the op made NaNs, do not count.)
  bool inputs_were_finite = true;
  /// Dtype, shape and largest absolute value of each tensor; of one that came in with infs or NaNs
  /// how many, and its name if it is a parameter.
  std::vector<std::string> inputs;
  at::ScalarType dtype = at::kFloat;  ///< of the output
  int64_t infs = 0;                   ///< in the output
  int64_t nans = 0;                   ///< in the output
  int64_t ops_before = 0;             ///< how many ops ran before it
};

namespace detail {
std::optional<NonFiniteOp> find_non_finite_op(const std::function<void()>& forward_and_backward,
                                              const NamedParameters& named);
}

/// Runs `forward_and_backward` once more, looking at what each op makes, and names the first op
/// that makes an inf or a NaN of finite inputs; nothing if there is none. For after a skipped step,
/// with the same batch and the same scale:
///
///     auto replay = [&] {
///       torchamp::AutocastGuard autocast(torch::kCUDA);
///       scaler.scale(torch::mse_loss(model->forward(data), target)).backward();
///     };
///     if (auto op = torchamp::first_non_finite_op(replay, model)) std::cout << *op;
///
/// Ops are those that the program calls, not those that these call in turn. Infs that the program
/// asks for (a mask filled with -inf) and uninitialised memory are not counted. What was inf or NaN
/// before the run (a mask, the data, a parameter) counts if a gradient is made of it, or without
/// backward() a result; a mask that ends in a softmax does not. Reads the device several times for
/// each op, so it is slow; gradients accumulate as `forward_and_backward` has it.
/// Ops of threads other than the caller's and autograd's are not looked at, nor are nested tensors
/// and dtypes that LibTorch has no functions for, such as fp4.
///
/// Errors: whatever `forward_and_backward` throws; an empty function; an owner that is a null
/// pointer or an empty holder.
///
/// Parameters are named after `owner`: a module or an optimizer, given itself, by a pointer of any
/// kind or by a module holder; or a range of pairs of a name and a parameter. nullptr for none.
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

#include "torchamp/detail/observe/non_finite_op-inl.h"  // IWYU pragma: export
