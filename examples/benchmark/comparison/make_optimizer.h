// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/optim.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/workload.h"

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

inline NamedParameters named_parameters(const torch::nn::Module& module) {
  NamedParameters parameters;
  for (const auto& item : module.named_parameters()) parameters.push_back(item.pair());
  return parameters;
}

/// A detector's parameters in the groups of its recipe: decayed weights, other weights, biases.
inline std::vector<torch::optim::OptimizerParamGroup> detector_groups(
    const NamedParameters& parameters) {
  std::vector<at::Tensor> decayed, weights, biases;
  for (const auto& [name, value] : parameters) {
    auto& group = name.ends_with("bias") ? biases : value.dim() > 1 ? decayed : weights;
    group.push_back(value);
  }
  const auto options = [](double decay) {
    torch::optim::SGDOptions values(0.01);
    values.momentum(0.937).nesterov(true).weight_decay(decay);
    return std::make_unique<torch::optim::SGDOptions>(values);
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(decayed), options(5e-4));
  groups.emplace_back(std::move(weights), options(0.));
  groups.emplace_back(std::move(biases), options(0.));
  return groups;
}

/// LibTorch's own optimizer after `recipe`, or torchamp's fused one.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const NamedParameters& parameters,
                                                               const Recipe& recipe, bool fused) {
  using torch::optim::OptimizerParamGroup;
  const auto make = [&]<class Stock, class Fused, class Options>(
                        std::vector<OptimizerParamGroup> groups,
                        Options options) -> std::unique_ptr<torch::optim::Optimizer> {
    if (!fused) return std::make_unique<Stock>(groups, options);
    auto optimizer = std::make_unique<Fused>(groups, options);
    optimizer->drop_gradients_after_step();
    return optimizer;
  };
  std::vector<at::Tensor> values;
  for (const auto& [name, value] : parameters) values.push_back(value);
  const double rate = recipe.learning_rate;
  switch (recipe.optimizer) {
    case Recipe::Optimizer::adam:
      return make.operator()<torch::optim::Adam, torchamp::FusedAdam>(
          {OptimizerParamGroup(values)}, torch::optim::AdamOptions(rate));
    case Recipe::Optimizer::adamw:
      return make.operator()<torch::optim::AdamW, torchamp::FusedAdamW>(
          {OptimizerParamGroup(values)}, torch::optim::AdamWOptions(rate));
    case Recipe::Optimizer::sgd:
      break;
  }
  return make.operator()<torch::optim::SGD, torchamp::FusedSGD>(detector_groups(parameters),
                                                                torch::optim::SGDOptions(rate));
}

/// Whether Muon steps this parameter: a matrix of a list's layer, such as layers.0.query.weight,
/// not an embedding or a head.
inline bool is_for_muon(const std::string& name, const at::Tensor& value) {
  return value.dim() == 2 && std::count(name.begin(), name.end(), '.') >= 3;
}

/// The optimizers of a way. `kind`: "stock" and "fused" make one; "muon" makes FusedMuon for the
/// matrices of the layers and a fused optimizer for the other parameters.
inline std::vector<std::unique_ptr<torch::optim::Optimizer>> make_optimizers(
    const NamedParameters& parameters, const Recipe& recipe, const std::string& kind) {
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
  if (kind != "muon") {
    optimizers.push_back(make_optimizer(parameters, recipe, kind == "fused"));
    return optimizers;
  }
  std::vector<at::Tensor> matrices;
  NamedParameters others;
  for (const auto& [name, value] : parameters) {
    if (is_for_muon(name, value)) {
      matrices.push_back(value);
    } else {
      others.emplace_back(name, value);
    }
  }
  auto muon = std::make_unique<torchamp::FusedMuon>(
      matrices, torchamp::MuonOptions(recipe.learning_rate)
                    .adjust_lr(torchamp::MuonOptions::AdjustLr::match_rms_adamw));
  muon->drop_gradients_after_step();
  optimizers.push_back(std::move(muon));
  optimizers.push_back(make_optimizer(others, recipe, /*fused=*/true));
  return optimizers;
}

/// The learning rates and the momentum of step `step` of a detector's warm-up: the rates rise from
/// 0, that of the biases (the last group) falls from 0.1.
inline void warm_up(torch::optim::Optimizer& optimizer, const Recipe& recipe, std::int64_t step) {
  const double done = static_cast<double>(step) / static_cast<double>(recipe.warmup_steps);
  auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const double from = g + 1 == groups.size() ? 0.1 : 0.;
    auto& options = static_cast<torch::optim::SGDOptions&>(groups[g].options());
    options.lr(from + (recipe.learning_rate - from) * done);
    options.momentum(0.8 + (0.937 - 0.8) * done);
  }
}
