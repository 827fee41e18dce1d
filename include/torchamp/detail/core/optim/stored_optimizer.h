// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <vector>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Stands for an optimizer that LibTorch lacks: checks its options, by their check(), and reads and
/// writes archives as LibTorch's optimizers do. It does not step. `Options::only_option` names an
/// option that no other optimizer has, by which a load recognises the options.
template <class Options, class State>
class StoredOptimizer final : public torch::optim::Optimizer {
 public:
  static constexpr const char* only_option = Options::only_option;

  StoredOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                  const Options& defaults)
      : Optimizer(groups, std::make_unique<Options>(defaults)) {
    defaults.check();
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

}  // namespace TORCHAMP_NAMESPACE::detail
