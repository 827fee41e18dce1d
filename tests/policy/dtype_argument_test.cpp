// SPDX-License-Identifier: BSD-3-Clause
// Every op with an optional `dtype` argument, as the running LibTorch declares them: under the rule
// fp32 the result and the gradient equal the result and the gradient of the same numbers in fp64.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "torchamp/autocast.h"
#include "torchamp/policy.h"

namespace {

using at::Tensor;
using torchamp::AutocastGuard;
using torchamp::Policy;
using Arguments = std::vector<c10::IValue>;

struct Call {
  c10::OperatorHandle op;
  c10::IValue order;                         // of a norm; a number or a string
  std::optional<at::ScalarType> dtype = {};  // that the caller gives
};

bool is_optional_dtype(const c10::Argument& argument) {
  return argument.name() == "dtype" && argument.real_type()->str() == "ScalarType?";
}

/// One value for each argument: the tensor, the order, dimension 1, and the defaults.
std::optional<Arguments> arguments(const Call& call, const Tensor& x) {
  Arguments stack;
  for (const c10::Argument& argument : call.op.schema().arguments()) {
    const std::string type = argument.real_type()->str();
    const std::string& name = argument.name();
    if (type == "Tensor") {
      stack.emplace_back(x);
    } else if (type == "Tensor[]") {
      stack.emplace_back(std::vector<Tensor>{x});
    } else if (is_optional_dtype(argument)) {
      stack.emplace_back(call.dtype ? c10::IValue(static_cast<std::int64_t>(*call.dtype))
                                    : c10::IValue());
    } else if (name == "ord" || name == "p") {
      stack.push_back(call.order);
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
    } else if (name == "dim" && type == "int") {
      stack.emplace_back(1);
    } else if (name == "dim") {
      stack.emplace_back(std::vector<std::int64_t>{1});
    } else if (type == "bool") {
      stack.emplace_back(false);
    } else {
      return std::nullopt;
    }
  }
  return stack;
}

struct ValueAndGradient {
  Tensor result, gradient;
};

/// Nothing if the op cannot be called so, or has no gradient.
std::optional<ValueAndGradient> outcome(const Call& call, const Tensor& numbers,
                                        std::optional<AutocastGuard>* guard = nullptr) {
  const Tensor x = numbers.detach().clone().requires_grad_();
  std::optional<Arguments> stack = arguments(call, x);
  if (!stack) return std::nullopt;
  call.op.callBoxed(*stack);
  if (guard != nullptr) guard->reset();
  const c10::IValue& value = stack->front();
  const Tensor result = value.isTensorList() ? value.toTensorVector().front() : value.toTensor();
  if (!result.requires_grad() || result.layout() != at::kStrided || result.is_nested())
    return std::nullopt;
  const Tensor weights = at::linspace(1, 2, result.numel(), at::kDouble).view_as(result);
  const auto gradients = torch::autograd::grad({result}, {x}, {weights.to(result.scalar_type())},
                                               {}, false, /*allow_unused=*/true);
  if (!gradients.front().defined()) return std::nullopt;
  return ValueAndGradient{result.detach(), gradients.front()};
}

std::optional<ValueAndGradient> in_fp64(Call call, const Tensor& numbers) {
  if (call.dtype) call.dtype = at::kDouble;
  try {
    return outcome(call, numbers.to(at::kDouble));
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

/// The relative error in the largest number of `exact`; 0 if `value`'s dtype cannot hold that.
double error(const Tensor& value, const Tensor& exact, at::ScalarType region) {
  const double size = exact.abs().max().item<double>();
  const double largest = value.scalar_type() == at::kHalf ? 65504 : 3e38;
  const double smallest = region == at::kHalf ? 0x1p-11 : 1e-30;
  if (!(size < largest) || size < smallest) return 0;
  const double off = (value.to(at::kDouble) - exact).abs().max().item<double>();
  return std::isnan(off) ? std::numeric_limits<double>::infinity() : off / size;
}

std::string text(const Call& call) {
  std::string text = c10::toString(call.op.operator_name());
  if (call.order.isString()) text += ", order " + call.order.toStringRef();
  if (call.order.isScalar()) text += ", order " + std::to_string(call.order.toScalar().toDouble());
  if (call.dtype) text += std::string(", dtype ") + c10::toString(*call.dtype);
  return text;
}

/// False if the op cannot be called so in fp64.
bool expect_as_in_fp64(const Call& call, const Tensor& numbers, const Policy& policy) {
  const at::ScalarType region = numbers.scalar_type();
  const std::optional<ValueAndGradient> exact = in_fp64(call, numbers);
  if (!exact) return false;
  try {
    std::optional<AutocastGuard> guard;
    guard.emplace(at::kCPU, torchamp::AutocastOptions{.dtype = region, .policy = policy});
    const std::optional<ValueAndGradient> ours = outcome(call, numbers, &guard);
    const double tolerance = region == at::kHalf ? 0.0015 : 0.012;
    EXPECT_TRUE(ours.has_value()) << text(call);
    if (!ours) return true;
    EXPECT_LE(error(ours->result, exact->result, region), tolerance) << text(call) << numbers;
    EXPECT_LE(error(ours->gradient, exact->gradient, region), tolerance)
        << "the gradient of " << text(call) << "\n"
        << ours->gradient << exact->gradient;
    EXPECT_EQ(ours->result.scalar_type(), call.dtype.value_or(at::kFloat)) << text(call);
  } catch (const c10::Error& error) {
    ADD_FAILURE() << text(call) << " in " << region << ": " << error.what_without_backtrace();
  }
  return true;
}

Tensor numbers(at::IntArrayRef shape, at::ScalarType dtype, double scale) {
  const Tensor cells = at::arange(c10::multiply_integers(shape), at::kDouble);
  return ((cells * 7 % 11 / 11 + 0.5) * scale * (1 - 2 * (cells % 3 == 1).to(at::kDouble)))
      .view(shape)
      .to(dtype);
}

/// The policy under which the rule fp32 decides of the op; nothing if it cannot be cast.
std::optional<Policy> policy_of(const std::string& op) {
  try {
    return Policy::standard().fp32(op);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

TEST(DtypeArgument, EveryOpThatHasOneComputesResultAndGradientInFp32) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<c10::IValue> orders{0.,  0.5, 1.,  1.5,  2.,    3.,   4.,
                                        -1., -2., inf, -inf, "fro", "nuc"};
  std::set<std::string> called;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !name.name.starts_with("aten::")) continue;
    const auto& schema_arguments = op->schema().arguments();
    if (std::none_of(schema_arguments.begin(), schema_arguments.end(), is_optional_dtype)) continue;
    const std::string op_name = c10::toString(name);
    const std::optional<Policy> edited = policy_of(op_name);
    if (!edited) continue;
    const bool has_order =
        std::any_of(schema_arguments.begin(), schema_arguments.end(),
                    [](const auto& one) { return one.name() == "ord" || one.name() == "p"; });
    for (const c10::IValue& order : has_order ? orders : std::vector<c10::IValue>{{}}) {
      for (const auto given : {std::optional<at::ScalarType>(), std::optional(at::kFloat),
                               std::optional(at::kDouble)}) {
        for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
          for (const double scale : {300., 0.7, 1e-4}) {
            for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{2, 4}, {5}}) {
              const Call call{*op, order, given};
              const Tensor x = numbers(shape, dtype, scale);
              if (!expect_as_in_fp64(call, x, *edited)) continue;
              called.insert(op_name);
              if (Policy::standard().lookup(op_name, at::kCPU) == torchamp::Cast::fp32) {
                expect_as_in_fp64(call, x, Policy::standard());
              }
            }
          }
        }
      }
    }
  }
  for (const char* op : {"sum", "sum.dim_IntList", "nansum", "mean", "mean.dim", "prod", "cumsum",
                         "cumprod", "softmax.int", "log_softmax.int", "linalg_norm",
                         "linalg_norm.ord_str", "linalg_vector_norm", "linalg_matrix_norm",
                         "linalg_matrix_norm.str_ord", "_safe_softmax", "_foreach_norm.Scalar"}) {
    EXPECT_TRUE(called.contains("aten::" + std::string(op))) << op;
  }
}

TEST(DtypeArgument, ACallThatAsksFor16BitsGetsThem) {
  const Tensor x = numbers({2, 4}, at::kHalf, 1);
  const AutocastGuard guard(at::kCPU, at::kHalf);
  EXPECT_EQ(at::linalg_vector_norm(x, 3, at::OptionalIntArrayRef(), false, at::kHalf).scalar_type(),
            at::kHalf);
  EXPECT_EQ(at::sum(x, at::kHalf).scalar_type(), at::kHalf);
}

}  // namespace
