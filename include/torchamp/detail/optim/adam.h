// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "torchamp/detail/optim/foreach_step.h"
#include "torchamp/detail/optim/kernel.h"

namespace torchamp::detail {

/// Adam's step of `_foreach_` ops; AdamW's if `decays_params`.
template <class Options>
void adam_by_foreach(const Options& o, const StepList& list, const StepScalars& scalars,
                     bool decays_params) {
  ForeachStep step(list, scalars);
  const auto [beta1, beta2] = o.betas();
  const at::Tensor rate = step.rate_if_taken(o.lr()), skipped = step.skipped();
  const at::Tensor count = step.count();
  const auto correction = [&](double beta) {
    return at::rsub(at::pow(beta, count), 1.).add_(skipped);
  };
  if (!decays_params) {
    step.decay(o.weight_decay());
  } else if (o.weight_decay() != 0.) {
    at::_foreach_mul_(step.params, at::rsub(rate, 1., o.weight_decay()));
  }
  std::vector<at::Tensor> squares = at::_foreach_mul(step.grads, step.grads);
  step.move(step.state[0], step.grads, step.taken.mul(1. - beta1));
  step.move(step.state[1], squares, step.taken.mul(1. - beta2));
  if (o.amsgrad()) {
    squares = at::_foreach_maximum(step.state[1], step.state[2]);
    step.move(step.state[2], squares, step.taken);
  }
  std::vector<at::Tensor> denominators = at::_foreach_sqrt(step.state[o.amsgrad() ? 2 : 1]);
  at::_foreach_div_(denominators, correction(beta2).sqrt_());
  at::_foreach_add_(denominators, skipped.add(o.eps()));
  std::vector<at::Tensor> direction = at::_foreach_div(step.state[0], denominators);
  step.descend(direction, rate.div(correction(beta1)));
  step.store();
}

template <class LibTorch_, class Options_, class State_, auto kernel, auto kernel_of_rate_on_device>
struct AdamKernelBase {
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
    constexpr bool decays_params = std::is_same_v<Options, torch::optim::AdamWOptions>;
    if (list.by_foreach) return adam_by_foreach(o, list, scalars, decays_params);
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

struct AdamKernel
    : AdamKernelBase<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState,
                     &at::_ops::_fused_adam_::call, &at::_ops::_fused_adam__tensor_lr::call> {
  static constexpr const char* name = "FusedAdam";
  static constexpr const char* op = "aten::_fused_adam_";
};

struct AdamWKernel
    : AdamKernelBase<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState,
                     &at::_ops::_fused_adamw_::call, &at::_ops::_fused_adamw__tensor_lr::call> {
  static constexpr const char* name = "FusedAdamW";
  static constexpr const char* op = "aten::_fused_adamw_";
};

}  // namespace torchamp::detail
