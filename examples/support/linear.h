// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

namespace support {

/// torch::nn::Linear as one op, as Python's is: LibTorch's own forward() is `matmul` and `+=` for
/// three dimensions, and takes a transposed weight, whose cast no cache keeps. Parameters, names
/// and files are the same. Benchmarks also measure LibTorch's own forward(): `bias_apart`.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input) {
    if (bias_apart) return torch::nn::LinearImpl::forward(input);
    return torch::linear(input, weight, bias);
  }

  bool bias_apart = false;
};
TORCH_MODULE(Linear);

}  // namespace support
