// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. checkpoint: backward computes activations again, instead of storing them.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/extras/recompute/node.h"
#include "torchamp/detail/extras/shared/rng_state.h"
#include "torchamp/detail/extras/shared/tensor_tree.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {

/// How checkpoint() stores an input of type Given for backward; for a list this includes the
/// values.
template <class Given>
struct KeptInput {
  static_assert(!RefersToValues<Given>::value,
                "checkpoint: an input refers to values that may be destroyed before backward runs "
                "the function again. Pass a std::vector or an at::ArrayRef of the values.");
  using type = Given;
  template <class Input>
  static Input&& keep(Input&& input) {
    return std::forward<Input>(input);
  }
  static type& given(type& kept) { return kept; }
};
template <class T>
struct KeptInput<c10::ArrayRef<T>> {
  using type = std::vector<T>;
  static type keep(c10::ArrayRef<T> list) { return list.vec(); }
  static c10::ArrayRef<T> given(type& kept) { return kept; }
};

/// Calls the function with the inputs in their original types.
template <class Output, class... Given, class Function, class Kept>
Output call_with(Function& function, Kept& kept) {
  return std::apply(
      [&](auto&... each) {
        return Output(call_forward(function, KeptInput<Given>::given(each)...));
      },
      kept);
}

/// The random state for a recomputation.
inline RngState rng_state_to_keep() {
  constexpr const char* remedy =
      "Pass {.preserve_rng_state = false}, and keep dropout out of the function.";
  GraphBody::check(c10::str(
      "checkpoint: the iteration of a CudaGraph cannot preserve the random state, which is on the "
      "host. ",
      remedy));
  try {
    return RngState::now();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false,
                "checkpoint: the random state cannot be read, for example because a CUDA graph is "
                "being captured. ",
                remedy, " The error was: ", error.what_without_backtrace());
  }
}

}  // namespace detail

/// Options of checkpoint().
struct CheckpointOptions {
  /// Whether the recomputation uses the forward's random state: the states of LibTorch's default
  /// generators of the CPU and of all devices in use. Dropout then drops the same elements. Costs a
  /// few microseconds; pass false if the function draws no random numbers. True is an error in
  /// a CudaGraph, and while any other CUDA graph is captured.
  bool preserve_rng_state = true;

  /// Buffers that the function changes, such as batch norm's running statistics: backward must not
  /// change them a second time. Example: `{.buffers = block->buffers()}`. Not needed if the
  /// function is a module holder.
  std::vector<at::Tensor> buffers = {};
};

/// Calls function(inputs...) and stores none of its activations; backward runs the function again.
/// This saves memory and costs one more forward.
///
///     x = torchamp::checkpoint(block, x);                          // a module holder
///     x = torchamp::checkpoint([=](auto x) { return block->forward(x).relu(); }, x);
///
/// The recomputation uses the forward's autocast state, policy and random state. Neither run uses
/// LibTorch's cache of cast weights, which all threads share: each use of a weight is cast again,
/// as with `{.cache_enabled = false}`. If a function uses a weight many times, like an unrolled
/// recurrent layer, use torchamp's own cache, such as WeightCache::region.
///
/// On a CPU the gradients are bitwise identical to a plain call, if the guard of the plain call
/// uses no cache or torchamp's own cache. With LibTorch's cache, all uses of a cast add their
/// gradients in 16 bits; here they add in fp32. If a tensor is used in several nested calls, the
/// order of the sum may differ.
///
/// Captured parameters and tensors also get gradients, even if no input requires grad. This holds
/// even for torch::autograd::grad and with create_graph (second derivatives may differ by 16-bit
/// rounding). Calls nest. With grad mode off this is a plain call. Never synchronises.
///
/// Inputs and outputs are tensors, other values, and vectors, arrays, tuples, pairs, maps and
/// optionals of them. Outputs that are not tensors are returned unchanged. An output type that may
/// hide tensors (a struct, an unordered_map) does not compile. The values of an at::ArrayRef are
/// copied; other views do not compile. If the function returns an input or a captured tensor
/// itself, you get the same tensor. Any other output that shares memory with an input, a captured
/// tensor or another output is returned as a copy, so in-place changes of the copy do not affect
/// them.
///
/// The function is copied and called again during backward, possibly on another thread. Objects
/// that it captures by reference must live until then, and both calls must do the same work.
///
/// Errors: exceptions of the function, from the call or from backward; a function that changes an
/// input in place; a recomputation with other output shapes or other parameters; a write, between
/// the call and backward, to a parameter, buffer or other tensor that an op of the function has
/// read. A write that LibTorch does not count is not detected: through a pointer, or through
/// `.data()` as in LibTorch's own SGD. Tensors that the function itself writes to, such as a batch
/// counter, are not checked.
///
/// Any thread. Several threads at once may use one model, unless the function changes buffers.
/// Threads share LibTorch's default generators.
template <class Function, class... Inputs>
auto checkpoint(CheckpointOptions options, Function&& function, Inputs&&... inputs) {
  using Arguments = std::tuple<typename detail::KeptInput<std::decay_t<Inputs>>::type...>;
  using Output = std::decay_t<decltype(detail::call_forward(
      std::declval<std::decay_t<Function>&>(), std::declval<std::decay_t<Inputs>&>()...))>;
  static_assert(!std::is_void_v<Output>, "checkpoint: the function must return its outputs");
  static_assert(std::is_void_v<Output> || detail::ShowsItsTensors<Output>::value,
                "checkpoint: the function returns a type that may hide tensors. Return tensors, "
                "numbers and strings, and vectors, arrays, tuples, pairs, "
                "optionals and std::maps of them.");

  Arguments arguments(
      detail::KeptInput<std::decay_t<Inputs>>::keep(std::forward<Inputs>(inputs))...);
  if (!torch::autograd::GradMode::is_enabled()) {
    return detail::call_with<Output, std::decay_t<Inputs>...>(function, arguments);
  }
  if constexpr (requires {
                  { function->buffers() } -> std::convertible_to<std::vector<at::Tensor>>;
                }) {
    const auto own = function->buffers();
    options.buffers.insert(options.buffers.end(), own.begin(), own.end());
  }
  detail::RecomputeContext context;
  context.buffers = std::move(options.buffers);
  if (options.preserve_rng_state) context.rng = detail::rng_state_to_keep();

  const std::vector<at::Tensor> tensors = detail::tensors_of(arguments);
  // The node keeps the tensors itself.
  detail::replace_tensors(arguments, std::vector<at::Tensor>(tensors.size()));
  std::optional<Output> result;
  auto on_tensors = [function = std::decay_t<Function>(std::forward<Function>(function)),
                     arguments = std::move(arguments),
                     first = &result](std::vector<at::Tensor> given) mutable {
    Arguments now = arguments;
    detail::replace_tensors(now, given);
    given.clear();
    auto output = detail::call_with<Output, std::decay_t<Inputs>...>(function, now);
    std::vector<at::Tensor> outputs = detail::tensors_of(output);
    if (first) {
      detail::replace_tensors(output, std::vector<at::Tensor>(outputs.size()));
      first->emplace(std::move(output));
      first = nullptr;
    }
    return outputs;
  };
  const auto outputs =
      detail::RecomputeNode::run(std::move(on_tensors), tensors, std::move(context));
  detail::replace_tensors(*result, outputs);
  return *std::move(result);
}

/// checkpoint() with default options.
template <class Function, class... Inputs>
requires(!std::same_as<std::decay_t<Function>, CheckpointOptions>) auto checkpoint(
    Function&& function, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions{}, std::forward<Function>(function),
                    std::forward<Inputs>(inputs)...);
}

/// Runs a torch::nn::Sequential in `segments` parts, whose lengths differ by at most one module.
/// All parts except the last run under checkpoint(). Between forward and backward, the inputs of
/// these parts and the activations of the last part are stored. Backward holds the activations of
/// one part at a time. For n equal layers, about sqrt(n) parts need the least memory. Each module
/// takes and returns one tensor; their buffers need not be in `options`. Never synchronises.
/// Errors: no module; fewer than one segment; more segments than modules.
template <class Sequential>
at::Tensor checkpoint_sequential(Sequential& sequential, int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options = {}) {
  const auto size = static_cast<int64_t>(sequential->size());
  TORCH_CHECK_VALUE(size > 0, "checkpoint_sequential: the Sequential has no modules. Add some.");
  TORCH_CHECK_VALUE(segments >= 1 && segments <= size, "checkpoint_sequential: cannot split ", size,
                    " modules into ", segments, " segments. Pass a number from 1 to ", size, ".");
  for (int64_t segment = 0; segment < segments; ++segment) {
    std::vector modules(sequential->begin() + segment * size / segments,
                        sequential->begin() + (segment + 1) * size / segments);
    CheckpointOptions with_buffers = options;
    for (const auto& module : modules) {
      const auto own = module.ptr()->buffers();
      with_buffers.buffers.insert(with_buffers.buffers.end(), own.begin(), own.end());
    }
    auto forward = [modules = std::move(modules)](at::Tensor x) mutable {
      for (auto& module : modules) x = module.template forward<at::Tensor>(std::move(x));
      return x;
    };
    input = segment + 1 == segments
                ? forward(std::move(input))
                : checkpoint(std::move(with_buffers), std::move(forward), input);
  }
  return input;
}

/// Runs a torch::nn::Sequential under checkpoint() in the number of parts that needs the least
/// memory: the square root of the number of modules, rounded.
template <class Sequential>
at::Tensor checkpoint_sequential(Sequential& sequential, at::Tensor input,
                                 const CheckpointOptions& options = {}) {
  const auto root = std::llround(std::sqrt(static_cast<double>(sequential->size())));
  return checkpoint_sequential(sequential, std::max<int64_t>(root, 1), std::move(input), options);
}

}  // namespace TORCHAMP_NAMESPACE
