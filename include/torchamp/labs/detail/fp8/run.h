// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/add.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/detail/core/autocast/autocast_kernel.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/weights/derived.h"
#include "torchamp/labs/detail/fp8/function.h"
#include "torchamp/labs/fp8_options.h"
#include "torchamp/ops.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A recipe's name in texts.
struct Fp8RecipeRow {
  Fp8Recipe recipe;
  std::string_view name;
};

inline constexpr Fp8RecipeRow fp8_recipes[] = {
    {Fp8Recipe::tensorwise, "tensorwise"}, {Fp8Recipe::rowwise, "rowwise"},
    {Fp8Recipe::blockwise, "blockwise"},   {Fp8Recipe::mxfp8, "mxfp8"},
    {Fp8Recipe::nvfp4, "nvfp4"},
};

/// OpRule::text.
inline std::string fp8_text(const Fp8Options& options) {
  std::string text;
  const auto add = [&](std::string_view piece) { (text += text.empty() ? "" : " ") += piece; };
  for (const Fp8RecipeRow& row : fp8_recipes) {
    if (row.recipe != options.recipe || row.recipe == Fp8Recipe::tensorwise) continue;
    add("recipe=");
    text += row.name;
  }
  if (!options.stochastic_rounding) add("round_to_nearest");
  if (options.strict) add("strict");
  if (options.only_worthwhile) add("only_worthwhile");
  return text.empty() ? "fp8" : "fp8(" + text + ')';
}

/// Ops composed of products, which a region with an fp8 rule may call instead.
inline constexpr OpFamily fp8_products[] = {ops::matmul, ops::linear, ops::conv, ops::recurrent};

/// Whether a region computes any product in fp8, and its calls otherwise.
class Fp8Usage final : public OpRuleUsage {
 public:
  explicit Fp8Usage(std::shared_ptr<Fp8Usage> outer) : outer_(std::move(outer)) {}

  /// Records a call in fp8.
  void run() {
    if (has_run()) return;
    has_run_.store(true, std::memory_order_relaxed);
    if (outer_ != nullptr) outer_->run();
  }

  void passed_by(const c10::OperatorName& op) override {
    for (const OpFamily& family : fp8_products) {
      if (!has_run() && contains(family, op)) return called_instead(full_name(op), {});
    }
  }

  /// Records a call of a product that the rule does not name, or that does not support fp8 (`why`).
  void called_instead(std::string op, const std::string& why) {
    if (has_run()) return;
    if (op.starts_with("aten::")) op.erase(0, 6);
    if (!why.empty()) op += " (" + why + ')';
    const std::scoped_lock<std::mutex> lock(mutex_);
    const bool is_known = (", " + called_ + ", ").find(", " + op + ", ") != std::string::npos;
    if (is_known || called_.size() > 500) return;
    called_ += (called_.empty() ? "" : ", ") + op;
  }

  void warn_if_unused() const override {
    if (has_run()) return;
    const std::scoped_lock<std::mutex> lock(mutex_);
    if (called_.empty()) return;
    TORCH_WARN_ONCE(
        "AutocastGuard: the policy has an fp8 rule, but no product of the region was in fp8. "
        "Called instead: ",
        called_,
        ". The rule may name ops that the model does not call: torch::nn::Linear calls addmm or "
        "matmul, not linear; ops::dense names them all.");
  }

 private:
  bool has_run() const { return has_run_.load(std::memory_order_relaxed); }

  std::shared_ptr<Fp8Usage> outer_;
  std::atomic<bool> has_run_ = false;
  mutable std::mutex mutex_;
  std::string called_;
};

/// A call of an op that supports fp8: result = beta * added + alpha * x w^T.
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

/// Why a device cannot compute products of the recipe in regions of a dtype; empty if it can.
inline std::string_view why_not_fp8_in(const Fp8Options& options, at::DeviceType device,
                                       at::ScalarType dtype) {
  const bool refuses =
      options.recipe == Fp8Recipe::rowwise && dtype == at::kHalf && device != at::kCPU;
  return refuses ? "rowwise products of a GPU are in bf16 only" : "";
}

/// Whether autocast casts the tensor and fp8's kernels accept it.
inline bool can_be_in_fp8(const at::Tensor& tensor, at::DeviceType device) {
  const at::ScalarType dtype = tensor.scalar_type();
  return (dtype == at::kFloat || is_16_bit(dtype)) && at::autocast::is_eligible(tensor, device);
}

/// Whether the tensor broadcasts to a result of `x` and `columns`.
inline bool can_be_added(const at::Tensor& tensor, const at::Tensor& x, int64_t columns) {
  if (tensor.dim() > x.dim()) return false;
  for (int64_t d = 1; d <= tensor.dim(); ++d) {
    const int64_t size = tensor.size(-d);
    if (size != 1 && size != (d == 1 ? columns : x.size(-d))) return false;
  }
  return true;
}

/// Why a call does not support fp8; empty if it does. LibTorch's op reports mismatched arguments.
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

/// Runs a call in fp8: replaces the arguments on the stack by the result. If not possible, returns
/// the reason and leaves the stack unchanged.
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

/// Registers the kernels of all products of a device that may be called instead of fp8's.
inline void register_kernels_of_products(at::DeviceType device) {
  static std::array<std::once_flag, device_count> installed;
  std::call_once(installed[device_index(device, "Policy")], [&] {
    for (const OpFamily& family : fp8_products) {
      for (const std::string_view name : family) {
        for (const auto& op : find_ops(name, "Policy", /*missing_ok=*/true)) {
          if (why_not_castable(op.schema()).empty()) (void)register_kernel(op, device);
        }
      }
    }
  });
}

/// The rule of Cast::fp8: see fp8() in fp8.h.
class Fp8Rule final : public OpRule {
 public:
  explicit Fp8Rule(const Fp8Options& options) : options_(options) {}

  void prepare(const char* call, const PolicyData& policy, at::DeviceType device,
               at::ScalarType dtype) const override {
    (void)derived_weights();  // created before the first region with this rule begins
    register_kernels_of_products(device);
    for (std::size_t i = 0; i < policy.edits.size(); ++i) {
      const Edit& edit = policy.edits[i];
      if (edit.op_rule == nullptr || !edit.when.may_hold_in(dtype)) continue;
      const auto& rule = static_cast<const Fp8Rule&>(*edit.op_rule);
      if (!rule.options_.strict || !applies(policy, i)) continue;
      const std::string& on_device = rule.why_not_on(device);
      const std::string why =
          on_device.empty() ? std::string(why_not_fp8_in(rule.options_, device, dtype)) : on_device;
      TORCH_CHECK(why.empty(), call, ": the policy's fp8 rule is strict, and ", device,
                  " cannot follow it in a region in ", dtype, ": ", why,
                  ". Leave Fp8Options::strict out to run as lower_precision there.");
    }
  }

  bool run(const c10::OperatorHandle& op, at::DeviceType device, torch::jit::Stack& stack,
           OpRuleUsage* usage) const override {
    std::string why = why_not_on(device);
    if (why.empty()) why = run_fp8(options_, op, device, stack);
    announce(fp8_scope, why);
    if (auto* const products = static_cast<Fp8Usage*>(usage)) {
      why.empty() ? products->run() : products->called_instead(full_name(op.operator_name()), why);
    }
    return why.empty();
  }

  std::string why_not_op(std::string_view full_name) const override {
    for (const std::string_view name : ops::dense) {
      if (full_name == "aten::" + std::string(name)) return {};
    }
    return "only linear, addmm, mm and matmul can (ops::dense)";
  }

  std::string text() const override { return fp8_text(options_); }

  std::shared_ptr<OpRuleUsage> make_usage(
      const std::shared_ptr<OpRuleUsage>& outer) const override {
    return std::make_shared<Fp8Usage>(std::static_pointer_cast<Fp8Usage>(outer));
  }

 private:
  /// Why the device of a type that is current at the first call does not support products; empty if
  /// it does.
  const std::string& why_not_on(at::DeviceType device) const {
    OnDevice& known = on_device_[device_index(device, "Policy")];
    std::call_once(known.tried, [&] { known.why_not = why_no_fp8_product(options_, device); });
    return known.why_not;
  }

  struct OnDevice {
    std::once_flag tried;
    std::string why_not;
  };

  Fp8Options options_;
  mutable std::array<OnDevice, device_count> on_device_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
