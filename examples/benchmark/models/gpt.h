// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include "benchmark/workload.h"
#include "gpt/model.h"

/// The model of examples/gpt, and its way to train: AdamW, two batches a step, clipping.
class GptWorkload : public Workload {
 public:
  static Sizes sizes(Preset preset) {
    switch (preset) {
      case Preset::small:
        return {{"batch", 4}, {"length", 64}, {"layers", 2}, {"width", 128}, {"heads", 4}};
      case Preset::large:
        return {{"batch", 8}, {"length", 128}, {"layers", 4}, {"width", 384}, {"heads", 6}};
      case Preset::full:
        break;
    }
    return {{"batch", 32}, {"length", 256}, {"layers", 6}, {"width", 384}, {"heads", 6}};
  }

  explicit GptWorkload(const Sizes& sizes)
      : sizes_(sizes),
        net_(GptSizes{.layers = sizes.at("layers"),
                      .width = sizes.at("width"),
                      .heads = sizes.at("heads"),
                      .length = sizes.at("length")}) {}

  torch::nn::Module& module() override { return *net_; }
  Recipe recipe() const override {
    return {.optimizer = Recipe::Optimizer::adamw, .clip_norm = 1., .accumulate = 2};
  }

  /// Letters [batch, length + 1].
  std::vector<at::Tensor> make_batch() const override {
    return {torch::randint(256, {sizes_.at("batch"), sizes_.at("length") + 1})};
  }

  bool recompute() override { return net_->recomputes = true; }

  /// Logits of each next letter [batch, length, 256].
  at::Tensor predict(const std::vector<at::Tensor>& batch) override {
    return net_->forward(batch[0].narrow(1, 0, sizes_.at("length")));
  }

  at::Tensor loss(const std::vector<at::Tensor>& batch) override {
    return loss_of(*net_, batch[0]);
  }

 protected:
  Sizes sizes_;
  Gpt net_;
};

/// The second half of a text, letter by letter, as a program does that generates one: from all
/// letters before it again, or with a cache of their keys and values. The letters are the batch's,
/// so that what is computed depends on no dtype.
template <bool cached>
class GptGeneration final : public GptWorkload {
 public:
  using GptWorkload::GptWorkload;

  /// Logits of the letter after the last [batch, 256].
  at::Tensor predict(const std::vector<at::Tensor>& batch) override {
    const std::int64_t length = sizes_.at("length"), prompt = length / 2;
    std::vector<GptCache> caches;
    at::Tensor logits;
    for (std::int64_t end = prompt; end <= length; ++end) {
      if (cached) {
        const std::int64_t start = end == prompt ? 0 : end - 1;
        logits = net_->forward_after(batch[0].slice(1, start, end), caches).select(1, -1);
      } else {
        logits = net_->forward(batch[0].slice(1, 0, end)).select(1, -1);
      }
    }
    return logits;
  }
};
