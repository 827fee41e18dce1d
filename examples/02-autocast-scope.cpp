// SPDX-License-Identifier: BSD-3-Clause
// Inside of a guard, products run in 16 bits and sums in fp32; outside of it nothing changes.
#include <torch/torch.h>
#include <torchamp/torchamp.h>

#include <iostream>

#include "support/check.h"

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const auto lower = device.is_cuda() ? torch::kHalf : torch::kBFloat16;
  const auto x = torch::rand({32, 32}, device);
  const auto y = torch::rand({32, 32}, device);
  {
    torchamp::AutocastGuard autocast(device.type());
    const auto a = x + y;
    const auto b = torch::matmul(x, y);
    std::cout << "x + y: " << a.dtype() << ", x @ y: " << b.dtype() << '\n';
    support::check(a.scalar_type() == torch::kFloat, "a sum is fp32");
    support::check(b.scalar_type() == lower, "a product has the device's 16-bit type");
    support::check((b + b).scalar_type() == torch::kFloat, "so is a sum of two products");
    support::check(b.mean().scalar_type() == torch::kFloat, "and a mean of one");
  }
  {
    torchamp::AutocastGuard autocast(device.type(), torch::kBFloat16);
    const auto half = y.to(torch::kHalf);
    support::check((x + half).scalar_type() == torch::kFloat, "fp32 + fp16 is fp32");
    support::check(torch::matmul(x, half).scalar_type() == torch::kBFloat16,
                   "the guard may name the type");
    {
      torchamp::AutocastGuard off(device.type(), {.enabled = false});
      support::check(torch::matmul(x, y).scalar_type() == torch::kFloat,
                     "a region within may be without");
    }
    support::check(torch::matmul(x, y).scalar_type() == torch::kBFloat16,
                   "and its end brings back what was");
  }
  support::check(torch::matmul(x, y).scalar_type() == torch::kFloat, "outside, fp32 stays fp32");
}
