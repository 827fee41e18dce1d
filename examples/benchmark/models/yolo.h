// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmark/models/yolo_loss.h"
#include "benchmark/models/yolo_net.h"
#include "benchmark/workload.h"

/// A detector in YOLOv5's manner, and that project's way to train: gradients gathered up to a
/// nominal batch, a learning rate that warms up, clipping, and an average of the weights that moves
/// on real steps alone. 16 channels and 80 classes give YOLOv5n's 1,872,157 parameters.
class Yolo final : public Workload {
 public:
  static Sizes sizes(Preset preset) {
    switch (preset) {
      case Preset::small:
        return {{"batch", 2},   {"side", 128},  {"channels", 8},
                {"classes", 8}, {"targets", 4}, {"nominal_batch", 4}};
      case Preset::large:
        return {{"batch", 2},    {"side", 256},  {"channels", 16},
                {"classes", 80}, {"targets", 8}, {"nominal_batch", 4}};
      case Preset::full:
        break;
    }
    return {{"batch", 16},   {"side", 640},  {"channels", 16},
            {"classes", 80}, {"targets", 8}, {"nominal_batch", 64}};
  }

  explicit Yolo(const Sizes& sizes)
      : sizes_(sizes), net_(sizes.at("channels"), sizes.at("classes")) {}

  torch::nn::Module& module() override { return *net_; }
  Recipe recipe() const override {
    return {
        .optimizer = Recipe::Optimizer::sgd,
        .learning_rate = 0.01,
        .clip_norm = 10.,
        .accumulate = std::max<std::int64_t>(1, sizes_.at("nominal_batch") / sizes_.at("batch")),
        .warmup_steps = 8,
        .weight_average = true};
  }

  /// Images [batch, 3, side, side]; then for each of the three scales the places [4, batch *
  /// targets] (image, anchor, row, column) and boxes [batch * targets, 4] of the objects (centre
  /// within the cell, width and height in anchors); at last the objects' classes, as 0 and 1 [batch
  /// * targets, classes]. Finding an object's anchor is the data loader's work.
  std::vector<at::Tensor> make_batch() const override {
    const std::int64_t batch = sizes_.at("batch"), side = sizes_.at("side"),
                       targets = sizes_.at("targets"), classes = sizes_.at("classes");
    std::vector<at::Tensor> tensors{torch::rand({batch, 3, side, side})};
    const at::Tensor image = torch::arange(batch).repeat_interleave(targets);
    for (const std::int64_t stride : YoloNetImpl::strides) {
      const std::int64_t cells = side / stride;
      std::vector<at::Tensor> chosen;  // no place twice in an image
      for (std::int64_t i = 0; i < batch; ++i) {
        chosen.push_back(torch::randperm(3 * cells * cells).slice(0, 0, targets));
      }
      const at::Tensor place = torch::cat(chosen);
      const at::Tensor anchor = place.floor_divide(cells * cells);
      const at::Tensor row = place.remainder(cells * cells).floor_divide(cells);
      tensors.push_back(torch::stack({image, anchor, row, place.remainder(cells)}));
      tensors.push_back(torch::cat(
          {torch::rand({batch * targets, 2}), torch::rand({batch * targets, 2}).mul(2.).add(0.5)},
          1));
    }
    const at::Tensor kind = torch::randint(classes, {batch * targets, 1});
    tensors.push_back(torch::zeros({batch * targets, classes}).scatter_(1, kind, 1.));
    return tensors;
  }

  /// The largest objects' scale, [batch, 3 anchors, rows, columns, 5 + classes].
  at::Tensor predict(const std::vector<at::Tensor>& batch) override {
    return net_->forward(batch[0]).back();
  }

  at::Tensor loss(const std::vector<at::Tensor>& batch) override {
    return yolo_loss(net_->forward(batch[0]), batch);
  }

 private:
  Sizes sizes_;
  YoloNet net_;
};
