// SPDX-License-Identifier: BSD-3-Clause
// An LSTM that learns to predict the next character of a text, with clipped gradients.
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

namespace nn = torch::nn;

namespace {

constexpr std::int64_t letters = 128, width = 64, batch = 16, length = 16;

/// Sums such as "17+25=42;", as the numbers of their letters.
torch::Tensor make_text() {
  std::vector<std::int64_t> text;
  for (int i = 0; i < 2000; ++i) {
    const int a = i * 7 % 50, b = i * 13 % 50;
    for (const char letter :
         std::to_string(a) + "+" + std::to_string(b) + "=" + std::to_string(a + b) + ";") {
      text.push_back(letter);
    }
  }
  return torch::tensor(text);
}

struct NetImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& text) {
    return head(std::get<0>(lstm(embedding(text))));
  }
  nn::Embedding embedding = register_module("embedding", nn::Embedding(letters, width));
  nn::LSTM lstm =
      register_module("lstm", nn::LSTM(nn::LSTMOptions(width, width).batch_first(true)));
  nn::Linear head = register_module("head", nn::Linear(width, letters));
};
TORCH_MODULE(Net);

/// The mean cross entropy of each next letter; `part` is [batch, length + 1].
torch::Tensor loss_of(Net& model, const torch::Tensor& part) {
  const auto output = model(part.narrow(1, 0, length));
  return nn::functional::cross_entropy(output.flatten(0, 1), part.narrow(1, 1, length).flatten());
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  Net model;
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(4e-3));
  const auto text = make_text().to(device);

  double sum = 0.;
  for (int step = 1; step <= 60; ++step) {
    const auto first = torch::randint(text.size(0) - length - 1, {batch, 1}, text.options());
    const auto part = text.index({first + torch::arange(length + 1, text.options())});
    optimizer.zero_grad();
    const auto loss = loss_of(model, part);
    loss.backward();
    nn::utils::clip_grad_norm_(model->parameters(), /*max_norm=*/1.);
    optimizer.step();
    sum += loss.item<double>();
    if (step % 20 != 0) continue;
    std::printf("step %d: loss %.4f\n", step, sum / 20.);
    sum = 0.;
  }
}
