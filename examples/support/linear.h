// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

namespace support {

/// torch::nn::Linear as one op, as Python's is: LibTorch's own forward() is `matmul` and `+=` for
/// three dimensions, and takes a transposed weight, whose cast no cache keeps. Parameters, names
/// and files are the same.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input) { return torch::linear(input, weight, bias); }
};
TORCH_MODULE(Linear);

}  // namespace support
