// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>

#include <cstddef>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/optim/device_scalars.h"
#include "torchamp/detail/core/optim/flat_step.h"
#include "torchamp/detail/core/optim/kernel.h"
#include "torchamp/detail/core/optim/step_list.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

struct AdagradKernel : KernelBase<torch::optim::Adagrad, torch::optim::AdagradOptions,
                                  torch::optim::AdagradParamState> {
  static constexpr const char* name = "FusedAdagrad";
  static constexpr const char* op = "aten::_fused_adagrad_";
  static constexpr bool elementwise = true;
  static constexpr bool kernel_takes_rate_on_device = TORCHAMP_LIBTORCH >= 208;
  static constexpr bool apart = !kernel_takes_rate_on_device;  // step_flat() wants it

  static std::size_t kinds(const Options&) { return 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.sum(); }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options& defaults) {
    return at::full_like(param, defaults.initial_accumulator_value());
  }
  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.lacks_op || (list.rate.defined() && !kernel_takes_rate_on_device)) {
      return step_flat(o, list, scalars);
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
  static void step_flat(const Options& o, const StepList& list, const StepScalars& scalars) {
    const FlatStep step(list, scalars, o.lr());
    step.decay(o.weight_decay());
    const at::Tensor direction =
        step.grads.div(step.state[0].addcmul_(step.grads, step.grads).sqrt().add_(o.eps()));
    const at::Tensor slowdown = step.count().sub(1.).mul_(o.lr_decay()).add_(1.);
    step.descend(direction, step.rate.div(slowdown));
  }
};

}  // namespace TORCHAMP_NAMESPACE::detail
