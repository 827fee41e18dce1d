// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/detail/core/base/autograd_node.h"
#include "torchamp/detail/extras/weights/derived.h"

namespace TORCHAMP_NAMESPACE::detail {

/// `value`, an argument of an op, with `function` applied to each defined tensor.
template <class Function>
c10::IValue with_tensors_changed(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  }
  if (!value.isList()) return value;
  c10::impl::GenericList list = value.toList().copy();
  for (std::size_t i = 0; i < list.size(); ++i) {
    const c10::IValue& element = list.get(i);
    if (element.isTensor()) list.set(i, with_tensors_changed(element, function));
  }
  return list;
}

// Note [What is taken for a weight]
// A leaf that requires grad is a weight, and so is a view of one (torch::nn::Linear calls addmm
// with `w.t()`). A leaf that does not require grad may be a frozen weight, a batch or, without a
// graph, any activation; a cast of the latter two is never used again. So such a leaf counts as a
// weight only if the op's schema names it weight or bias, or if it is the second matrix of a
// product, or the vector that is added to a product: torch::nn::Linear's weight and bias.

/// Whether casts of this argument, by its name in the schema, are cached: see
/// Note [What is taken for a weight].
inline bool is_weight(const at::Tensor& tensor, std::string_view argument) {
  const at::TensorBase& owner = tensor.is_view() ? tensor._base() : tensor;
  if (!owner.is_leaf()) return false;
  if (owner.requires_grad() || argument == "weight" || argument == "bias") return true;
  if (argument == "mat2" || argument == "other") return tensor.dim() == 2;
  return argument == "self" && tensor.dim() == 1;
}

/// Reports a cache lookup to recorders (a CastRecorder, LibTorch's profiler), by an empty user
/// scope with a name that begins so. Without a recorder this checks one flag.
inline constexpr std::string_view weight_cast_scope = "torchamp weight cast: ";

/// The reports. A new cast is reported by its op, unless it reuses the memory of the old cast.
struct WeightCastNote {
  bool hit = false;
  bool in_place = false;
  at::ScalarType from = at::kFloat;  // of a cast in place, as `to` and `numel`
  at::ScalarType to = at::kFloat;
  int64_t numel = 0;

  void tell() const {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) return;
    at::RecordFunction scope(std::move(*callbacks));
    std::string text(weight_cast_scope);
    text += hit ? "kept" : "made";
    if (in_place) {
      for (const int64_t number : {static_cast<int64_t>(from), static_cast<int64_t>(to), numel}) {
        text += ' ' + std::to_string(number);
      }
    }
    scope.before(std::move(text));
  }
};

/// The node of a cached cast, equivalent to LibTorch's own node for a cast.
class KeptCastBackward final : public torch::autograd::Node {
 public:
  explicit KeptCastBackward(at::ScalarType of_weight) : dtype_(of_weight) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    at::Tensor& gradient = gradients[0];
    return {gradient.defined() ? gradient.to(dtype_) : at::Tensor()};
  }
  std::string name() const override { return "ToCopyBackward0"; }

 private:
  at::ScalarType dtype_;
};

// Note [The graph of a kept cast]
// The cache holds values outside any graph. Each use gets its own tensor and node, so gradients
// reach the weight as from a cast made for that use: gradients of two uses add in the weight's
// dtype, a graph may be freed or run backward twice, and a cast made without gradients serves a
// graph as well.

/// The weight in another dtype, as `weight.to(dtype)`; cast only if no current cast is cached.
inline at::Tensor kept_cast(DerivedWeights& store, const at::Tensor& weight, at::ScalarType dtype,
                            WeightKeep keep) {
  WeightCastNote note{.from = weight.scalar_type(), .to = dtype, .numel = weight.numel()};
  const auto cast = [&](const Tensors& reusable) {
    const c10::InferenceMode counts_writes(false);
    const c10::NoGradGuard no_grad;
    if (reusable.empty()) return Tensors{weight.to(dtype)};
    note.in_place = true;
    const at::DisableRecordFunctionGuard told_by_the_note;
    reusable.front().copy_(weight);
    return reusable;
  };
  const WeightForm form{WeightForm::Kind::cast, static_cast<std::uint32_t>(dtype)};
  const Tensors made = store.get(weight, form, keep, cast, &note.hit);
  note.tell();
  const c10::TensorImpl* const values = made.front().unsafeGetTensorImpl();
  at::Tensor use(values->shallow_copy_and_detach(values->version_counter(),
                                                 /*allow_tensor_metadata_change=*/false));
  if (c10::GradMode::is_enabled() && weight.requires_grad()) {
    NodePtr node = make_node<KeptCastBackward>(weight.scalar_type());
    node->set_next_edges(torch::autograd::collect_next_edges(weight));
    torch::autograd::create_gradient_edge(use, std::move(node));
  }
  return use;
}

}  // namespace TORCHAMP_NAMESPACE::detail
