// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "torchamp/detail/core/optim/state_tensors.h"

/// The tensors that an optimizer of LibTorch's keeps for a parameter, of its shape.
inline std::vector<at::Tensor> state_tensors(torch::optim::OptimizerParamState& state) {
  std::vector<at::Tensor> all;
  torchamp::detail::for_each_state_tensor(state,
                                          [&](const at::Tensor& tensor) { all.push_back(tensor); });
  return all;
}
