// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "torchamp/detail/optim/scalars.h"
#include "torchamp/detail/optim/step_list.h"

// What distinguishes one fused optimizer from another. A rule has
//   LibTorch           the class of its counterpart there
//   Options, State     the types that go with that
//   name               for error texts
//   kinds(options)     how many kinds of state tensors a parameter has
//   tensor(state, k)   the one of kind k
//   initial(k, …)      what it starts as
//   counted(options)   whether steps are counted on the device
//   apart              whether a call needs parameters with one common count
//   steps, set_steps   the count as LibTorch's state holds it, for parameters that are counted
//   step(options, …)   the call of the kernel

namespace torchamp::detail {

template <class LibTorch_, class Options_, class State_, auto kernel, auto kernel_of_rate_on_device>
struct AdamRuleBase {
  using LibTorch = LibTorch_;
  using Options = Options_;
  using State = State_;
  static constexpr bool apart = false;

  static std::size_t kinds(const Options& o) { return o.amsgrad() ? 3 : 2; }
  static at::Tensor& tensor(State& s, std::size_t kind) {
    return kind == 0 ? s.exp_avg() : kind == 1 ? s.exp_avg_sq() : s.max_exp_avg_sq();
  }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options&) {
    return at::zeros_like(param);
  }
  static bool counted(const Options&) { return true; }
  static int64_t steps(const State& s) { return s.step(); }
  static void set_steps(State& s, int64_t steps) { s.step(steps); }

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    const auto with = [&](auto chosen, const auto& rate) {
      const auto [beta1, beta2] = o.betas();
      chosen(list.params, list.grads, list.state[0], list.state[1],
             o.amsgrad() ? at::TensorList(list.state[2]) : at::TensorList(), list.counters, rate,
             beta1, beta2, o.weight_decay(), o.eps(), o.amsgrad(), /*maximize=*/false,
             scalars.grad_scale(), scalars.found_inf());
    };
    list.rate.defined() ? with(kernel_of_rate_on_device, list.rate) : with(kernel, o.lr());
  }
};

struct AdamRule
    : AdamRuleBase<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState,
                   &at::_ops::_fused_adam_::call, &at::_ops::_fused_adam__tensor_lr::call> {
  static constexpr const char* name = "FusedAdam";
};

struct AdamWRule
    : AdamRuleBase<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState,
                   &at::_ops::_fused_adamw_::call, &at::_ops::_fused_adamw__tensor_lr::call> {
  static constexpr const char* name = "FusedAdamW";
};

struct AdagradRule {
  using LibTorch = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr const char* name = "FusedAdagrad";
  static constexpr bool apart = false;

  static std::size_t kinds(const Options&) { return 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.sum(); }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options& defaults) {
    return at::full_like(param, defaults.initial_accumulator_value());
  }
  static bool counted(const Options&) { return true; }
  static int64_t steps(const State& s) { return s.step(); }
  static void set_steps(State& s, int64_t steps) { s.step(steps); }
  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    const auto with = [&](const auto& rate) {
      at::_fused_adagrad_(list.params, list.grads, list.state[0], list.counters, rate, o.lr_decay(),
                          o.weight_decay(), o.eps(), /*maximize=*/false, scalars.grad_scale(),
                          scalars.found_inf());
    };
    list.rate.defined() ? with(list.rate) : with(o.lr());
  }
};

// Note [First steps of SGD]
// A momentum buffer starts as the first gradient that is stepped with, undampened. ATen's kernel
// does so when it is told is_first_step, and then skips or not like any other step, so that a host
// that does not read never learns whether the buffer was filled (PyTorch's own optimizer takes it
// for granted and goes on with uninitialised memory). Here buffers start as zeros. Without
// dampening, the rule of all later steps makes of zeros what the first step's rule makes of
// anything. With dampening, steps are counted on the device, and while the first step may be still
// to come, the kernel is called twice, by either rule: one of the calls is skipped.
struct SgdRule {
  using LibTorch = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr const char* name = "FusedSGD";
  static constexpr bool apart = true;

  static std::size_t kinds(const Options& o) { return o.momentum() == 0 ? 0 : 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.momentum_buffer(); }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options&) {
    return at::zeros_like(param);
  }
  static bool counted(const Options& o) { return o.momentum() != 0 && o.dampening() != 0; }
  static int64_t steps(const State& s) { return s.momentum_buffer().defined() ? 1 : 0; }
  static void set_steps(State&, int64_t) {}

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    const auto& found_inf = scalars.found_inf();
    if (!counted(o) || list.counter->at_least > 0) {
      call(o, list, /*first=*/false, scalars.grad_scale(), found_inf);
    } else if (list.counter->at_most == 0) {
      call(o, list, /*first=*/true, scalars.grad_scale(), found_inf);
    } else {
      const at::Tensor& count = list.counter->value;  // 1: this would be the first step
      at::Tensor is_later = at::empty_like(count), is_first = at::empty_like(count);
      at::ne_out(is_later, count, scalars.one());
      at::eq_out(is_first, count, scalars.one());
      if (found_inf) {
        at::maximum_out(is_later, is_later, *found_inf);
        at::maximum_out(is_first, is_first, *found_inf);
      }
      call(o, list, /*first=*/true, scalars.grad_scale(), is_later);
      call(o, list, /*first=*/false, scalars.grad_scale(), is_first);
    }
  }

 private:
  // Found in 2.11: the CPU's kernel computes 16-bit parameters by vectors and stores only the rest.
  static constexpr bool cpu_loses_16_bit_steps =
      TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15;

  template <bool steps_are_lost = cpu_loses_16_bit_steps>
  static void call(const Options& o, const StepList& list, bool first,
                   const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf) {
    if constexpr (steps_are_lost) {
      if (list.device.is_cpu() && (list.dtype == at::kHalf || list.dtype == at::kBFloat16)) {
        return call_in_fp32(o, list, first, grad_scale, found_inf);
      }
    }
    call_kernel(o, list, first, grad_scale, found_inf);
  }

  template <class List>
  static void call_in_fp32(const Options& o, const List& list, bool first,
                           const std::optional<at::Tensor>& grad_scale,
                           const std::optional<at::Tensor>& found_inf) {
    List wide = list;
    const auto widen = [](std::vector<at::Tensor>& tensors) {
      for (at::Tensor& tensor : tensors) tensor = tensor.to(at::kFloat);
    };
    widen(wide.params);
    widen(wide.grads);
    for (auto& tensors : wide.state) widen(tensors);
    call_kernel(o, wide, first, grad_scale, found_inf);
    at::_foreach_copy_(list.params, wide.params);
    for (std::size_t k = 0; k < list.state.size(); ++k) {
      at::_foreach_copy_(list.state[k], wide.state[k]);
    }
  }

  static void call_kernel(const Options& o, const StepList& list, bool first,
                          const std::optional<at::Tensor>& grad_scale,
                          const std::optional<at::Tensor>& found_inf) {
    const auto with = [&](const auto& rate) {
      at::_fused_sgd_(list.params, list.grads,
                      o.momentum() == 0 ? at::TensorList() : at::TensorList(list.state[0]),
                      o.weight_decay(), o.momentum(), rate, o.dampening(), o.nesterov(),
                      /*maximize=*/false, first, grad_scale, found_inf);
    };
    list.rate.defined() ? with(list.rate) : with(o.lr());
  }
};

}  // namespace torchamp::detail
