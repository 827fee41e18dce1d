// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sgd.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/optim/device_scalars.h"
#include "torchamp/detail/core/optim/flat_step.h"
#include "torchamp/detail/core/optim/kernel.h"
#include "torchamp/detail/core/optim/step_list.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [First steps of SGD]
// A momentum buffer starts as the first gradient that is stepped with, undampened. ATen's kernel
// does so when it is told is_first_step, and then skips or not like any other step, so that a host
// that does not read never learns whether the buffer was filled (PyTorch's own optimizer takes it
// for granted and goes on with uninitialised memory). Here buffers start as zeros, and the device
// keeps two numbers, whether there was a step and whether there was none. Each step has them copied
// to the host until it has learned that there was a step; nothing waits for the copy. Without
// dampening, a later step makes of zeros what the first step makes of anything: the numbers matter
// only if dampening is set later. With dampening, while the host does not know, the kernel is
// called twice, as for the first step and as for a later one, and each call is skipped where its
// gate is 1: the larger of one of these numbers and the flag.
struct SgdKernel
    : KernelBase<torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState> {
  static constexpr const char* name = "FusedSGD";
  static constexpr const char* op = "aten::_fused_sgd_";
  static constexpr bool apart = true;
  static constexpr bool counts_first_only = true;

  static std::size_t kinds(const Options& o) { return o.momentum() == 0 ? 0 : 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.momentum_buffer(); }
  static bool counted(const Options& o) { return o.momentum() != 0; }
  static bool asks_counter(const Options& o) { return counted(o) && o.dampening() != 0; }
  static int64_t steps(const State& s) { return s.momentum_buffer().defined() ? 1 : 0; }
  static void set_steps(State&, int64_t) {}

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.lacks_op || (cpu_loses_16_bit_steps && list.device.is_cpu() && is_16_bit(list.dtype)))
      return step_flat(o, list, scalars);
    const auto& found_inf = scalars.found_inf();
    if (!asks_counter(o) || list.counter->at_least > 0) {
      call(o, list, /*first=*/false, scalars.grad_scale(), found_inf);
    } else if (list.counter->at_most == 0) {
      call(o, list, /*first=*/true, scalars.grad_scale(), found_inf);
    } else {
      const at::Tensor& numbers = list.counter->numbers;
      const at::Tensor gates = found_inf ? numbers.maximum(*found_inf) : numbers;
      call(o, list, /*first=*/true, scalars.grad_scale(), gates.select(0, 0));
      call(o, list, /*first=*/false, scalars.grad_scale(), gates.select(0, 1));
    }
  }

 private:
  // Found in 2.11: the CPU's kernel computes 16-bit parameters by vectors and stores only the rest.
  static constexpr bool cpu_loses_16_bit_steps = TORCHAMP_LIBTORCH < 215;

  static void step_flat(const Options& o, const StepList& list, const StepScalars& scalars) {
    const FlatStep step(list, scalars, o.lr());
    step.decay(o.weight_decay());
    at::Tensor direction = step.grads;
    if (o.momentum() != 0.) {
      at::Tensor gradient = step.grads;  // for the buffer
      if (asks_counter(o)) {
        const at::Tensor is_first = list.counter->numbers.select(0, 1).to(gradient.scalar_type());
        gradient = gradient.mul(is_first.mul(o.dampening()).add_(1. - o.dampening()));
      }
      const at::Tensor& buffer = step.state[0].mul_(o.momentum()).add_(gradient);
      direction = o.nesterov() ? direction.add(buffer, o.momentum()) : buffer;
    }
    step.descend(direction, step.rate);
  }

  static void call(const Options& o, const StepList& list, bool first,
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
