// SPDX-License-Identifier: BSD-3-Clause
// Captions for drawn pictures: a convolutional encoder, and an LSTM that writes word after word.
#include <torch/torch.h>
#include <torchamp/training_step.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace nn = torch::nn;

namespace {

constexpr std::int64_t side = 16, batch = 32, width = 64, length = 5;
const std::vector<std::string> words{"",      "a",      "small", "large", "ring",
                                     "cross", "square", "left",  "right"};

struct Pictures {
  torch::Tensor pixels, captions;  // [batch, 1, side, side], [batch, length]
};

/// Rings, crosses and squares, small or large, on the left or on the right, with noise.
Pictures draw(torch::Device device) {
  const auto pick = [&](std::int64_t of) {
    return torch::randint(of, {batch, 1, 1}, torch::dtype(torch::kLong).device(device));
  };
  const auto large = pick(2), kind = pick(3), right = pick(2);
  const auto along = torch::linspace(-1., 1., side, device);
  const auto x = (along.view({1, 1, side}) + 0.4 - 0.8 * right).abs();
  const auto y = along.view({1, side, 1}).abs();
  const auto size = 0.25 + 0.25 * large;
  const auto farther = torch::maximum(x, y), nearer = torch::minimum(x, y);
  const auto ring = ((x * x + y * y).sqrt() - size).abs().lt(0.12);
  const auto cross = nearer.lt(0.1).logical_and(farther.lt(size + 0.1));
  const auto square = (farther - size).abs().lt(0.1);
  const auto shape = torch::where(kind == 0, ring, torch::where(kind == 1, cross, square));
  const auto noise = 0.2 * torch::randn({batch, side, side}, device);
  const auto one = torch::ones_like(kind), end = torch::zeros_like(kind);
  return {(shape.to(torch::kFloat) + noise).unsqueeze(1),
          torch::cat({one, 2 + large, 4 + kind, 7 + right, end}, 1).squeeze(2)};
}

struct CaptionerImpl : nn::Module {
  /// The logits of each word after the picture and the words before it.
  torch::Tensor forward(const Pictures& given) {
    const auto picture = encoder->forward(given.pixels).unsqueeze(1);
    const auto before = embedding(given.captions.narrow(1, 0, length - 1));
    return head(std::get<0>(lstm(torch::cat({picture, before}, 1))));
  }

  /// The most likely words, one after another.
  torch::Tensor describe(const torch::Tensor& pixels) {
    std::vector<torch::Tensor> caption;
    std::optional<std::tuple<torch::Tensor, torch::Tensor>> state;
    auto input = encoder->forward(pixels).unsqueeze(1);
    for (std::int64_t i = 0; i < length; ++i) {
      const auto [output, next] = lstm->forward(input, state);
      caption.push_back(head(output).argmax(2));
      input = embedding(caption.back());
      state = next;
    }
    return torch::cat(caption, 1);
  }

  nn::Sequential encoder = register_module(
      "encoder", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1).stride(2)),
                                nn::BatchNorm2d(16), nn::ReLU(),
                                nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1).stride(2)),
                                nn::BatchNorm2d(32), nn::ReLU(), nn::Flatten(),
                                nn::Linear(32 * 4 * 4, width)));
  nn::Embedding embedding =
      register_module("embedding", nn::Embedding(static_cast<std::int64_t>(words.size()), width));
  nn::LSTM lstm =
      register_module("lstm", nn::LSTM(nn::LSTMOptions(width, width).batch_first(true)));
  nn::Linear head =
      register_module("head", nn::Linear(width, static_cast<std::int64_t>(words.size())));
};
TORCH_MODULE(Captioner);

torch::Tensor loss_of(Captioner& model, const Pictures& given) {
  return nn::functional::cross_entropy(model->forward(given).flatten(0, 1),
                                       given.captions.flatten());
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  Captioner model;
  model->to(device);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(2e-3));
  torchamp::TrainingStep train(model, optimizer, {.max_grad_norm = 1.});

  double sum = 0.;
  for (int step = 1; step <= 150; ++step) {
    const auto drawn = draw(device);
    sum += train([&] { return loss_of(model, drawn); }).loss();
    if (step % 50 != 0) continue;
    std::printf("step %d: loss %.4f\n", step, sum / 50.);
    sum = 0.;
  }

  const auto test = draw(device);
  const auto captions = train.evaluate([&] { return model->describe(test.pixels); }).cpu();
  const auto right = captions.eq(test.captions.cpu()).all(1).to(torch::kFloat).mean();
  std::printf("right captions: %.0f %%; the first picture:", 100. * right.item<double>());
  for (std::int64_t i = 0; i + 1 < length; ++i) {
    std::printf(" %s",
                words[static_cast<std::size_t>(captions[0][i].item<std::int64_t>())].c_str());
  }
  std::printf("\n");
}
