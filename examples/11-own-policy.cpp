// SPDX-License-Identifier: BSD-3-Clause
// A table decides which op runs in which dtype: print it, edit it, pass it to a guard.
#include <torch/torch.h>
#include <torchamp/policy_text.h>
#include <torchamp/torchamp.h>

#include <iostream>

#include "support/check.h"

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const auto lower = device.is_cuda() ? torch::kHalf : torch::kBFloat16;
  const auto x = torch::rand({32, 32}, device);
  const auto dtypes = [&](const torchamp::Policy& policy) {
    torchamp::AutocastGuard autocast(device.type(), {.policy = policy});
    const auto product = torch::matmul(x, x);
    struct {
      torch::Dtype product, sum, softmax;
    } result{product.scalar_type(), (product + product).scalar_type(),
             product.softmax(1).scalar_type()};
    return result;
  };

  const auto standard = dtypes(torchamp::Policy::standard());
  support::check(standard.sum == torch::kFloat, "the standard table has additions in fp32");

  const auto libtorch = dtypes(torchamp::Policy::torch());
  support::check(libtorch.sum == lower, "LibTorch's own lists have not");

  // Softmax in fp32; additions in the dtypes of their arguments.
  auto own = torchamp::Policy::standard();
  own.unchanged(torchamp::ops::addition).fp32({"softmax"});
  std::cout << own;
  support::check(dtypes(own).sum == lower, "a family of ops moved to another rule");
  support::check(dtypes(own).softmax == torch::kFloat, "and an op by its name");
  support::check(own.lookup("add.Tensor", device.type()) == torchamp::Cast::unchanged,
                 "the table says so");

  bool refused = false;
  try {
    own.fp32({"sofmax"});
  } catch (const c10::Error& error) {
    std::cout << error.what_without_backtrace() << '\n';
    refused = true;
  }
  support::check(refused, "a name that LibTorch does not know is an error");
}
