// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/add.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/detail/fp8/function.h"
#include "torchamp/detail/fp8/product.h"
#include "torchamp/detail/fp8/text.h"
#include "torchamp/detail/fp8/usage.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/detail/weights/store.h"
#include "torchamp/fp8_options.h"
#include "torchamp/ops.h"

namespace torchamp::detail {

/// A call of one of the ops that can be in fp8: result = beta * added + alpha * x w^T.
struct Fp8Call {
  at::Tensor x, w, added;  // `added` may be undefined
  bool w_is_transposed;
  c10::Scalar beta = 1, alpha = 1;

  static Fp8Call of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const std::string& name = op.operator_name().name;
    const auto argument = [&](std::size_t i) -> const c10::IValue& {
      return stack[stack.size() - op.schema().arguments().size() + i];
    };
    if (name == "aten::addmm") {
      return {argument(1).toTensor(), argument(2).toTensor(), argument(0).toTensor(), true,
              argument(3).toScalar(), argument(4).toScalar()};
    }
    if (name == "aten::linear") {
      return {argument(0).toTensor(), argument(1).toTensor(),
              argument(2).isTensor() ? argument(2).toTensor() : at::Tensor(), false};
    }
    return {argument(0).toTensor(), argument(1).toTensor(), at::Tensor(), true};
  }

  /// K and N of the product.
  int64_t contraction() const { return w.size(w_is_transposed ? 0 : 1); }
  int64_t columns() const { return w.size(w_is_transposed ? 1 : 0); }
};

/// Why products of the recipe cannot be in regions of a dtype on a device; empty if they can.
inline std::string_view why_not_fp8_in(const Fp8Options& options, at::DeviceType device,
                                       at::ScalarType dtype) {
  const bool refuses =
      options.recipe == Fp8Recipe::rowwise && dtype == at::kHalf && device != at::kCPU;
  return refuses ? "rowwise products of a GPU are in bf16 only" : "";
}

/// Whether autocast casts the tensor, and the kernels of fp8 take it.
inline bool can_be_in_fp8(const at::Tensor& tensor, at::DeviceType device) {
  const at::ScalarType dtype = tensor.scalar_type();
  return (dtype == at::kFloat || is_16_bit(dtype)) && at::autocast::is_eligible(tensor, device);
}

/// Whether the tensor fits what is added to a result of `x` and `columns`: from the last dimension
/// on, its sizes are the result's or 1.
inline bool can_be_added(const at::Tensor& tensor, const at::Tensor& x, int64_t columns) {
  if (tensor.dim() > x.dim()) return false;
  for (int64_t d = 1; d <= tensor.dim(); ++d) {
    const int64_t size = tensor.size(-d);
    if (size != 1 && size != (d == 1 ? columns : x.size(-d))) return false;
  }
  return true;
}

/// Why a call cannot be in fp8; empty if it can. What does not fit together is left to LibTorch,
/// whose op then says so.
inline std::string why_not_in_fp8(const Fp8Options& options, const Fp8Call& call,
                                  at::DeviceType device, at::ScalarType dtype) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) return "the region is not in 16 bits";
  for (const at::Tensor& tensor : {call.x, call.w}) {
    if (!tensor.defined() || !can_be_in_fp8(tensor, device)) {
      return "a factor is not in fp32 or 16 bits on the region's device";
    }
    if (tensor.layout() != at::kStrided || tensor.is_nested()) return "a factor is not dense";
    if (tensor._fw_grad(0).defined()) return "a factor has a forward-mode gradient";
  }
  if (call.w.dim() != 2) {
    return "the second factor has " + std::to_string(call.w.dim()) + " dimensions";
  }
  if (call.x.dim() == 0 || call.x.size(-1) != call.contraction()) return "sizes do not fit";
  if (call.added.defined()) {
    if (!can_be_in_fp8(call.added, device)) return "what is added is not in fp32 or 16 bits";
    if (!can_be_added(call.added, call.x, call.columns())) return "sizes do not fit";
  }
  if (const std::string_view why = why_not_fp8_in(options, device, dtype); !why.empty()) {
    return std::string(why);
  }
  if (!options.only_worthwhile) return {};
  const int64_t k = call.contraction();
  const int64_t n = call.columns();
  if (k % 16 != 0 || n % 16 != 0) return "not worthwhile: K or N is not a multiple of 16";
  if (k <= 4096 && n <= 1024) return "not worthwhile: K is at most 4096 and N at most 1024";
  return {};
}

/// OpRule::run.
inline std::string run_fp8(const Fp8Options& options, const c10::OperatorHandle& op,
                           at::DeviceType device, torch::jit::Stack& stack) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  Fp8Call call = Fp8Call::of(op, stack);
  std::string why = why_not_in_fp8(options, call, device, dtype);
  if (!why.empty()) return why;
  if (op.operator_name().name != "aten::linear" && op.operator_name().name != "aten::matmul" &&
      call.x.dim() != 2) {
    return "sizes do not fit";
  }
  at::Tensor result = fp8_linear(options, call.x, call.w, call.w_is_transposed, dtype);
  if (!call.alpha.equal(1)) result = result.mul(call.alpha);
  if (call.added.defined() && !call.beta.equal(0)) {
    const at::Tensor added = at::autocast::cached_cast(dtype, call.added, device);
    result = at::add(result, added, call.beta);
  }
  torch::jit::drop(stack, op.schema().arguments().size());
  torch::jit::push(stack, std::move(result));
  return {};
}

/// The rule of Cast::fp8: see Policy::fp8.
class Fp8Rule final : public OpRule {
 public:
  explicit Fp8Rule(const Fp8Options& options) : options_(options) {}

  std::string run(const c10::OperatorHandle& op, at::DeviceType device,
                  torch::jit::Stack& stack) const override {
    return run_fp8(options_, op, device, stack);
  }

  std::string why_not_op(std::string_view full_name) const override {
    for (const std::string_view name : ops::dense) {
      if (full_name == "aten::" + std::string(name)) return {};
    }
    return "only linear, addmm, mm and matmul can (ops::dense)";
  }

  std::string why_not_on(at::DeviceType device) const override {
    (void)derived_weights();  // there before the first region with this rule begins
    return why_no_fp8_product(options_, device);
  }

  std::string why_not_in(at::DeviceType device, at::ScalarType dtype) const override {
    return std::string(why_not_fp8_in(options_, device, dtype));
  }

  bool is_strict() const override { return options_.strict; }

  std::string text() const override { return fp8_text(options_); }

  std::shared_ptr<OpRuleUsage> make_usage(
      const std::shared_ptr<OpRuleUsage>& outer) const override {
    return std::make_shared<Fp8Usage>(outer);
  }

 private:
  Fp8Options options_;
};

/// A ParseFp8Rule.
inline std::shared_ptr<const OpRule> parse_fp8_rule(const std::string& options) {
  return std::make_shared<Fp8Rule>(parse_fp8_options(options));
}

}  // namespace torchamp::detail
