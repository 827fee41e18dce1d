// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/optim/foreach_step.h"
#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/tensors.h"

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
struct SgdKernel {
  using LibTorch = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr const char* name = "FusedSGD";
  static constexpr const char* op = "aten::_fused_sgd_";
  static constexpr bool apart = true;
  static constexpr bool counts_first_only = true;

  static std::size_t kinds(const Options& o) { return o.momentum() == 0 ? 0 : 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.momentum_buffer(); }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options&) {
    return at::zeros_like(param);
  }
  static bool counted(const Options& o) { return o.momentum() != 0; }
  static bool asks_counter(const Options& o) { return counted(o) && o.dampening() != 0; }
  static int64_t steps(const State& s) { return s.momentum_buffer().defined() ? 1 : 0; }
  static void set_steps(State&, int64_t) {}

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.by_foreach) return step_by_foreach(o, list, scalars);
    const auto& found_inf = scalars.found_inf();
    if (!asks_counter(o) || list.counter->at_least > 0) {
      call(o, list, /*first=*/false, scalars.grad_scale(), found_inf);
    } else if (list.counter->at_most == 0) {
      call(o, list, /*first=*/true, scalars.grad_scale(), found_inf);
    } else {
      const at::Tensor& gates = list.counter->gates;
      call(o, list, /*first=*/true, scalars.grad_scale(), gates.select(0, 0));
      call(o, list, /*first=*/false, scalars.grad_scale(), gates.select(0, 1));
    }
  }

 private:
  static void step_by_foreach(const Options& o, const StepList& list, const StepScalars& scalars) {
    ForeachStep step(list, scalars);
    step.decay(o.weight_decay());
    const at::Tensor rate = step.rate_if_taken(o.lr());
    if (o.momentum() != 0.) {
      const std::vector<at::Tensor>& buffers = step.state[0];
      at::Tensor weight = step.taken;  // of the gradient in the buffer
      if (asks_counter(o))
        weight =
            at::rsub(step.count().ne(1.).to(weight.scalar_type()), 1., o.dampening()).mul_(weight);
      const std::vector<at::Tensor> parts = at::_foreach_mul(step.grads, weight);
      at::_foreach_mul_(buffers, step.taken.mul(o.momentum() - 1.).add_(1.));
      at::_foreach_add_(buffers, parts);
      if (o.nesterov()) {
        at::_foreach_add_(step.grads, buffers, o.momentum());
      } else {
        at::_foreach_copy_(step.grads, buffers);
      }
    }
    step.descend(step.grads, rate);
    step.store();
  }

  // Found in 2.11: the CPU's kernel computes 16-bit parameters by vectors and stores only the rest.
  static constexpr bool cpu_loses_16_bit_steps = TORCHAMP_LIBTORCH < 215;

  template <bool steps_are_lost = cpu_loses_16_bit_steps>
  static void call(const Options& o, const StepList& list, bool first,
                   const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf) {
    if constexpr (steps_are_lost) {
      if (list.device.is_cpu() && is_16_bit(list.dtype)) {
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
