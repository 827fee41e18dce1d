// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>

#include "torchamp/detail/core/optim/device_scalars.h"
#include "torchamp/detail/core/optim/step_list.h"
#include "torchamp/detail/core/optim/stored_fields.h"

namespace TORCHAMP_NAMESPACE::detail {

/// What distinguishes one fused optimizer from another:
///
///     LibTorch           the class of its counterpart there, or a StoredOptimizer: its constructor
///                        checks the options, and it reads and writes archives
///     Options, State     the types of options and states
///     name               for error texts
///     apart              whether a call needs parameters with one common count of steps
///     kinds(options)     how many kinds of state tensors a parameter has
///     tensor(state, k)   the state tensor of kind k; callable for kind 0 with all options
///     initial(k, …)      the initial value of a state tensor
///     counted(options)   whether steps are counted on the device
///     steps, set_steps   the count that LibTorch's state holds, for parameters that are counted
///     step(options, …)   the step of all parameters of a list
///     uses_counter(options)
///                        whether step() uses list.counter at all
///     counts_first_only  whether step() needs the counter only to check for the first step; the
///                        counter then counts earlier steps, until one was surely taken
///     op                 ATen's op that step() calls, or null. If the device lacks the op,
///                        list.lacks_op is true. In both cases all parameters of a list have one
///                        count
///     elementwise        whether step() treats each element independently; then step() may be
///                        called with parts of parameters
///     why_not(param)     why step() cannot take a parameter; empty if it can
///
/// Derive from KernelBase, which has the members that most kernels share, or from StoredKernelBase
/// if LibTorch lacks the optimizer.
///
/// step() divides the gradients by scalars.grad_scale(), if it is set, and changes nothing if
/// scalars.found_inf() is set and 1. Counters other than counts_first_only already include the
/// step. step() never reads the device. list.rate, if defined, replaces the options' learning rate.
/// ATen's fused ops do all this; a kernel that ATen lacks is a FlatStep.
template <class K>
concept OptimizerKernel = std::derived_from<typename K::LibTorch, torch::optim::Optimizer> &&
    requires(const typename K::Options& options, typename K::State& state, const StepList& list,
             const StepScalars& scalars, const at::Tensor& param) {
  { K::name } -> std::convertible_to<const char*>;
  { K::op } -> std::convertible_to<const char*>;
  { K::apart } -> std::convertible_to<bool>;
  { K::counts_first_only } -> std::convertible_to<bool>;
  { K::elementwise } -> std::convertible_to<bool>;
  { K::why_not(param) } -> std::convertible_to<std::string>;
  { K::kinds(options) } -> std::same_as<std::size_t>;
  { K::tensor(state, std::size_t{}) } -> std::same_as<at::Tensor&>;
  { K::initial(std::size_t{}, param, options) } -> std::same_as<at::Tensor>;
  { K::counted(options) } -> std::same_as<bool>;
  { K::uses_counter(options) } -> std::same_as<bool>;
  { K::steps(state) } -> std::same_as<int64_t>;
  K::set_steps(state, int64_t{});
  K::step(options, list, scalars);
};

/// The common part of most kernels. If the state lists its fields, they are its kinds of tensors.
/// If the state has no step(), steps are not counted.
template <class LibTorch_, class Options_, class State_>
struct KernelBase {
  using LibTorch = LibTorch_;
  using Options = Options_;
  using State = State_;
  static constexpr const char* op = nullptr;
  static constexpr bool apart = false;
  static constexpr bool counts_first_only = false;
  static constexpr bool elementwise = false;

  static std::string why_not(const at::Tensor&) { return ""; }
  static std::size_t kinds(const Options&) requires HasFields<State> {
    return number_of_tensors<State>();
  }
  static at::Tensor& tensor(State& state, std::size_t kind) requires HasFields<State> {
    return tensor_of(state, kind);
  }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options&) {
    return at::zeros_like(param);
  }
  static bool counted(const Options&) { return has_step; }
  static bool uses_counter(const Options&) { return true; }
  static int64_t steps(const State& s) {
    if constexpr (has_step) return s.step();
    return 0;
  }
  static void set_steps(State& s, int64_t steps) {
    if constexpr (has_step) s.step(steps);
  }

 private:
  static constexpr bool has_step = requires(const State& s) { s.step(); };
};

}  // namespace TORCHAMP_NAMESPACE::detail
