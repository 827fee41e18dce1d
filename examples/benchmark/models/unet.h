// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include "benchmark/workload.h"

/// A UNet for segmentation: three times down from 64 channels, up by transposed convolutions, with
/// batch norm. 3 channels in and 9 classes out give 7,703,497 parameters.
class UNet final : public Workload {
 public:
  static constexpr std::int64_t classes = 9;

  static Sizes sizes(Preset preset) {
    switch (preset) {
      case Preset::small:
        return {{"batch", 1}, {"side", 32}, {"channels", 64}};
      case Preset::large:
        return {{"batch", 2}, {"side", 64}, {"channels", 64}};
      case Preset::full:
        break;
    }
    return {{"batch", 16}, {"side", 256}, {"channels", 64}};
  }

  explicit UNet(const Sizes& sizes) : sizes_(sizes), net_(sizes.at("channels")) {}

  torch::nn::Module& module() override { return *net_; }
  Recipe recipe() const override { return {}; }

  /// Images [batch, 3, side, side] and the class of each pixel [batch, side, side].
  std::vector<at::Tensor> make_batch() const override {
    const std::int64_t batch = sizes_.at("batch"), side = sizes_.at("side");
    const at::Tensor images = torch::randn({batch, 3, side, side});
    const auto bits = images.gt(0.).to(torch::kLong).unbind(1);
    return {images, bits[0] + 2 * bits[1] + 4 * bits[2]};
  }

  /// Logits [batch, classes, side, side].
  at::Tensor predict(const std::vector<at::Tensor>& batch) override {
    return net_->forward(batch[0]);
  }

  at::Tensor loss(const std::vector<at::Tensor>& batch) override {
    return torch::nn::functional::cross_entropy(predict(batch), batch[1]);
  }

 private:
  static torch::nn::Sequential block(std::int64_t in, std::int64_t out) {
    using namespace torch::nn;
    return Sequential(Conv2d(Conv2dOptions(in, out, 3).padding(1)), BatchNorm2d(out),
                      ReLU(ReLUOptions(true)), Conv2d(Conv2dOptions(out, out, 3).padding(1)),
                      BatchNorm2d(out), ReLU(ReLUOptions(true)));
  }

  struct NetImpl : torch::nn::Module {
    explicit NetImpl(std::int64_t c) {
      using namespace torch::nn;
      register_module("down", down);
      register_module("up", up);
      register_module("merge", merge);
      std::int64_t in = 3;
      for (const std::int64_t out : {c, 2 * c, 4 * c, 8 * c}) {
        down->push_back(block(in, out));
        in = out;
      }
      for (const std::int64_t out : {4 * c, 2 * c, c}) {
        up->push_back(ConvTranspose2d(ConvTranspose2dOptions(2 * out, out, 2).stride(2)));
        merge->push_back(block(2 * out, out));
      }
      head = register_module("head", Conv2d(Conv2dOptions(c, classes, 1)));
    }

    at::Tensor forward(at::Tensor x) {
      using namespace torch::nn;
      std::vector<at::Tensor> skipped;
      for (std::size_t level = 0; level < 4; ++level) {
        if (level > 0) x = torch::max_pool2d(x, 2);
        x = down->ptr<SequentialImpl>(level)->forward(x);
        skipped.push_back(x);
      }
      for (std::size_t level = 0; level < 3; ++level) {
        x = up->ptr<ConvTranspose2dImpl>(level)->forward(x);
        x = merge->ptr<SequentialImpl>(level)->forward(torch::cat({skipped[2 - level], x}, 1));
      }
      return head->forward(x);
    }

    torch::nn::ModuleList down, up, merge;
    torch::nn::Conv2d head{nullptr};
  };
  TORCH_MODULE(Net);

  Sizes sizes_;
  Net net_;
};
