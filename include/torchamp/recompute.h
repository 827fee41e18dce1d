// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief checkpoint: activations that are computed again in backward and not kept.

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

#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/recompute/node.h"
#include "torchamp/detail/rng_state.h"
#include "torchamp/detail/tensor_tree.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {

/// What checkpoint() keeps of an input of type Given for backward: of a list the values too.
template <class Given>
struct KeptInput {
  static_assert(!RefersToValues<Given>::value,
                "checkpoint: an input refers to values that may be gone when backward runs the "
                "function again. Pass a std::vector or an at::ArrayRef of the values.");
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

/// Calls the function with the inputs as they were given.
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
  TORCH_CHECK(
      !GraphBody::is_running(),
      "checkpoint: the iteration of a CudaGraph cannot keep the random state, which lies on "
      "the host. ",
      remedy);
  try {
    return RngState::now();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false,
                "checkpoint: the random state cannot be kept, as it cannot while a CUDA "
                "graph is captured. ",
                remedy, " The error was: ", error.what_without_backtrace());
  }
}

}  // namespace detail

/// What checkpoint() puts back for the recomputation.
struct CheckpointOptions {
  /// The states of LibTorch's default generators (the CPU's, and those of every device in use), so
  /// that dropout drops the same. A few microseconds; false where the function draws no numbers.
  /// An error within a CudaGraph, or wherever else a CUDA graph is captured, which cannot hold it.
  bool preserve_rng_state = true;

  /// Buffers that the function changes, and that are to change once and not again in backward, such
  /// as batch norm's running statistics: `{.buffers = block->buffers()}`. Where the function is a
  /// module holder, its buffers need not be named.
  std::vector<at::Tensor> buffers = {};
};

/// Calls function(inputs...) and keeps none of its activations: backward runs it again. Saves
/// memory for the time of one more forward.
///
///     x = torchamp::checkpoint(block, x);                          // a module holder
///     x = torchamp::checkpoint([=](auto x) { return block->forward(x).relu(); }, x);
///
/// The function runs again under the forward's autocast state, policy and random state. Neither run
/// uses LibTorch's cache of cast weights, which all threads share: each use of a weight is a cast
/// of its own, as with `{.cache_enabled = false}`. (Where a function uses a weight many times, as
/// an unrolled recurrent layer does, take a WeightCache of torchamp's.) So on a CPU the gradients
/// are, bit for bit, those of the plain call under such a guard, or under one with torchamp's
/// cache: where LibTorch's cache would share a cast, it adds up the gradients of the uses in 16
/// bits, and this in fp32. The order may differ in which the parts of a gradient are added up that
/// a tensor gets from several nested calls. Parameters and other tensors that it captures get their
/// gradients too, whether or not an input needs one, and also from torch::autograd::grad and with
/// create_graph (gradients of gradients may differ in 16 bits' rounding). Checkpoints nest. With
/// grad mode off the function is called, and that is all. Reads no device.
///
/// Inputs and outputs are tensors, other values, and vectors, arrays, tuples, pairs, maps and
/// optionals of them. There may be several outputs, and what is not a tensor passes through. An
/// output type that may hide tensors (a struct that may hold some, an unordered_map) does not
/// compile. Of an at::ArrayRef the values are kept; other views of values do not compile. An input
/// or captured tensor that the function returns as it is stays that tensor; any other output that
/// shares memory with an input, a captured tensor or another output is returned as a copy, so that
/// changing it in place does not change them.
///
/// The function is copied and called again during backward, perhaps on another thread: what it
/// captures by reference must live until then, and it must do the same both times.
///
/// Errors: whatever the function throws, from the call or from backward; a function that changes an
/// input in place; a recomputation whose outputs have other shapes, or that uses other parameters;
/// parameters, buffers and other tensors that an op of the function has read, and that were written
/// to between the call and backward. Not seen are writes that LibTorch does not count: through
/// `.data()`, as its own SGD makes them, or a pointer. What the function itself writes to, such as
/// a count of batches, is not looked at.
///
/// Any thread, and several at once over one model, but for buffers that the function changes, and
/// for random numbers: threads share LibTorch's default generators.
template <class Function, class... Inputs>
auto checkpoint(CheckpointOptions options, Function&& function, Inputs&&... inputs) {
  using Arguments = std::tuple<typename detail::KeptInput<std::decay_t<Inputs>>::type...>;
  using Output = std::decay_t<decltype(detail::call_forward(
      std::declval<std::decay_t<Function>&>(), std::declval<std::decay_t<Inputs>&>()...))>;
  static_assert(!std::is_void_v<Output>, "checkpoint: the function must return its outputs");
  static_assert(std::is_void_v<Output> || detail::ShowsItsTensors<Output>::value,
                "checkpoint: the function returns a type that may hold tensors out of sight. "
                "Return tensors, numbers and strings, and vectors, arrays, tuples, pairs, "
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

/// Runs a torch::nn::Sequential in `segments` parts of equal length, each but the last under
/// checkpoint(). Between forward and backward it keeps the inputs of the parts, and in backward the
/// activations of one part. For n equal layers, about sqrt(n) parts keep least. Each module takes
/// and returns one tensor; their buffers need not be named in `options`. Reads no device. Error:
/// fewer than one segment, or more than modules.
template <class Sequential>
at::Tensor checkpoint_sequential(Sequential& sequential, int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options = {}) {
  const auto size = static_cast<int64_t>(sequential->size());
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

/// Runs a torch::nn::Sequential under checkpoint() in as many parts as keep least: the square root
/// of the number of modules, rounded.
template <class Sequential>
at::Tensor checkpoint_sequential(Sequential& sequential, at::Tensor input,
                                 const CheckpointOptions& options = {}) {
  const auto root = std::llround(std::sqrt(static_cast<double>(sequential->size())));
  return checkpoint_sequential(sequential, std::max<int64_t>(root, 1), std::move(input), options);
}

}  // namespace TORCHAMP_NAMESPACE
