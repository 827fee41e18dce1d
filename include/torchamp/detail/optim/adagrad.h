// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/optim/foreach_step.h"
#include "torchamp/detail/optim/kernel.h"

namespace torchamp::detail {

struct AdagradKernel {
  using LibTorch = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr const char* name = "FusedAdagrad";
  static constexpr const char* op = "aten::_fused_adagrad_";
  static constexpr bool kernel_takes_rate_on_device = TORCHAMP_LIBTORCH >= 208;
  static constexpr bool apart = !kernel_takes_rate_on_device;  // the `_foreach_` ops want it

  static std::size_t kinds(const Options&) { return 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.sum(); }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options& defaults) {
    return at::full_like(param, defaults.initial_accumulator_value());
  }
  static bool counted(const Options&) { return true; }
  static int64_t steps(const State& s) { return s.step(); }
  static void set_steps(State& s, int64_t steps) { s.step(steps); }
  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.by_foreach || (list.rate.defined() && !kernel_takes_rate_on_device)) {
      return step_by_foreach(o, list, scalars);
    }
    const auto with = [&](const auto& rate) {
      at::_fused_adagrad_(list.params, list.grads, list.state[0], list.counters, rate, o.lr_decay(),
                          o.weight_decay(), o.eps(), /*maximize=*/false, scalars.grad_scale(),
                          scalars.found_inf());
    };
#if TORCHAMP_LIBTORCH >= 208
    if (list.rate.defined()) return with(list.rate);
#endif
    with(o.lr());
  }

 private:
  static void step_by_foreach(const Options& o, const StepList& list, const StepScalars& scalars) {
    ForeachStep step(list, scalars);
    step.decay(o.weight_decay());
    const std::vector<at::Tensor> squares = at::_foreach_mul(step.grads, step.grads);
    at::_foreach_mul_(squares, step.taken);
    at::_foreach_add_(step.state[0], squares);
    const std::vector<at::Tensor> denominators = at::_foreach_sqrt(step.state[0]);
    at::_foreach_add_(denominators, step.skipped().add_(o.eps()));
    const at::Tensor slowdown = step.count().sub(1.).clamp_min_(0.).mul_(o.lr_decay());
    at::_foreach_div_(step.grads, denominators);
    step.descend(step.grads, step.rate_if_taken(o.lr()).div_(slowdown.add_(1.)));
    step.store();
  }
};

}  // namespace torchamp::detail
