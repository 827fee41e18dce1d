// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/ne.h>
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

namespace TORCHAMP_NAMESPACE::detail {

// Note [First steps of SGD]
// A momentum buffer starts as the gradient of the first step, undampened. ATen's kernel does this
// if is_first_step is true. But it may skip this step like any other, so without a read the host
// cannot know whether the buffer was filled. (PyTorch's own optimizer assumes that it was, and
// continues with uninitialised memory.) Here buffers start as zeros, and the device counts steps
// until one was taken. The count is copied to the host until that step has arrived there; nothing
// waits for the copy. Without dampening, a later step with a buffer of zeros gives the same result
// as the first step: the count matters only if dampening is set later. With dampening, as long as
// the host has no answer, the kernel is called twice: as for the first step, and as for a later
// step. Each call has a gate and is skipped if the gate is 1: the first if there was an earlier
// step, the second if there was none, and both if the step is skipped anyway.
struct SgdKernel
    : KernelBase<torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState> {
  static constexpr const char* name = "FusedSGD";
  static constexpr const char* op = "aten::_fused_sgd_";
  static constexpr bool elementwise = true;
  static constexpr bool apart = true;
  static constexpr bool counts_first_only = true;

  static std::size_t kinds(const Options& o) { return o.momentum() == 0 ? 0 : 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.momentum_buffer(); }
  static bool counted(const Options& o) { return o.momentum() != 0; }
  static bool uses_counter(const Options& o) { return counted(o) && o.dampening() != 0; }
  static int64_t steps(const State& s) { return s.momentum_buffer().defined() ? 1 : 0; }

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.lacks_op || (cpu_loses_16_bit_steps && list.device.is_cpu() && is_16_bit(list.dtype)))
      return step_flat(o, list, scalars);
    const auto& found_inf = scalars.found_inf();
    if (!uses_counter(o) || list.counter->at_least > 0) {
      call(o, list, /*first=*/false, scalars.grad_scale(), found_inf);
    } else if (list.counter->at_most == 0) {
      call(o, list, /*first=*/true, scalars.grad_scale(), found_inf);
    } else {
      const at::Tensor& steps_before = list.counter->value;
      at::Tensor any = at::empty_like(steps_before), none = at::empty_like(steps_before);
      at::ne_out(any, steps_before, 0.);
      at::eq_out(none, steps_before, 0.);
      const auto gate = [&](const at::Tensor& skips) {
        return found_inf ? skips.maximum(*found_inf) : skips;
      };
      call(o, list, /*first=*/true, scalars.grad_scale(), gate(any));
      call(o, list, /*first=*/false, scalars.grad_scale(), gate(none));
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
      if (uses_counter(o)) {
        const at::Tensor is_first = list.counter->value.eq(0.).to(gradient.scalar_type());
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

}  // namespace TORCHAMP_NAMESPACE::detail
