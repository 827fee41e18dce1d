// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "torchamp/detail/core/optim/state_tensors.h"
#include "torchamp/optim.h"

/// The tensors that an optimizer, LibTorch's or a fused one, stores for a parameter in its shape.
inline std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer,
                                             torch::optim::OptimizerParamState& state) {
  std::vector<at::Tensor> all;
  const auto add = [&](const at::Tensor& tensor) { all.push_back(tensor); };
  if (const auto* const fused = dynamic_cast<const torchamp::FusedOptimizer*>(&optimizer)) {
    fused->for_each_state_tensor(state, add);
  } else {
    torchamp::detail::for_each_state_tensor(state, add);
  }
  return all;
}
