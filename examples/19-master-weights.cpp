// SPDX-License-Identifier: BSD-3-Clause
// A model in bf16 with fp32 master weights for the optimizer: forward and backward need half the
// memory for weights and activations, and small updates are not lost.
#include <torch/torch.h>
#include <torchamp/master_weights.h>
#include <torchamp/torchamp.h>

#include <iostream>
#include <optional>

#include "support/check.h"
#include "support/format.h"
#include "support/peak_memory.h"

namespace {

enum class Kind { fp32, bf16, bf16_with_masters };

struct Result {
  std::int64_t weights = 0;      // bytes of the model's parameters
  std::int64_t activations = 0;  // bytes that a forward allocates and keeps
  double loss = 0.;              // at the end
};

std::int64_t bytes_now(torch::Device device) {
  return support::PeakMemory(device).bytes();  // a peak that begins here
}

Result train(Kind kind, torch::Device device) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(32, 128), torch::nn::Tanh(),
                              torch::nn::Linear(128, 128), torch::nn::Tanh(),
                              torch::nn::Linear(128, 8));
  model->to(device);
  const auto data = torch::randn({256, 32}, device);
  const auto target = data.narrow(1, 0, 8).sin();

  std::optional<torchamp::MasterWeights> masters;
  if (kind == Kind::bf16_with_masters) {
    masters.emplace(model, torchamp::MasterWeightsOptions{.dtype = torch::kBFloat16});
  } else if (kind == Kind::bf16) {
    model->to(torch::kBFloat16);
  }
  torch::optim::SGD optimizer(masters ? masters->parameters() : model->parameters(),
                              torch::optim::SGDOptions(0.02));
  const auto input = kind == Kind::fp32 ? data : data.to(torch::kBFloat16);

  Result result;
  for (const auto& parameter : model->parameters()) {
    result.weights += static_cast<std::int64_t>(parameter.nbytes());
  }
  for (int step = 0; step < 400; ++step) {
    optimizer.zero_grad();
    const std::int64_t before = bytes_now(device);
    const auto output = model->forward(input);
    result.activations = bytes_now(device) - before;
    const auto loss = torch::mse_loss(output.to(torch::kFloat), target);
    loss.backward();
    if (masters) masters->take_gradients();
    optimizer.step();
    if (masters) masters->copy_to_model();
    result.loss = loss.item<double>();
  }
  return result;
}

void print(const char* name, const Result& result) {
  std::cout << support::format("%-18s weights %3lld KiB, activations %3lld KiB, loss %.4f\n", name,
                               static_cast<long long>(result.weights / 1024),
                               static_cast<long long>(result.activations / 1024), result.loss);
}

}  // namespace

int main() {
  support::count_cpu_memory();
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const Result fp32 = train(Kind::fp32, device), bf16 = train(Kind::bf16, device),
               masters = train(Kind::bf16_with_masters, device);
  print("fp32", fp32);
  print("bf16", bf16);
  print("bf16 with masters", masters);

  support::check(masters.weights * 2 == fp32.weights, "the model's weights take half the memory");
  support::check(masters.activations * 2 == fp32.activations, "and so do the activations");
  support::check(std::abs(masters.loss - fp32.loss) < 0.02 * fp32.loss,
                 "with masters the loss is that of fp32");
  support::check(bf16.loss > 1.2 * fp32.loss, "without, small updates are lost");
}
