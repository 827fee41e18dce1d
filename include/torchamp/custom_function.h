// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. AutocastFunction: an autograd function whose backward runs in forward's autocast
/// state.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/autocast_state.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {

/// Forward's autocast state, stored for backward in AutogradContext::saved_data.
struct SavedAutocastState final : torch::CustomClassHolder {
  static constexpr const char* key = "torchamp.state";

  AutocastState state = AutocastState::of_this_thread();
};

/// The function that LibTorch calls: it runs the user's forward and backward in forward's autocast
/// state.
template <class T>
struct AutocastFunctionNode : torch::autograd::Function<AutocastFunctionNode<T>> {
  using Context = torch::autograd::AutogradContext;

  template <class... Args>
  static auto forward(Context* ctx, Args&&... args)
      -> decltype(T::forward(ctx, std::forward<Args>(args)...)) {
    auto outputs = T::forward(ctx, std::forward<Args>(args)...);
    ctx->saved_data.insert_or_assign(
        SavedAutocastState::key,
        at::IValue::make_capsule(c10::make_intrusive<SavedAutocastState>()));
    return outputs;
  }

  static torch::autograd::variable_list backward(Context* ctx,
                                                 torch::autograd::variable_list& gradients) {
    const auto found = ctx->saved_data.find(SavedAutocastState::key);
    TORCH_CHECK(found != ctx->saved_data.end() && found->second.isCapsule(),
                "AutocastFunction: forward's autocast state is missing in ctx->saved_data. Leave "
                "its entry '",
                SavedAutocastState::key, "' there when backward changes ctx->saved_data.");
    const auto saved = c10::static_intrusive_pointer_cast<SavedAutocastState>(
        at::IValue(found->second).toCapsule());
    const AutocastStateGuard as_in_forward(saved->state);
    return T::backward(ctx, gradients);
  }
};

/// Casts the tensors among a custom function's inputs, for the devices with autocast on at
/// construction.
class CastInputs {
 public:
  explicit CastInputs(at::ScalarType dtype) : dtype_(dtype) {
    for (const at::DeviceType device : autocast_devices) {
      if (at::autocast::is_autocast_enabled(device)) devices_.push_back(device);
    }
  }

  CastInputs(const CastInputs&) = delete;
  CastInputs& operator=(const CastInputs&) = delete;
  ~CastInputs() {
    // The cache may hold a cast that forward has written to.
    if (wrote_to_any()) at::autocast::clear_cache();
  }

  /// Returns an input: cast if it holds tensors, otherwise as a reference.
  template <class Input>
  decltype(auto) operator()(Input&& input) {
    using Value = std::remove_cvref_t<Input>;
    if constexpr (std::same_as<Value, at::Tensor>) {
      return one(input);
    } else if constexpr (std::same_as<Value, std::optional<at::Tensor>>) {
      return input ? std::optional(one(*input)) : std::nullopt;
    } else if constexpr (std::same_as<Value, at::TensorList> ||
                         std::same_as<Value, std::vector<at::Tensor>>) {
      std::vector<at::Tensor> list;
      list.reserve(input.size());
      for (const at::Tensor& tensor : input) list.push_back(one(tensor));
      return list;
    } else {
      return std::forward<Input>(input);
    }
  }

  /// Whether forward has written in place to the result of a cast or to a view of it.
  bool wrote_to_any() const {
    return std::ranges::any_of(
        made_, [](const auto& made) { return version_of(made.first) != made.second; });
  }

 private:
  at::Tensor one(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const at::DeviceType device : devices_) {
      if (!at::autocast::is_eligible(tensor, device) || tensor.scalar_type() == dtype_) continue;
      at::Tensor made = cast(tensor, device);
      made_.emplace_back(made, version_of(made));
      return made;
    }
    return tensor;
  }

  at::Tensor cast(const at::Tensor& tensor, at::DeviceType device) const {
    if (!c10::InferenceMode::is_enabled()) {
      return at::autocast::cached_cast(dtype_, tensor, device);
    }
    // A tensor made in inference mode does not count its versions.
    const c10::InferenceMode counted(false);
    const c10::NoGradGuard no_grad;
    return tensor.to(dtype_);
  }

  at::ScalarType dtype_;
  std::vector<at::DeviceType> devices_;
  std::vector<std::pair<at::Tensor, std::uint32_t>> made_;  // and their versions
};

/// A cast input in the type that the caller passed: LibTorch finds the tensors of an
/// at::TensorList, but not of a vector.
template <class Given, class Input>
decltype(auto) as_input(Input&& input) {
  if constexpr (std::same_as<std::remove_cvref_t<Given>, at::TensorList>) {
    return at::TensorList(input);
  } else {
    return std::forward<Input>(input);
  }
}

}  // namespace detail

/// Base of a custom autograd function whose backward runs in the autocast state and policy of its
/// forward, like torch.amp's custom_fwd and custom_bwd. Use it in place of
/// torch::autograd::Function, with the same forward, backward and apply.
///
///     struct Exp : torchamp::AutocastFunction<Exp> {
///       static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x);
///       static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
///                                                      torch::autograd::variable_list gradients);
///     };
///     torch::Tensor y = Exp::apply(x);
///
/// The whole state is saved (all device types, the cache flag, the policy), in ctx->saved_data
/// under "torchamp.state". Error in backward(): the program has removed this entry.
///
/// With a second argument, `AutocastFunction<Exp, torch::kFloat>`, the function gets its inputs in
/// that dtype, and forward and backward run with autocast off. Only floating-point tensors on a
/// device for which autocast is on are cast, except for fp64 tensors. Outside a region nothing is
/// cast. Casts apply to inputs of type at::Tensor, std::optional<at::Tensor>, at::TensorList and
/// std::vector<at::Tensor>.
///
/// There are two differences from torch.amp. The cast is part of the graph, so a double backward
/// reaches the inputs through tensors that forward saved. If forward writes in place to a cast
/// input or to a view of it, apply() throws, because the caller's tensor would not change.
///
/// Threads: like torch::autograd::Function. Never synchronises. Source: torch/amp/autocast_mode.py.
template <class T, at::ScalarType cast_inputs = at::ScalarType::Undefined>
struct AutocastFunction {
  static_assert(cast_inputs == at::ScalarType::Undefined || cast_inputs == at::kFloat ||
                    cast_inputs == at::kHalf || cast_inputs == at::kBFloat16 ||
                    cast_inputs == at::kDouble,
                "AutocastFunction: inputs can be cast to a floating-point dtype only");

  /// Runs T::forward and records T::backward, with the arguments and the result of
  /// torch::autograd::Function<T>::apply.
  template <class... Args>
  static auto apply(Args&&... args) {
    static_assert(std::derived_from<T, AutocastFunction>,
                  "AutocastFunction<T>: T must be the class that derives from it");
    if constexpr (cast_inputs == at::ScalarType::Undefined) {
      return detail::AutocastFunctionNode<T>::apply(std::forward<Args>(args)...);
    } else {
      detail::CastInputs cast(cast_inputs);
      std::tuple<decltype(cast(std::forward<Args>(args)))...> inputs{
          cast(std::forward<Args>(args))...};
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      auto outputs = std::apply(
          [](auto&&... input) {
            return detail::AutocastFunctionNode<T>::apply(
                detail::as_input<Args>(std::forward<decltype(input)>(input))...);
          },
          std::move(inputs));
      TORCH_CHECK(!cast.wrote_to_any(),
                  "AutocastFunction: forward wrote in place to an input that autocast had cast, so "
                  "the caller's tensor did not change. Return a new tensor instead.");
      return outputs;
    }
  }
};

}  // namespace TORCHAMP_NAMESPACE
