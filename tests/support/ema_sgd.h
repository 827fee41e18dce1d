// SPDX-License-Identifier: BSD-3-Clause
// A fused optimizer that neither LibTorch nor ATen has, made in the way of the library's own:
// SGD along an exponential moving average of the gradients.
#pragma once

#include <torch/arg.h>
#include <torchamp/optim.h>

#include <tuple>

#include "torchamp/detail/core/optim/stored_optimizer.h"

struct EmaSgdOptions : torchamp::detail::StoredOptions<EmaSgdOptions> {
  EmaSgdOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, momentum) = 0.9;
  TORCH_ARG(double, weight_decay) = 0.;

 public:
  template <class Self>
  static auto fields(Self& o) {
    using torchamp::detail::Field;
    return std::tuple{Field{"lr", o.lr()}, Field{"momentum", o.momentum()},
                      Field{"weight_decay", o.weight_decay()}};
  }
  void check() const {
    TORCH_CHECK_VALUE(lr() >= 0., "FusedEmaSgd: lr is ", lr(), ". It must be at least 0.");
  }
};

struct EmaSgdState : torchamp::detail::StoredState<EmaSgdState> {
  TORCH_ARG(at::Tensor, average);

 public:
  template <class Self>
  static auto fields(Self& state) {
    return std::tuple{torchamp::detail::Field{"average", state.average()}};
  }
};

struct EmaSgdKernel : torchamp::detail::StoredKernelBase<EmaSgdOptions, EmaSgdState> {
  static constexpr const char* name = "FusedEmaSgd";
  static constexpr bool elementwise = true;

  static void step(const Options& o, const torchamp::detail::StepList& list,
                   const torchamp::detail::StepScalars& scalars) {
    const torchamp::detail::FlatStep step(list, scalars, o.lr());
    step.decay(o.weight_decay());
    step.state[0].lerp_(step.grads, 1. - o.momentum());
    step.descend(step.state[0], step.rate);
  }
};

using FusedEmaSgd = torchamp::FusedOptimizerOf<EmaSgdKernel>;
