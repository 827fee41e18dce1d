// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include "benchmark/workload.h"

/// The checkerboard of examples/checkerboard: each pixel's shade from its two coordinates, by
/// convolutions of 1 x 1.
class Checkerboard final : public Workload {
 public:
  static Sizes sizes(Preset preset) {
    switch (preset) {
      case Preset::small:
        return {{"side", 16}, {"channels", 256}};
      case Preset::large:
        return {{"side", 64}, {"channels", 256}};
      case Preset::full:
        break;
    }
    return {{"side", 512}, {"channels", 256}};
  }

  explicit Checkerboard(const Sizes& sizes) : sizes_(sizes), net_(network(sizes.at("channels"))) {}

  torch::nn::Module& module() override { return *net_; }
  Recipe recipe() const override { return {}; }

  /// Coordinates [1, 2, side, side] and shades [1, 1, side, side], the same each time.
  std::vector<at::Tensor> make_batch() const override {
    const std::int64_t side = sizes_.at("side");
    const at::Tensor along = torch::arange(side).to(torch::kFloat) / static_cast<double>(side);
    const at::Tensor field = (along * 8).floor().to(torch::kLong).remainder(2);
    const at::Tensor shade = field.unsqueeze(0).logical_xor(field.unsqueeze(1)).to(torch::kFloat);
    const auto grid = torch::meshgrid({along, along}, "xy");
    return {torch::stack({grid[0], grid[1]}).unsqueeze(0), shade.unsqueeze(0).unsqueeze(0)};
  }

  at::Tensor predict(const std::vector<at::Tensor>& batch) override {
    return net_->forward(batch[0]);
  }

  at::Tensor loss(const std::vector<at::Tensor>& batch) override {
    return torch::mse_loss(predict(batch), batch[1]);
  }

 private:
  static torch::nn::Sequential network(std::int64_t channels) {
    using namespace torch::nn;
    Sequential layers;
    for (const std::int64_t in : {std::int64_t{2}, channels, channels}) {
      layers->push_back(Conv2d(Conv2dOptions(in, channels, 1)));
      layers->push_back(BatchNorm2d(channels));
      layers->push_back(ReLU());
    }
    layers->push_back(Conv2d(Conv2dOptions(channels, 1, 1)));
    return layers;
  }

  Sizes sizes_;
  torch::nn::Sequential net_;
};
