// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/div.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsub.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <cstddef>
#include <type_traits>
#include <utility>

#include "torchamp/detail/core/optim/device_scalars.h"
#include "torchamp/detail/core/optim/flat_step.h"
#include "torchamp/detail/core/optim/kernel.h"
#include "torchamp/detail/core/optim/step_list.h"

namespace TORCHAMP_NAMESPACE::detail {

template <class LibTorch, class Options, class State, auto kernel, auto kernel_of_rate_on_device>
struct AdamKernelBase : KernelBase<LibTorch, Options, State> {
  static std::size_t kinds(const Options& o) { return o.amsgrad() ? 3 : 2; }
  static at::Tensor& tensor(State& s, std::size_t kind) {
    return kind == 0 ? s.exp_avg() : kind == 1 ? s.exp_avg_sq() : s.max_exp_avg_sq();
  }

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.lacks_op) return step_flat(o, list, scalars);
    const auto with = [&](auto chosen, const auto& rate) {
      const auto [beta1, beta2] = o.betas();
      chosen(list.params, list.grads, list.state[0], list.state[1],
             o.amsgrad() ? at::TensorList(list.state[2]) : at::TensorList(), list.counters, rate,
             beta1, beta2, o.weight_decay(), o.eps(), o.amsgrad(), /*maximize=*/false,
             scalars.grad_scale(), scalars.found_inf());
    };
    list.rate.defined() ? with(kernel_of_rate_on_device, list.rate) : with(kernel, o.lr());
  }

 private:
  /// By ordinary ops on copies: FlatStep divides the gradients, and stores nothing if the step is
  /// skipped.
  static void step_flat(const Options& o, const StepList& list, const StepScalars& scalars) {
    FlatStep step(list, scalars, o.lr());
    const auto [beta1, beta2] = o.betas();
    const at::Tensor count = step.count();
    const auto correction = [&](double beta) { return at::rsub(at::pow(beta, count), 1.); };
    if constexpr (std::is_same_v<Options, torch::optim::AdamWOptions>) {
      step.params.mul_(at::rsub(step.rate, 1., o.weight_decay()));
    } else {
      step.decay(o.weight_decay());
    }
    step.state[0].mul_(beta1).add_(step.grads, 1. - beta1);
    step.state[1].mul_(beta2).addcmul_(step.grads, step.grads, 1. - beta2);
    if (o.amsgrad()) at::maximum_out(step.state[2], step.state[2], step.state[1]);
    at::Tensor direction = step.state[o.amsgrad() ? 2 : 1].sqrt();
    direction.div_(correction(beta2).sqrt_()).add_(o.eps());
    at::div_out(direction, step.state[0], direction);
    step.descend(std::move(direction), step.rate.div(correction(beta1)));
  }
};

struct AdamKernel
    : AdamKernelBase<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState,
                     &at::_ops::_fused_adam_::call, &at::_ops::_fused_adam__tensor_lr::call> {
  static constexpr const char* name = "FusedAdam";
  static constexpr const char* op = "aten::_fused_adam_";
  static constexpr bool elementwise = true;
};

struct AdamWKernel
    : AdamKernelBase<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState,
                     &at::_ops::_fused_adamw_::call, &at::_ops::_fused_adamw__tensor_lr::call> {
  static constexpr const char* name = "FusedAdamW";
  static constexpr const char* op = "aten::_fused_adamw_";
  static constexpr bool elementwise = true;
};

}  // namespace TORCHAMP_NAMESPACE::detail
