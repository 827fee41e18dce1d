// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Copies that an op writes to instead of its arguments.
class StandIns {
 public:
  void add(at::Tensor original, at::Tensor copy) {
    originals_.push_back(std::move(original));
    copies_.push_back(std::move(copy));
  }

  /// Brings what the op has written to where it belongs.
  void copy_back() const {
    if (copies_.empty()) return;
    const InternalOps internal;
    for (std::size_t i = 0; i < copies_.size(); ++i) originals_[i].copy_(copies_[i]);
  }

 private:
  std::vector<at::Tensor> originals_, copies_;
};

/// Casts the arguments of one op on the interpreter's stack. Made once per op, from its schema.
class CastArguments {
 public:
  /// `promotes`: the op itself computes in the widest dtype of its arguments, as additions do.
  CastArguments(const c10::FunctionSchema& schema, bool promotes)
      : count_(schema.arguments().size()), promotes_(promotes) {
    for (std::size_t i = 0; i < count_; ++i) {
      const auto& argument = schema.arguments()[i];
      if (is_dtype(argument, /*optional=*/true)) dtype_position_ = i;
      if (argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
          argument.type()->kind() == c10::TypeKind::TensorType) {
        written_position_ = i;
      }
      if (argument.name() == "weight" && schema.name() == "aten::instance_norm") {
        unit_weight_position_ = i;
      }
      if (argument.name() == "training" || argument.name() == "use_input_stats") {
        training_position_ = i;
      }
      if (is_running_statistic(argument) && holds_tensors(*argument.type())) {
        statistics_.push_back(i);
      }
    }
    for (std::size_t i = 0; i < count_; ++i) {
      const auto& argument = schema.arguments()[i];
      if (is_running_statistic(argument) || !holds_tensors(*argument.type())) continue;
      const bool is_beside = argument.name() == "weight" || argument.name() == "bias";
      (is_beside && !statistics_.empty() ? beside_statistics_ : positions_).push_back(i);
    }
  }

  /// Casts as `cast` says (lower_precision, fp32 or promote) for a region of `device`. After the op
  /// has run, the stand-ins are to be copied back.
  [[nodiscard]] StandIns operator()(Cast cast, at::DeviceType device,
                                    torch::jit::Stack& stack) const {
    const std::size_t first = stack.size() - count_;
    switch (cast) {
      case Cast::lower_precision:
      case Cast::fp8:  // where it cannot be
        return to(at::autocast::get_autocast_dtype(device), device, stack, first);
      case Cast::promote:
        return to(written_position_ ? dtype_written_to(stack, first) : widest(device, stack, first),
                  device, stack, first);
      case Cast::fp32:
        if (dtype_position_ && can_ask_for_fp32(device, stack, first)) return {};
        if (promotes_ && widen_one(device, stack, first)) return {};
        return to(at::kFloat, device, stack, first);
      case Cast::native:
      case Cast::unchanged:
        break;
    }
    if (cast == fp32_where_it_must && !value_fits(stack)) {
      return to(at::kFloat, device, stack, first);
    }
    return {};
  }

  /// Of the arguments that hold tensors, running statistics and what is beside them left out.
  const std::vector<std::size_t>& positions() const { return positions_; }

 private:
  static bool is_castable(const at::Tensor& tensor, at::DeviceType device) {
    return tensor.defined() && at::autocast::is_eligible(tensor, device);
  }

  template <class Function>
  static void for_each_tensor(const std::vector<std::size_t>& positions,
                              const torch::jit::Stack& stack, std::size_t first,
                              Function function) {
    for (const std::size_t position : positions) {
      for_each_tensor_of(stack[first + position], function);
    }
  }

  /// The widest dtype among `dtype` and the castable tensors at `positions`; nothing if there are
  /// none.
  static std::optional<at::ScalarType> widest_of(std::optional<at::ScalarType> dtype,
                                                 const std::vector<std::size_t>& positions,
                                                 at::DeviceType device,
                                                 const torch::jit::Stack& stack,
                                                 std::size_t first) {
    for_each_tensor(positions, stack, first, [&](const at::Tensor& tensor) {
      if (!is_castable(tensor, device)) return;
      dtype = dtype ? c10::promoteTypes(*dtype, tensor.scalar_type()) : tensor.scalar_type();
    });
    return dtype;
  }

  std::optional<at::ScalarType> widest(at::DeviceType device, const torch::jit::Stack& stack,
                                       std::size_t first) const {
    auto dtype = widest_of(std::nullopt, positions_, device, stack, first);
    dtype = widest_of(dtype, beside_statistics_, device, stack, first);
    return widest_of(dtype, statistics_, device, stack, first);
  }

  /// That of the tensor which the op writes to, if it can be computed in.
  std::optional<at::ScalarType> dtype_written_to(const torch::jit::Stack& stack,
                                                 std::size_t first) const {
    const c10::IValue& value = stack[first + *written_position_];
    if (!value.isTensor() || !value.toTensor().is_floating_point()) return std::nullopt;
    return value.toTensor().scalar_type();
  }

  /// Whether the number at the end of the arguments fits into the dtype of the first.
  bool value_fits(const torch::jit::Stack& stack) const {
    const at::ScalarType dtype = stack[stack.size() - count_].toTensor().scalar_type();
    const c10::Scalar value = stack.back().toScalar();
    if (!is_16_bit(dtype) || value.isComplex()) return true;
    const double number = std::abs(value.toDouble());
    const double most = dtype == at::kHalf
                            ? static_cast<double>(std::numeric_limits<c10::Half>::max())
                            : static_cast<double>(std::numeric_limits<c10::BFloat16>::max());
    return !(number > most) || std::isinf(number);
  }

  // Note [Casts of running statistics]
  // Statistics in fp32 that were cast to 16 bits would lose what an update adds, so they are never
  // narrowed. Where an op needs them wider than they are (`fp32` on a model in 16 bits) it is given
  // a copy, which is copied back if the op has updated it. LibTorch's kernels take weight and bias
  // in the dtype of the statistics, which may be wider than the input's, and in no other. Its
  // instance_norm narrows statistics by itself where there is no weight, so it is given one of
  // ones.
  StandIns to(std::optional<at::ScalarType> dtype, at::DeviceType device, torch::jit::Stack& stack,
              std::size_t first) const {
    StandIns stand_ins;
    if (!dtype) return stand_ins;
    for (const std::size_t position : positions_)
      cast_value(*dtype, device, stack[first + position]);
    if (statistics_.empty()) return stand_ins;
    const at::ScalarType wide = *widest_of(dtype, statistics_, device, stack, first);
    for (const std::size_t position : beside_statistics_) {
      cast_value(wide, device, stack[first + position]);
    }
    if (unit_weight_position_ && wide != *dtype) {
      c10::IValue& weight = stack[first + *unit_weight_position_];
      const c10::IValue& statistic = stack[first + statistics_.front()];
      const bool has_weight = weight.isTensor() && weight.toTensor().defined();
      if (!has_weight && statistic.isTensor() && statistic.toTensor().defined()) {
        weight = at::ones_like(statistic.toTensor());
      }
    }
    const c10::IValue& training = stack[first + training_position_.value_or(0)];
    const bool updates = !training_position_ || !training.isBool() || training.toBool();
    for (const std::size_t position : statistics_) {
      c10::IValue& value = stack[first + position];
      if (!value.isTensor() || !needs_cast(value.toTensor(), wide, device)) continue;
      at::Tensor original = value.toTensor();
      at::Tensor copy = original.to(wide);
      value = copy;
      if (updates) stand_ins.add(std::move(original), std::move(copy));
    }
    return stand_ins;
  }

  static void cast_value(at::ScalarType dtype, at::DeviceType device, c10::IValue& value) {
    const auto cast = [&](const at::Tensor& tensor) {
      return at::autocast::cached_cast(dtype, tensor, device);
    };
    if (value.isTensor()) {
      if (needs_cast(value.toTensor(), dtype, device)) value = cast(value.toTensor());
    } else if (value.isList()) {
      c10::impl::GenericList list = value.toList().copy();  // keeps the type of its elements
      for (std::size_t i = 0; i < list.size(); ++i) {
        const c10::IValue& element = list.get(i);
        if (element.isTensor()) list.set(i, cast(element.toTensor()));
      }
      value = list;
    }
  }

  static bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype, at::DeviceType device) {
    return is_castable(tensor, device) && tensor.scalar_type() != dtype;
  }

  // LibTorch's rule for `fp32_set_opt_dtype`: a dtype that the caller gave stands. False if the
  // arguments must be cast instead: a tensor that is never cast would be converted, too, and those
  // of nested tensors take no dtype.
  bool can_ask_for_fp32(at::DeviceType device, torch::jit::Stack& stack, std::size_t first) const {
    c10::IValue& dtype = stack[first + *dtype_position_];
    if (!dtype.isNone()) return true;
    bool castable = false;
    bool all_can_be_asked = true;
    for_each_tensor(positions_, stack, first, [&](const at::Tensor& tensor) {
      if (is_castable(tensor, device)) {
        castable = true;
        all_can_be_asked = all_can_be_asked && !tensor.is_nested();
      } else if (tensor.defined()) {
        all_can_be_asked = all_can_be_asked && !tensor.is_floating_point() && !tensor.is_complex();
      }
    });
    if (castable && all_can_be_asked) dtype = at::kFloat;
    return all_can_be_asked;
  }

  // Note [One cast for an addition]
  // An op with type promotion computes in fp32 as soon as one argument that decides the dtype is
  // fp32, and converts the other on the fly. Tensors with dimensions decide over those without. So
  // one cast serves where a cast of each argument would launch two kernels. Kernels of sparse
  // layouts do not all convert: false for them.
  bool widen_one(at::DeviceType device, torch::jit::Stack& stack, std::size_t first) const {
    c10::IValue* chosen = nullptr;
    bool chosen_has_dims = false;
    bool wide = false;
    for (const std::size_t position : positions_) {
      c10::IValue& value = stack[first + position];
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const at::Tensor& tensor = value.toTensor();
      if (tensor.layout() != at::kStrided) return false;
      if (!tensor.is_floating_point()) continue;
      const bool has_dims = tensor.dim() > 0;
      if (chosen && has_dims < chosen_has_dims) continue;
      if (!chosen || has_dims > chosen_has_dims) {
        chosen = &value;
        chosen_has_dims = has_dims;
        wide = false;
      }
      wide = wide || tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
    }
    if (chosen && !wide)
      *chosen = at::autocast::cached_cast(at::kFloat, chosen->toTensor(), device);
    return true;
  }

  std::vector<std::size_t> positions_;          // of the arguments that hold tensors
  std::vector<std::size_t> statistics_;         // of running statistics; not in positions_
  std::vector<std::size_t> beside_statistics_;  // of their weight and bias; not in positions_
  std::optional<std::size_t> dtype_position_;
  std::optional<std::size_t> training_position_;  // of what says whether statistics are updated
  std::optional<std::size_t> written_position_;
  std::optional<std::size_t> unit_weight_position_;  // of instance_norm's weight
  std::size_t count_;
  bool promotes_;
};

}  // namespace torchamp::detail
