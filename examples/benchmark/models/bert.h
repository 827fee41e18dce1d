// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/recompute.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "benchmark/workload.h"
#include "support/linear.h"

/// BERT with a head that marks the first and last token of an answer. Without dropout, so that runs
/// can be compared by their losses.
class Bert final : public Workload {
 public:
  static Sizes sizes(Preset preset) {
    switch (preset) {
      case Preset::small:
        return {{"batch", 4},   {"length", 32}, {"layers", 2},
                {"width", 128}, {"heads", 2},   {"vocabulary", 2048}};
      case Preset::large:
        return {{"batch", 4},   {"length", 128}, {"layers", 2},
                {"width", 768}, {"heads", 12},   {"vocabulary", 4096}};
      case Preset::full:
        break;
    }
    return {{"batch", 32},  {"length", 128}, {"layers", 12},
            {"width", 768}, {"heads", 12},   {"vocabulary", 30522}};
  }

  explicit Bert(const Sizes& sizes) : sizes_(sizes), net_(sizes) {}

  torch::nn::Module& module() override { return *net_; }
  Recipe recipe() const override {
    return {.optimizer = Recipe::Optimizer::adamw, .learning_rate = 1e-4, .clip_norm = 1.};
  }

  /// Tokens, segments [batch, length], first and last positions [batch].
  std::vector<at::Tensor> make_batch() const override {
    const std::int64_t batch = sizes_.at("batch"), length = sizes_.at("length");
    const at::Tensor tokens = torch::randint(sizes_.at("vocabulary"), {batch, length});
    const at::Tensor segments = torch::randint(2, {batch, length});
    return {tokens, segments, tokens.argmax(1), tokens.argmin(1)};
  }

  /// Logits of first and last [batch, length, 2].
  at::Tensor predict(const std::vector<at::Tensor>& batch) override {
    return net_->forward(batch[0], batch[1]);
  }

  at::Tensor loss(const std::vector<at::Tensor>& batch) override {
    const auto logits = predict(batch).unbind(2);
    return (torch::nn::functional::cross_entropy(logits[0], batch[2]) +
            torch::nn::functional::cross_entropy(logits[1], batch[3])) /
           2;
  }

  bool recompute() override { return net_->recomputes = true; }

  bool add_biases_apart() override {
    net_->apply([](torch::nn::Module& module) {
      if (auto* const linear = module.as<support::LinearImpl>()) linear->bias_apart = true;
    });
    return true;
  }

 private:
  struct LayerImpl : torch::nn::Module {
    LayerImpl(std::int64_t width, std::int64_t head_count) : heads(head_count) {
      using namespace torch::nn;
      query = register_module("query", support::Linear(width, width));
      key = register_module("key", support::Linear(width, width));
      value = register_module("value", support::Linear(width, width));
      output = register_module("output", support::Linear(width, width));
      norm1 = register_module("norm1", LayerNorm(LayerNormOptions({width}).eps(1e-12)));
      up = register_module("up", support::Linear(width, 4 * width));
      down = register_module("down", support::Linear(4 * width, width));
      norm2 = register_module("norm2", LayerNorm(LayerNormOptions({width}).eps(1e-12)));
    }

    /// x [batch, length, width]
    at::Tensor forward(const at::Tensor& x) {
      const auto split = [&](const at::Tensor& t) {  // [batch, heads, length, width / heads]
        return t.view({t.size(0), t.size(1), heads, -1}).transpose(1, 2);
      };
      const at::Tensor attended = torch::scaled_dot_product_attention(
          split(query->forward(x)), split(key->forward(x)), split(value->forward(x)));
      const at::Tensor joined = attended.transpose(1, 2).reshape(x.sizes());
      const at::Tensor y = norm1->forward(x + output->forward(joined));
      return norm2->forward(y + down->forward(torch::gelu(up->forward(y))));
    }

    std::int64_t heads;
    support::Linear query{nullptr}, key{nullptr}, value{nullptr}, output{nullptr}, up{nullptr},
        down{nullptr};
    torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  };
  TORCH_MODULE(Layer);

  struct NetImpl : torch::nn::Module {
    explicit NetImpl(const Sizes& sizes) {
      using namespace torch::nn;
      const std::int64_t width = sizes.at("width");
      words = register_module("words", Embedding(sizes.at("vocabulary"), width));
      positions = register_module("positions", Embedding(512, width));
      segments = register_module("segments", Embedding(2, width));
      norm = register_module("norm", LayerNorm(LayerNormOptions({width}).eps(1e-12)));
      for (std::int64_t i = 0; i < sizes.at("layers"); ++i) {
        layers->push_back(Layer(width, sizes.at("heads")));
      }
      register_module("layers", layers);
      head = register_module("head", support::Linear(width, 2));
    }

    at::Tensor forward(const at::Tensor& tokens, const at::Tensor& kinds) {
      const at::Tensor places = torch::arange(tokens.size(1), tokens.options());
      at::Tensor x = words->forward(tokens) + positions->forward(places) + segments->forward(kinds);
      x = norm->forward(x);
      for (const auto& module : *layers) {
        const auto layer = std::dynamic_pointer_cast<LayerImpl>(module);
        x = recomputes ? torchamp::checkpoint({.preserve_rng_state = false}, layer, x)
                       : layer->forward(x);
      }
      return head->forward(x);
    }

    torch::nn::Embedding words{nullptr}, positions{nullptr}, segments{nullptr};
    torch::nn::LayerNorm norm{nullptr};
    torch::nn::ModuleList layers;
    support::Linear head{nullptr};
    bool recomputes = false;
  };
  TORCH_MODULE(Net);

  Sizes sizes_;
  Net net_;
};
