// SPDX-License-Identifier: BSD-3-Clause
// The casts of one call.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/overflows.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/ops.h"

namespace TORCHAMP_NAMESPACE::detail {

/// An argument, and the copy of it that the op writes to instead.
struct WrittenCopy {
  at::Tensor argument;
  at::Tensor copy;
};
using WrittenCopies = std::vector<WrittenCopy>;

/// Copies the results that the op has written back to the arguments.
inline void copy_back(const WrittenCopies& written) {
  const at::NoGradGuard no_grad;
  for (const WrittenCopy& one : written) one.argument.copy_(one.copy);
}

/// Casts the arguments of one op on the interpreter's stack. Made once per op, from its schema.
class CastArguments {
 public:
  /// `promotes`: the op itself computes in the widest dtype of its arguments, as additions do.
  CastArguments(const c10::FunctionSchema& schema, bool promotes)
      : count_(schema.arguments().size()),
        promotes_(promotes),
        is_asked_for_dtype_(is_asked_for_dtype(schema)) {
    const auto& arguments = schema.arguments();
    const bool has_statistics =
        std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
          return is_running_statistic(argument) && holds_tensors(*argument.type());
        });
    for (std::size_t i = 0; i < count_; ++i) {
      const c10::Argument& argument = arguments[i];
      if (is_dtype(argument, /*optional=*/true)) dtype_position_ = i;
      if (argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
          argument.type()->kind() == c10::TypeKind::TensorType) {
        written_position_ = i;
      }
      const ArgumentRole role = role_of(argument, schema);
      if (role == ArgumentRole::optional_weight) unit_weight_position_ = i;
      if (role == ArgumentRole::is_training) training_position_ = i;
      if (role == ArgumentRole::chooses_sum) sum_position_ = i;
      if (role == ArgumentRole::makes_sparse) sparse_position_ = i;
      if (!holds_tensors(*argument.type()) || role == ArgumentRole::in_fp32_only) continue;
      const std::string& name = argument.name();
      const bool is_beside = has_statistics && (name == "weight" || name == "bias");
      auto& others = is_beside ? beside_statistics_ : positions_;
      (is_running_statistic(argument) ? statistics_ : others).push_back(i);
    }
  }

  /// For ops whose row of the standard table depends on it: whether LibTorch rejects the call. It
  /// rejects masked_fill with a value that the filled tensor's dtype cannot hold, and rrelu in fp16
  /// training.
  bool is_refused(torch::jit::Stack& stack) const {
    const c10::IValue* const arguments = stack.data() + (stack.size() - count_);
    const at::ScalarType dtype = arguments[0].toTensor().scalar_type();
    if (!training_position_) return !fits(arguments[count_ - 1], dtype);
    return dtype == at::kHalf && arguments[*training_position_].toBool();
  }

  /// Whether the call of an op in index_sum_ops adds values. It does not if it only writes, or
  /// selects by `amax` or `amin`.
  bool sums(torch::jit::Stack& stack) const {
    if (!sum_position_) return true;
    const c10::IValue& value = *(stack.data() + (stack.size() - count_) + *sum_position_);
    if (value.isBool()) return value.toBool();
    const std::string& reduction = value.toStringRef();
    return !reduction.ends_with("max") && !reduction.ends_with("min");
  }

  /// If autograd records the call and an argument in 16 bits requires a gradient: casts the 16-bit
  /// arguments to fp32, and returns the dtype that the results would have had. Not for sparse
  /// gradients, whose elements the backward pass does not add, and which no cast can have.
  std::optional<at::ScalarType> widen_for_backward(at::DeviceType device,
                                                   torch::jit::Stack& stack) const {
    if (!at::GradMode::is_enabled()) return std::nullopt;
    const Call call{device, stack.data() + (stack.size() - count_)};
    if (sparse_position_ && call[*sparse_position_].toBool()) return std::nullopt;
    bool needs_gradient = false;
    for (const std::size_t position : positions_) {
      for_each_tensor_of(call[position], [&](const at::Tensor& tensor) {
        if (!call.can_cast(tensor) || !is_16_bit(tensor.scalar_type())) return;
        needs_gradient = needs_gradient || tensor.requires_grad();
      });
    }
    if (!needs_gradient) return std::nullopt;
    const Dtype dtype = widest(call);
    (void)to(at::kFloat, call);
    return dtype;
  }

  /// Casts as `cast` says for a region of `device`. After the op has run, the caller copies the
  /// returned WrittenCopies back. `weight_casts`: casts weights to 16 bits; null: LibTorch does.
  [[nodiscard]] WrittenCopies operator()(Cast cast, at::DeviceType device,
                                         const WeightCasts* weight_casts,
                                         const c10::FunctionSchema& schema,
                                         torch::jit::Stack& stack) const {
    const Call call{device, stack.data() + (stack.size() - count_)};
    const auto narrow = [&](Dtype dtype) {
      if (weight_casts && dtype && is_16_bit(*dtype)) {
        weight_casts->cast(schema, positions_, *dtype, device, stack);
      }
      return to(dtype, call);
    };
    switch (cast) {
      case Cast::lower_precision:
      case Cast::fp8:  // calls that fp8 does not support
        if (device == at::kCPU && is_sparse(call)) return to(at::kFloat, call);
        return narrow(at::autocast::get_autocast_dtype(device));
      case Cast::promote:
        return written_position_ ? narrow(dtype_written_to(call)) : to(widest(call), call);
      case Cast::fp32:
        if (dtype_position_ && (is_asked_for_dtype_ ? ask_for_fp32(call) : asks_for_16_bit(call)))
          return {};
        if (promotes_ && widen_one(call)) return {};
        return to(at::kFloat, call);
      case Cast::native:
      case Cast::unchanged:
        break;
    }
    return {};
  }

 private:
  using Dtype = std::optional<at::ScalarType>;
  using Positions = std::vector<std::size_t>;

  /// A call in a region of a device.
  struct Call {
    at::DeviceType device;
    c10::IValue* arguments;

    c10::IValue& operator[](std::size_t position) const { return arguments[position]; }
    bool can_cast(const at::Tensor& tensor) const {
      return tensor.defined() && at::autocast::is_eligible(tensor, device);
    }
  };

  /// The widest dtype among `dtype` and the castable tensors at `positions`; nothing if there are
  /// none.
  static Dtype widest_of(Dtype dtype, const Positions& positions, const Call& call) {
    for (const std::size_t position : positions) {
      for_each_tensor_of(call[position], [&](const at::Tensor& tensor) {
        if (!call.can_cast(tensor)) return;
        dtype = dtype ? c10::promoteTypes(*dtype, tensor.scalar_type()) : tensor.scalar_type();
      });
    }
    return dtype;
  }

  /// Whether an argument is a sparse matrix, for which a CPU has no 16-bit products.
  bool is_sparse(const Call& call) const {
    bool is_one = false;
    for (const std::size_t position : positions_) {
      for_each_tensor_of(call[position], [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        is_one = is_one || (tensor.layout() != at::kStrided && tensor.layout() != at::kMkldnn);
      });
    }
    return is_one;
  }

  Dtype widest(const Call& call) const {
    const Dtype dtype = widest_of(std::nullopt, positions_, call);
    return widest_of(widest_of(dtype, beside_statistics_, call), statistics_, call);
  }

  /// The dtype of the tensor that the op writes, if the op can compute in it.
  Dtype dtype_written_to(const Call& call) const {
    const c10::IValue& value = call[*written_position_];
    if (!value.isTensor() || !value.toTensor().is_floating_point()) return std::nullopt;
    return value.toTensor().scalar_type();
  }

  /// Whether a number fits into a dtype.
  static bool fits(const c10::IValue& value, at::ScalarType dtype) {
    if (!is_16_bit(dtype) || !(value.isDouble() || value.isInt())) return true;
    const double number = value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
    return dtype == at::kHalf ? !c10::overflows<c10::Half>(number)
                              : !c10::overflows<c10::BFloat16>(number);
  }

  // Note [Casts of running statistics]
  // If fp32 statistics were cast to 16 bits, the update of an op would be lost, so statistics are
  // never narrowed. If an op needs wider statistics (`fp32` on a model in 16 bits), it gets a copy,
  // which is copied back if the op has updated it. LibTorch's kernels require weight and bias in
  // the dtype of the statistics. Without a weight, LibTorch's instance_norm narrows the statistics
  // itself, so it gets a weight of ones. undeclared_writes_test runs all such ops.
  WrittenCopies cast_statistics(at::ScalarType dtype, const Call& call) const {
    WrittenCopies written;
    const at::ScalarType wide = *widest_of(dtype, statistics_, call);
    for (const std::size_t position : beside_statistics_) cast_value(wide, call, position);
    if (unit_weight_position_ && wide != dtype) give_unit_weight(call);
    const bool updates = updates_statistics(call);
    for (const std::size_t position : statistics_) {
      c10::IValue& value = call[position];
      if (!value.isTensor() || !needs_cast(value.toTensor(), wide, call)) continue;
      const at::Tensor original = value.toTensor();
      value = original.to(wide);
      if (updates) written.push_back({original, value.toTensor()});
    }
    return written;
  }

  /// Whether the call updates the statistics. An op without such an argument always does.
  bool updates_statistics(const Call& call) const {
    const auto& position = training_position_;
    return !position || !call[*position].isBool() || call[*position].toBool();
  }

  /// If a call has statistics and no weight, sets the weight to ones.
  void give_unit_weight(const Call& call) const {
    c10::IValue& weight = call[*unit_weight_position_];
    const c10::IValue& statistic = call[statistics_.front()];
    if (weight.isTensor() && weight.toTensor().defined()) return;
    if (!statistic.isTensor() || !statistic.toTensor().defined()) return;
    weight = at::ones_like(statistic.toTensor());
  }

  WrittenCopies to(Dtype dtype, const Call& call) const {
    if (!dtype) return {};
    for (const std::size_t position : positions_) cast_value(*dtype, call, position);
    return statistics_.empty() ? WrittenCopies() : cast_statistics(*dtype, call);
  }

  static void cast_value(at::ScalarType dtype, const Call& call, std::size_t position) {
    c10::IValue& value = call[position];
    if (value.isTensor()) {
      if (!needs_cast(value.toTensor(), dtype, call)) return;
      value = at::autocast::cached_cast(dtype, value.toTensor(), call.device);
    } else if (value.isList()) {
      cast_list(dtype, call, value);
    }
  }

  static void cast_list(at::ScalarType dtype, const Call& call, c10::IValue& value) {
    c10::impl::GenericList list = value.toList().copy();  // keeps the type of its elements
    for (std::size_t i = 0; i < list.size(); ++i) {
      const c10::IValue& element = list.get(i);
      if (!element.isTensor()) continue;
      list.set(i, at::autocast::cached_cast(dtype, element.toTensor(), call.device));
    }
    value = list;
  }

  static bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype, const Call& call) {
    return call.can_cast(tensor) && tensor.scalar_type() != dtype;
  }

  // Sets the op's dtype argument to fp32, unless the caller gave one (LibTorch's rule for
  // `fp32_set_opt_dtype`). False, with nothing set, if the arguments must be cast instead: a tensor
  // that is never cast would also be converted, and ops on nested tensors take no dtype.
  bool ask_for_fp32(const Call& call) const {
    c10::IValue& dtype = call[*dtype_position_];
    if (!dtype.isNone()) return true;
    bool castable = false, all_can_be_asked = true;
    for (const std::size_t position : positions_) {
      for_each_tensor_of(call[position], [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        const bool can_cast = call.can_cast(tensor);
        castable = castable || can_cast;
        if (can_cast ? tensor.is_nested() : tensor.is_floating_point() || tensor.is_complex()) {
          all_can_be_asked = false;
        }
      });
    }
    if (castable && all_can_be_asked) dtype = at::kFloat;
    return all_can_be_asked;
  }

  /// Whether the caller requests a result in 16 bits.
  bool asks_for_16_bit(const Call& call) const {
    const c10::IValue& dtype = call[*dtype_position_];
    return !dtype.isNone() && is_16_bit(dtype.toScalarType());
  }

  // Note [One cast for an addition]
  // If one argument of an op with type promotion is fp32, the op computes in fp32 and converts the
  // other argument inside its kernel. (A tensor with dimensions decides the dtype before a tensor
  // without.) So one cast is enough for two arguments. Not all kernels of sparse layouts convert;
  // for these this returns false.
  bool widen_one(const Call& call) const {
    c10::IValue* chosen = nullptr;
    bool chosen_has_dims = false, wide = false;
    for (const std::size_t position : positions_) {
      c10::IValue& value = call[position];
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const at::Tensor& tensor = value.toTensor();
      if (tensor.layout() != at::kStrided) return false;
      if (!tensor.is_floating_point()) continue;
      const bool is_wide =
          tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
      if (!is_wide && !call.can_cast(tensor)) continue;  // a host's number, next to a device's
      const bool has_dims = tensor.dim() > 0;
      if (chosen && has_dims < chosen_has_dims) continue;
      if (!chosen || has_dims > chosen_has_dims) {
        chosen = &value;
        chosen_has_dims = has_dims;
        wide = false;
      }
      wide = wide || is_wide;
    }
    if (chosen && !wide) {
      *chosen = at::autocast::cached_cast(at::kFloat, chosen->toTensor(), call.device);
    }
    return true;
  }

  Positions positions_;          // of the arguments that hold tensors
  Positions statistics_;         // of running statistics; not in positions_
  Positions beside_statistics_;  // of their weight and bias; not in positions_
  std::optional<std::size_t> dtype_position_;
  std::optional<std::size_t> training_position_;  // of the switch for updates of statistics
  std::optional<std::size_t> written_position_;
  std::optional<std::size_t> unit_weight_position_;  // of instance_norm's weight
  std::optional<std::size_t> sum_position_;          // of `accumulate` or `reduce`
  std::optional<std::size_t> sparse_position_;       // of the argument that makes gradients sparse
  std::size_t count_;
  bool promotes_;
  bool is_asked_for_dtype_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
