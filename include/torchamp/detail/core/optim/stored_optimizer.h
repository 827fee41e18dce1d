// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <vector>

#include "torchamp/detail/core/optim/kernel.h"
#include "torchamp/detail/core/optim/state_tensors.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Stands for an optimizer that LibTorch lacks: checks its options, by their check(), and reads and
/// writes archives as LibTorch's optimizers do. It does not step.
template <class Options, class State>
class StoredOptimizer : public torch::optim::Optimizer {
 public:
  StoredOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                  const Options& defaults)
      : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                  std::make_unique<Options>(defaults)) {
    defaults.check();
    for (const auto& group : groups) add_group(*this, group);
  }

  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    TORCH_INTERNAL_ASSERT(false, "StoredOptimizer does not step");
    return {};
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
};

/// Base of the kernel of an optimizer that LibTorch lacks.
template <class Options, class State>
using StoredKernelBase = KernelBase<StoredOptimizer<Options, State>, Options, State>;

}  // namespace TORCHAMP_NAMESPACE::detail
