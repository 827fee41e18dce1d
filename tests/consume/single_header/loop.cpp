// SPDX-License-Identifier: BSD-3-Clause
// The training loop of guards.md, which single_header.cmake has put into loop.inc.
#include <torch/torch.h>

#include <vector>

#include "torchamp.h"

at::Tensor in_another_file(const at::Tensor& a, const at::Tensor& b);

int main() {
  torch::manual_seed(0);
  torch::nn::Linear model(4, 1);
  const at::Tensor data = torch::randn({32, 4});
  const at::Tensor target = data.sum(1, /*keepdim=*/true);
  std::vector<torch::data::Example<>> batches(400, {data, target});
  const auto loss_now = [&] {
    const torch::NoGradGuard no_grad;
    return torch::mse_loss(model->forward(data), target).item<double>();
  };
  const double before = loss_now();
  auto* loader = &batches;
#include "loop.inc"
  const torchamp::AutocastGuard autocast(torch::kCPU);
  const bool one_library = in_another_file(data, data).scalar_type() == torch::kBFloat16;
  return loss_now() < 0.5 * before && one_library ? 0 : 1;
}
