// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// Note [Steps without a fused kernel]
// Where a device has no fused kernel that heeds the scale and the flag, the step consists of
// _foreach_ ops, which take the lists in one go, too, and reads nothing either. Gradients are
// copied into one piece, divided, and zeroed if the step is skipped, so that all that follows is
// finite; what is added to parameters and states is then multiplied by 0. 16-bit numbers are
// stepped in fp32 copies. For one list that takes some 30 launches instead of one, 15 to 20 of
// which go over all parameters, and memory for two or three copies of the gradients meanwhile.

/// The lists of one step as `_foreach_` ops are to take them, and 0-dim tensors to scale them by.
class ForeachStep {
 public:
  std::vector<at::Tensor> params, grads;       ///< with at least the precision of fp32
  std::vector<std::vector<at::Tensor>> state;  ///< by kind
  at::Tensor taken;  ///< 1, or 0 if the step is skipped; as all numbers here, fp64 if those are

  ForeachStep(const StepList& list, const StepScalars& scalars)
      : params(list.params), state(list.state), list_(list) {
    if (is_16_bit(list.dtype)) {
      widen(params);
      for (auto& tensors : state) widen(tensors);
    }
    taken = scalars.found_inf() ? at::rsub(*scalars.found_inf(), 1.) : scalars.one();
    if (list.dtype == at::kDouble) taken = taken.to(at::kDouble);
    take_gradients(scalars);
  }

  /// 1 if the step is skipped: keeps denominators from being 0 then.
  at::Tensor skipped() const { return at::rsub(taken, 1.); }

  /// How often the parameters have been stepped, this step included unless it is skipped.
  at::Tensor count() const { return list_.counter->value.to(taken.scalar_type()); }

  /// The learning rate, or 0 if the step is skipped.
  at::Tensor rate_if_taken(double rate) const {
    return list_.rate.defined() ? taken.mul(list_.rate) : taken.mul(rate);
  }

  /// Adds `weight` times the parameters to the gradients.
  void decay(double weight) {
    if (weight != 0.) at::_foreach_add_(grads, params, weight);
  }

  /// Moves each of `tensors` towards its target, `weight` of the way; changes the targets.
  static void move(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& targets,
                   const at::Tensor& weight) {
    at::_foreach_add_(targets, tensors, -1.);
    at::_foreach_mul_(targets, weight);
    at::_foreach_add_(tensors, targets);
  }

  /// Subtracts `rate` times `direction`, which it changes, from the parameters.
  void descend(const std::vector<at::Tensor>& direction, const at::Tensor& rate) {
    at::_foreach_mul_(direction, rate);
    at::_foreach_add_(params, direction, -1.);
  }

  /// Gives the optimizer what has become of its parameters and states.
  void store() const {
    if (!is_16_bit(list_.dtype)) return;
    at::_foreach_copy_(list_.params, params);
    for (std::size_t k = 0; k < state.size(); ++k) at::_foreach_copy_(list_.state[k], state[k]);
  }

 private:
  static void widen(std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> wide;
    wide.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      wide.push_back(at::empty_like(tensor, tensor.options().dtype(at::kFloat)));
    }
    at::_foreach_copy_(wide, tensors);
    tensors = std::move(wide);
  }

  void take_gradients(const StepScalars& scalars) {
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& grad : list_.grads)
      pieces.push_back(grad.as_strided({grad.numel()}, {1}));
    at::Tensor all = at::cat(pieces);
    all = all.to(taken.scalar_type());
    if (scalars.grad_scale()) all.div_(*scalars.grad_scale());
    if (scalars.found_inf()) all.masked_fill_(scalars.found_inf()->to(at::kBool), 0.);
    int64_t offset = 0;
    for (const at::Tensor& grad : list_.grads) {
      grads.push_back(all.as_strided(grad.sizes(), grad.strides(), offset));
      offset += grad.numel();
    }
  }

  const StepList& list_;
};

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
