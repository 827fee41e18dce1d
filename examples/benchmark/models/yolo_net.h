// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <vector>

namespace yolo {

/// Convolution, batch norm, SiLU.
struct ConvImpl : torch::nn::Module {
  ConvImpl(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride = 1,
           std::int64_t padding = -1) {
    using namespace torch::nn;
    conv = register_module("conv", Conv2d(Conv2dOptions(in, out, kernel)
                                              .stride(stride)
                                              .padding(padding < 0 ? kernel / 2 : padding)
                                              .bias(false)));
    norm = register_module("norm", BatchNorm2d(BatchNorm2dOptions(out).eps(1e-3).momentum(0.03)));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::silu(norm->forward(conv->forward(x))); }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
};
TORCH_MODULE(Conv);

struct BottleneckImpl : torch::nn::Module {
  BottleneckImpl(std::int64_t channels, bool add) : shortcut(add) {
    first = register_module("first", Conv(channels, channels, 1));
    second = register_module("second", Conv(channels, channels, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = second->forward(first->forward(x));
    return shortcut ? x + y : y;
  }

  bool shortcut;
  Conv first{nullptr}, second{nullptr};
};
TORCH_MODULE(Bottleneck);

/// Half of the channels through bottlenecks, half past them.
struct C3Impl : torch::nn::Module {
  C3Impl(std::int64_t in, std::int64_t out, std::int64_t depth, bool shortcut = true) {
    through = register_module("through", Conv(in, out / 2, 1));
    past = register_module("past", Conv(in, out / 2, 1));
    merge = register_module("merge", Conv(out, out, 1));
    for (std::int64_t i = 0; i < depth; ++i) blocks->push_back(Bottleneck(out / 2, shortcut));
    register_module("blocks", blocks);
  }
  at::Tensor forward(const at::Tensor& x) {
    return merge->forward(torch::cat({blocks->forward(through->forward(x)), past->forward(x)}, 1));
  }

  Conv through{nullptr}, past{nullptr}, merge{nullptr};
  torch::nn::Sequential blocks;
};
TORCH_MODULE(C3);

/// Pooling at three widths, one after the other.
struct PoolingImpl : torch::nn::Module {
  explicit PoolingImpl(std::int64_t channels) {
    first = register_module("first", Conv(channels, channels / 2, 1));
    second = register_module("second", Conv(channels * 2, channels, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> levels{first->forward(x)};
    for (int i = 0; i < 3; ++i) levels.push_back(torch::max_pool2d(levels.back(), 5, 1, 2));
    return second->forward(torch::cat(levels, 1));
  }

  Conv first{nullptr}, second{nullptr};
};
TORCH_MODULE(Pooling);

}  // namespace yolo

/// Backbone, neck and head of YOLOv5; `c` channels after the first convolution.
struct YoloNetImpl : torch::nn::Module {
  static constexpr std::array<std::int64_t, 3> strides{8, 16, 32};

  YoloNetImpl(std::int64_t c, std::int64_t classes) : values(classes + 5) {
    using namespace yolo;
    const auto add = [this](const char* name, auto module) {
      return register_module(name, module);
    };
    stem = add("stem", Conv(3, c, 6, 2, 2));
    down1 = add("down1", Conv(c, 2 * c, 3, 2));
    c1 = add("c1", C3(2 * c, 2 * c, 1));
    down2 = add("down2", Conv(2 * c, 4 * c, 3, 2));
    c2 = add("c2", C3(4 * c, 4 * c, 2));
    down3 = add("down3", Conv(4 * c, 8 * c, 3, 2));
    c3 = add("c3", C3(8 * c, 8 * c, 3));
    down4 = add("down4", Conv(8 * c, 16 * c, 3, 2));
    c4 = add("c4", C3(16 * c, 16 * c, 1));
    pooling = add("pooling", Pooling(16 * c));
    narrow1 = add("narrow1", Conv(16 * c, 8 * c, 1));
    up1 = add("up1", C3(16 * c, 8 * c, 1, false));
    narrow2 = add("narrow2", Conv(8 * c, 4 * c, 1));
    up2 = add("up2", C3(8 * c, 4 * c, 1, false));
    down5 = add("down5", Conv(4 * c, 4 * c, 3, 2));
    out2 = add("out2", C3(8 * c, 8 * c, 1, false));
    down6 = add("down6", Conv(8 * c, 8 * c, 3, 2));
    out3 = add("out3", C3(16 * c, 16 * c, 1, false));
    for (const std::int64_t in : {4 * c, 8 * c, 16 * c}) {
      heads->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, 3 * values, 1)));
    }
    register_module("heads", heads);
  }

  /// For each scale [batch, 3 anchors, rows, columns, 5 + classes].
  std::vector<at::Tensor> forward(const at::Tensor& images) {
    const auto grow = [](const at::Tensor& x) {
      return torch::upsample_nearest2d(x, at::nullopt, std::vector<double>{2., 2.});
    };
    const at::Tensor p2 = c1->forward(down1->forward(stem->forward(images)));
    const at::Tensor p3 = c2->forward(down2->forward(p2));
    const at::Tensor p4 = c3->forward(down3->forward(p3));
    const at::Tensor p5 = pooling->forward(c4->forward(down4->forward(p4)));
    const at::Tensor n5 = narrow1->forward(p5);
    const at::Tensor n4 = narrow2->forward(up1->forward(torch::cat({grow(n5), p4}, 1)));
    const at::Tensor small = up2->forward(torch::cat({grow(n4), p3}, 1));
    const at::Tensor medium = out2->forward(torch::cat({down5->forward(small), n4}, 1));
    const at::Tensor large = out3->forward(torch::cat({down6->forward(medium), n5}, 1));
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& x : {small, medium, large}) {
      const at::Tensor y = heads->ptr<torch::nn::Conv2dImpl>(outputs.size())->forward(x);
      outputs.push_back(y.view({y.size(0), 3, values, y.size(2), y.size(3)})
                            .permute({0, 1, 3, 4, 2})
                            .contiguous());
    }
    return outputs;
  }

  std::int64_t values;
  yolo::Conv stem{nullptr}, down1{nullptr}, down2{nullptr}, down3{nullptr}, down4{nullptr},
      narrow1{nullptr}, narrow2{nullptr}, down5{nullptr}, down6{nullptr};
  yolo::C3 c1{nullptr}, c2{nullptr}, c3{nullptr}, c4{nullptr}, up1{nullptr}, up2{nullptr},
      out2{nullptr}, out3{nullptr};
  yolo::Pooling pooling{nullptr};
  torch::nn::ModuleList heads;
};
TORCH_MODULE(YoloNet);
