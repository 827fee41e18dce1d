// SPDX-License-Identifier: BSD-3-Clause
// A kernel for a CPU that computes an op of 16-bit operands in fp32.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/runtime/native_kernel.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Products on CPUs]
// A CPU without instructions for products in bf16 or fp16 computes them by LibTorch's plain loops,
// which take 5 to 100 times as long as in fp32. There, kernels of torchamp's replace LibTorch's
// under the CPU's key: they convert the operands to fp32, call the kernel that they replace, and
// round its results. So each element of a result is rounded once, as on a GPU. They are under the
// CPU's key and not under autocast's because backward passes run outside guards.
//
// The first guard for a CPU in a 16-bit dtype, or the first step of Muon there, decides for that
// dtype and for each family of products (see Note [Slow products]), and registers the kernels of a
// family that is computed in fp32, once per process. The kernels look up the decision at each call.
// Operands in other dtypes go to LibTorch's kernel as they are.
//
// LibTorch does not lock its dispatch table against calls, and a KernelFunction is several words. A
// call from C++ reads the unboxed kernel, then the functor, which LibTorch's own kernels ignore. So
// on x86-64, where other threads see stores in their order, a call during the registration runs the
// previous kernel or the new one. This is not certain for boxed calls (scripts) and for other CPUs:
// the guide says to make the first guard before other threads compute.

/// An operand in fp32, with the order of its dimensions in memory. Of elements that are repeated,
/// as after expand(), one is converted.
inline at::Tensor in_fp32(const at::Tensor& tensor) {
  at::Tensor distinct = tensor;
  bool repeats = false;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0 || tensor.size(dim) < 2) continue;
    distinct = distinct.narrow(dim, 0, 1);
    repeats = true;
  }
  const at::Tensor converted = distinct.to(at::kFloat);
  return repeats ? converted.expand(tensor.sizes()) : converted;
}

class ProductKernel final : public c10::OperatorKernel {
 public:
  /// `native`: the kernel that this one replaces. `fp16`, `bf16`: what computes in these dtypes.
  ProductKernel(const c10::FunctionSchema& schema, NativeKernel native,
                const std::atomic<ProductKernels>& fp16, const std::atomic<ProductKernels>& bf16)
      : native_(std::move(native)),
        fp16_(fp16),
        bf16_(bf16),
        argument_count_(schema.arguments().size()),
        result_count_(schema.returns().size()) {
    for (std::size_t i = 0; i < argument_count_; ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      if (holds_tensor(*argument.type())) operands_.emplace_back(argument, i);
    }
    if (schema.name() == "aten::mm") vector_operands_ = {0, 1};
    if (schema.name().starts_with("aten::addmm")) vector_operands_ = {1, 2};
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const {
    const c10::IValue* const arguments = stack->data() + stack->size() - argument_count_;
    const std::optional<at::ScalarType> dtype = dtype_in_fp32(arguments);
    if (!dtype) return native_.callBoxed(op, keys, stack);
    // Ops that the kernel calls are parts of this one.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
    std::vector<at::Tensor> written = convert(*stack);
    native_.callBoxed(op, keys, stack);
    round_results(written, *dtype, *stack);
  }

 private:
  struct Operand {
    Operand(const c10::Argument& argument, std::size_t index)
        : position(index),
          is_written(argument.alias_info() != nullptr && argument.alias_info()->isWrite()),
          is_result(argument.is_out()),
          may_be_fp32(argument.name() == "logsumexp" || argument.name() == "attn_mask") {}

    std::size_t position;
    bool is_written;   // also if it is the result
    bool is_result;    // its values are not read
    bool may_be_fp32;  // next to others in 16 bits
  };

  static bool holds_tensor(const c10::Type& type) {
    return type.isSubtypeOf(*c10::OptionalType::ofTensor());
  }

  /// The dtype of a call that is to be computed in fp32; unset: LibTorch's kernel gets it as it is.
  std::optional<at::ScalarType> dtype_in_fp32(const c10::IValue* arguments) const {
    const at::ScalarType dtype = arguments[operands_.front().position].toTensor().scalar_type();
    if (!is_16_bit(dtype)) return std::nullopt;
    const auto& kernels = dtype == at::kHalf ? fp16_ : bf16_;
    if (kernels.load(std::memory_order_relaxed) != ProductKernels::fp32) return std::nullopt;
    for (const Operand& operand : operands_) {
      const c10::IValue& value = arguments[operand.position];
      if (value.isNone() || !value.toTensor().defined()) continue;
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.is_floating_point() || operand.may_be_fp32) continue;
      if (tensor.scalar_type() != dtype || tensor.layout() != at::kStrided) return std::nullopt;
    }
    if (is_of_a_vector(arguments)) return std::nullopt;
    return dtype;
  }

  /// Whether one of two matrices is a vector: has one row on the left, or one column on the right.
  bool is_of_a_vector(const c10::IValue* arguments) const {
    if (!vector_operands_) return false;
    const at::Tensor& left = arguments[vector_operands_->first].toTensor();
    const at::Tensor& right = arguments[vector_operands_->second].toTensor();
    if (left.dim() != 2 || right.dim() != 2) return false;
    return left.size(0) == 1 || right.size(1) == 1;
  }

  /// Replaces the operands by others in fp32. Returns the operands that the op writes to.
  std::vector<at::Tensor> convert(torch::jit::Stack& stack) const {
    const at::DisableRecordFunctionGuard part_of_this_op;
    std::vector<at::Tensor> written;
    c10::IValue* const arguments = stack.data() + stack.size() - argument_count_;
    for (const Operand& operand : operands_) {
      c10::IValue& value = arguments[operand.position];
      if (value.isNone()) continue;
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined() || !is_16_bit(tensor.scalar_type())) continue;
      at::Tensor converted =
          operand.is_result ? at::empty({0}, tensor.options().dtype(at::kFloat)) : in_fp32(tensor);
      if (operand.is_written) written.push_back(tensor);
      value = std::move(converted);
    }
    return written;
  }

  void round_results(std::vector<at::Tensor>& written, at::ScalarType dtype,
                     torch::jit::Stack& stack) const {
    const at::DisableRecordFunctionGuard part_of_this_op;
    c10::IValue* const results = stack.data() + stack.size() - result_count_;
    for (std::size_t i = 0; i < result_count_; ++i) {
      const at::Tensor& result = results[i].toTensor();
      if (!result.defined() || result.scalar_type() != at::kFloat) continue;
      if (i < written.size()) {
        at::native::resize_output(written[i], result.sizes());
        written[i].copy_(result);
        results[i] = std::move(written[i]);
      } else {
        results[i] = result.to(dtype);
      }
    }
  }

  NativeKernel native_;
  const std::atomic<ProductKernels>& fp16_;
  const std::atomic<ProductKernels>& bf16_;
  std::size_t argument_count_, result_count_;
  std::vector<Operand> operands_;
  std::optional<std::pair<std::size_t, std::size_t>> vector_operands_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
