// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <utility>
#include <vector>

#include "torchamp/detail/optim/fused_optimizer_impl.h"
#include "torchamp/detail/optim/kernels.h"
#include "torchamp/fused_optimizer.h"
#include "torchamp/version.h"

// Optimizers over ATen's fused kernels. Each takes the options of LibTorch's own optimizer of its
// kind, computes the same steps (within rounding), keeps its state in LibTorch's own types, and
// reads and writes its archives, so that one can take the other's place:
//
//     torchamp::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
//     …
//     scaler.step(optimizer);  // reads nothing
//
// A step is one call for each group, device and dtype, however many parameters there are. Its state
// lives on the parameters' device in their dtype. LibTorch's schedulers, groups with options of
// their own, gradients that appear later and closures work as with LibTorch's. See FusedOptimizer
// for what they add.
//
// Parameters are fp32, fp64, fp16 or bf16, dense in memory, each in the optimizer once; gradients
// are dense. Anything else is an error of step(), which then changes nothing. Devices are those for
// which LibTorch has fused kernels: CPU and CUDA, others by release.

// Note [What is compiled when it is used]
// A constructor makes its class's virtual functions, and so all of a fused step. As templates,
// those of the optimizers that a file does not use cost it next to no compile time. What else only
// some programs use and instantiates much is a template for the same reason, with a parameter that
// it could do without.

namespace TORCHAMP_NAMESPACE {

/// torch::optim::Adam, fused.
class FusedAdam : public detail::FusedOptimizerOf<detail::AdamRule> {
 public:
  template <class Deferred = void>
  explicit FusedAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     torch::optim::AdamOptions defaults = {})
      : FusedOptimizerOf(groups, std::move(defaults)) {}
  template <class Deferred = void>
  explicit FusedAdam(std::vector<at::Tensor> params, torch::optim::AdamOptions defaults = {})
      : FusedAdam(detail::one_group(std::move(params)), std::move(defaults)) {}
};

/// torch::optim::AdamW, fused.
class FusedAdamW : public detail::FusedOptimizerOf<detail::AdamWRule> {
 public:
  template <class Deferred = void>
  explicit FusedAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      torch::optim::AdamWOptions defaults = {})
      : FusedOptimizerOf(groups, std::move(defaults)) {}
  template <class Deferred = void>
  explicit FusedAdamW(std::vector<at::Tensor> params, torch::optim::AdamWOptions defaults = {})
      : FusedAdamW(detail::one_group(std::move(params)), std::move(defaults)) {}
};

/// torch::optim::SGD, fused.
class FusedSGD : public detail::FusedOptimizerOf<detail::SgdRule> {
 public:
  template <class Deferred = void>
  explicit FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                    torch::optim::SGDOptions defaults)
      : FusedOptimizerOf(groups, std::move(defaults)) {}
  template <class Deferred = void>
  explicit FusedSGD(std::vector<at::Tensor> params, torch::optim::SGDOptions defaults)
      : FusedSGD(detail::one_group(std::move(params)), std::move(defaults)) {}
};

/// torch::optim::Adagrad, fused. Every parameter's sum starts at the initial_accumulator_value of
/// `defaults`, as in LibTorch, where its group's own one is not looked at either.
class FusedAdagrad : public detail::FusedOptimizerOf<detail::AdagradRule> {
 public:
  template <class Deferred = void>
  explicit FusedAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                        torch::optim::AdagradOptions defaults = {})
      : FusedOptimizerOf(groups, std::move(defaults)) {}
  template <class Deferred = void>
  explicit FusedAdagrad(std::vector<at::Tensor> params, torch::optim::AdagradOptions defaults = {})
      : FusedAdagrad(detail::one_group(std::move(params)), std::move(defaults)) {}
};

}  // namespace TORCHAMP_NAMESPACE
