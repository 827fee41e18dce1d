// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkerboard/network.h"
#include "checkerboard/target.h"
#include "fashion_mnist/data.h"
#include "fashion_mnist/network.h"
#include "gpt/model.h"
#include "gpt/text.h"
#include "support/drawing/image.h"

/// A training program: a model, and the loss of a batch.
struct Program {
  std::string name, about;
  std::shared_ptr<torch::nn::Module> model;
  std::function<void()> next_batch;
  std::function<torch::Tensor()> loss;  ///< of the batch
  /// What the model has learned to draw, with captions; none if empty.
  std::function<std::vector<std::pair<std::string, drawing::Image>>()> pictures = nullptr;
};

/// How large the programs are.
struct Sizes {
  std::int64_t board = 32;  ///< pixels along each side
  std::int64_t batch = 16;  ///< images, and parts of a text
};

inline Program checkerboard_program(const Sizes& sizes, torch::Device device) {
  auto network = make_network(1);
  network->to(device);
  const auto inputs = grid(sizes.board, sizes.board).to(device);
  const auto target = checker(sizes.board, sizes.board, 8.).to(device);
  return {.name = "Checkerboard",
          .about = "A network of 1 x 1 convolutions paints a checkerboard from coordinates.",
          .model = network.ptr(),
          .next_batch = [] {},
          .loss = [=]() mutable { return torch::mse_loss(network->forward(inputs), target); },
          .pictures =
              [=]() mutable {
                const torch::NoGradGuard no_grad;
                return std::vector<std::pair<std::string, drawing::Image>>{
                    {"the target", to_image(target)},
                    {"as painted", to_image(network->forward(inputs))}};
              }};
}

inline Program fashion_mnist_program(const Sizes& sizes, torch::Device device,
                                     const std::filesystem::path& folder) {
  const auto data = std::make_shared<FashionMnist>(read_fashion_mnist(folder));
  auto network = make_network();
  network->to(device);
  const auto images = std::make_shared<torch::Tensor>(),
             classes = std::make_shared<torch::Tensor>();
  return {.name = "Fashion-MNIST",
          .about = "A small convolutional network tells clothes apart.",
          .model = network.ptr(),
          .next_batch =
              [=] {
                const auto chosen =
                    torch::randint(data->train.images().size(0), {sizes.batch}, torch::kLong);
                *images = data->train.images().index_select(0, chosen).to(device);
                *classes = data->train.targets().index_select(0, chosen).to(device);
              },
          .loss =
              [=]() mutable {
                return torch::nn::functional::cross_entropy(network->forward(*images), *classes);
              }};
}

inline Program transformer_program(const Sizes& sizes, torch::Device device,
                                   const std::filesystem::path& file) {
  const GptSizes gpt{.layers = 2, .width = 64, .heads = 2, .length = 32};
  const auto text = std::make_shared<Text>(read_text(file), gpt.length);
  Gpt model(gpt);
  model->to(device);
  const auto batch = std::make_shared<torch::Tensor>();
  return {.name = "Transformer",
          .about = "A small GPT learns a text letter by letter.",
          .model = model.ptr(),
          .next_batch = [=] { *batch = text->batch(sizes.batch, gpt.length).to(device); },
          .loss = [=]() mutable { return loss_of(*model, *batch); }};
}
