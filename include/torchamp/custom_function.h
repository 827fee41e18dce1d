// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief AutocastFunction: an autograd function whose backward sees forward's autocast state.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <concepts>
#include <string>
#include <tuple>
#include <utility>

#include "torchamp/autocast_state.h"
#include "torchamp/detail/cast_inputs.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {

/// The forward's autocast state on its way to the backward, in AutogradContext::saved_data.
struct SavedAutocastState final : torch::CustomClassHolder {
  static constexpr const char* key = "torchamp.state";

  AutocastState state = AutocastState::of_this_thread();
};

/// What LibTorch sees of an AutocastFunction: the user's forward and backward, each under the
/// forward's autocast state.
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
    TORCH_CHECK(
        found != ctx->saved_data.end() && found->second.isCapsule(),
        "AutocastFunction: forward's autocast state is gone from ctx->saved_data. Leave its "
        "entry '",
        SavedAutocastState::key, "' there when backward changes ctx->saved_data.");
    const auto saved = c10::static_intrusive_pointer_cast<SavedAutocastState>(
        at::IValue(found->second).toCapsule());
    const AutocastStateGuard as_in_forward(saved->state);
    return T::backward(ctx, gradients);
  }
};

}  // namespace detail

/// Base of a custom autograd function whose backward runs under the autocast state and policy that
/// its forward ran under: torch.amp's custom_fwd and custom_bwd. Takes the place of
/// torch::autograd::Function; forward, backward and apply are written and called as there.
///
///     struct Exp : torchamp::AutocastFunction<Exp> {
///       static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x);
///       static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
///                                                      torch::autograd::variable_list gradients);
///     };
///     torch::Tensor y = Exp::apply(x);
///
/// The whole state is carried: of all device types, the cache flag and the policy. It is kept in
/// ctx->saved_data under "torchamp.state".
///
/// With a second argument, `AutocastFunction<Exp, torch::kFloat>`, the function takes its inputs in
/// that dtype and does without autocast: in a region, floating-point tensors other than fp64 that
/// lie on a device with autocast on are cast to it, and forward and backward run with autocast off.
/// Outside a region nothing is cast. Inputs cast are at::Tensor, std::optional<at::Tensor>,
/// at::TensorList and std::vector<at::Tensor>. Unlike torch.amp's, the cast is part of the graph,
/// so that a double backward reaches the inputs through tensors that forward saved; and it is an
/// error if forward writes in place to an input that was cast, or to a view of it, since the
/// caller's tensor would not change.
///
/// Threads: as torch::autograd::Function. Never reads a device. Source: torch/amp/autocast_mode.py.
template <class T, at::ScalarType cast_inputs = at::ScalarType::Undefined>
struct AutocastFunction {
  static_assert(cast_inputs == at::ScalarType::Undefined || cast_inputs == at::kFloat ||
                    cast_inputs == at::kHalf || cast_inputs == at::kBFloat16 ||
                    cast_inputs == at::kDouble,
                "AutocastFunction: inputs can be cast to a floating-point dtype only");

  /// Runs T::forward and records T::backward; arguments and result as
  /// torch::autograd::Function<T>::apply has them.
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
