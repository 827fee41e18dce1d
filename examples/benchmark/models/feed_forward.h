// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "benchmark/workload.h"
#include "support/linear.h"

/// A small network for tables: an embedding per categorical column beside continuous columns, then
/// two hidden layers and one logit. The columns are those of the Rossmann sales data.
class FeedForward final : public Workload {
 public:
  /// Categories of each column, and the width of its embedding.
  static constexpr std::array<std::pair<std::int64_t, std::int64_t>, 20> columns{
      {{1116, 81}, {8, 5},  {4, 3}, {13, 7}, {32, 11}, {3, 3}, {26, 10},
       {27, 10},   {5, 4},  {4, 3}, {4, 3},  {24, 9},  {9, 6}, {13, 7},
       {53, 15},   {22, 9}, {7, 5}, {7, 5},  {4, 3},   {9, 6}}};
  static constexpr std::int64_t continuous = 16;

  static Sizes sizes(Preset preset) {
    switch (preset) {
      case Preset::small:
        return {{"batch", 64}, {"hidden", 200}};
      case Preset::large:
        return {{"batch", 256}, {"hidden", 1024}};
      case Preset::full:
        break;
    }
    return {{"batch", 128}, {"hidden", 1000}};
  }

  explicit FeedForward(const Sizes& sizes) : sizes_(sizes), net_(sizes.at("hidden")) {}

  torch::nn::Module& module() override { return *net_; }
  Recipe recipe() const override { return {}; }

  /// Categories [batch, columns], continuous values [batch, 16], targets [batch].
  std::vector<at::Tensor> make_batch() const override {
    const std::int64_t batch = sizes_.at("batch");
    std::vector<at::Tensor> categories;
    for (const auto& [count, width] : columns) categories.push_back(torch::randint(count, {batch}));
    const at::Tensor values = torch::randn({batch, continuous});
    const at::Tensor target = values.sum(1).gt(0.).to(torch::kFloat);
    return {torch::stack(categories, 1), values, target};
  }

  /// Logits [batch].
  at::Tensor predict(const std::vector<at::Tensor>& batch) override {
    return net_->forward(batch[0], batch[1]);
  }

  at::Tensor loss(const std::vector<at::Tensor>& batch) override {
    return torch::binary_cross_entropy_with_logits(predict(batch), batch[2]);
  }

 private:
  struct NetImpl : torch::nn::Module {
    explicit NetImpl(std::int64_t hidden) {
      using namespace torch::nn;
      std::int64_t width = continuous;
      for (const auto& [count, columns_width] : columns) {
        embeddings->push_back(Embedding(count, columns_width));
        width += columns_width;
      }
      register_module("embeddings", embeddings);
      norm = register_module("norm", BatchNorm1d(continuous));
      layers = register_module(
          "layers", Sequential(support::Linear(width, hidden), ReLU(), BatchNorm1d(hidden),
                               support::Linear(hidden, hidden / 2), ReLU(), BatchNorm1d(hidden / 2),
                               support::Linear(hidden / 2, 1)));
    }

    at::Tensor forward(const at::Tensor& categories, const at::Tensor& values) {
      std::vector<at::Tensor> parts;
      const auto columns_of = categories.unbind(1);
      for (std::size_t i = 0; i < columns_of.size(); ++i) {
        parts.push_back(embeddings->ptr<torch::nn::EmbeddingImpl>(i)->forward(columns_of[i]));
      }
      parts.push_back(norm->forward(values));
      return layers->forward(torch::cat(parts, 1)).squeeze(1);
    }

    torch::nn::ModuleList embeddings;
    torch::nn::BatchNorm1d norm{nullptr};
    torch::nn::Sequential layers{nullptr};
  };
  TORCH_MODULE(Net);

  Sizes sizes_;
  Net net_;
};
