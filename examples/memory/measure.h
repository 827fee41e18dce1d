// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/distributed/process_group.h>
#include <torchamp/distributed/sharded_masters.h>
#include <torchamp/master_weights.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gpt/model.h"
#include "memory/ways.h"
#include "support/peak_memory.h"

/// Weights of a model: those that masters are for, and those that stay fp32.
struct Weights {
  double narrow = 0., fp32 = 0.;

  static Weights of(const GptSizes& sizes) {
    Weights weights;
    const Gpt model(sizes);
    for (const auto& item : model->named_parameters()) {
      const bool is_norm = item.key().find("norm") != std::string::npos;
      (is_norm ? weights.fp32 : weights.narrow) += static_cast<double>(item.value().numel());
    }
    return weights;
  }

  Bytes bytes(const Way& way, int processes) const {
    return bytes_a_weight(way, processes) * narrow + bytes_an_fp32_weight(way, processes) * fp32;
  }
};

/// Bytes of tensors of one process.
struct Measured {
  double kept = 0.;           ///< from step to step
  double after_forward = 0.;  ///< on top of it, for backward
  double peak = 0.;           ///< all in all
};

/// Trains a transformer, with `rows` texts in a batch, and looks at the steps after the first.
inline Measured measure(const Way& way, const GptSizes& sizes, std::int64_t rows,
                        const torchamp::ProcessGroupPtr& group) {
  const auto bytes = [](const support::PeakMemory& memory) {
    return static_cast<double>(memory.bytes());
  };
  const double before = bytes(support::PeakMemory(torch::kCPU));
  Gpt model(sizes);
  model->recomputes = way.recomputed;
  std::optional<torchamp::MasterWeights> masters;
  std::optional<torchamp::ShardedMasterWeights> shards;
  std::vector<torch::Tensor> parameters = model->parameters();
  if (way.sharded) {
    shards.emplace(model, group,
                   torchamp::ShardedMasterWeightsOptions{
                       .dtype = torch::kBFloat16, .storage = way.storage, .bucket_bytes = 1});
    parameters = shards->parameters();
  } else if (way.masters) {
    masters.emplace(model, torchamp::MasterWeightsOptions{.dtype = torch::kBFloat16,
                                                          .storage = way.storage,
                                                          .main_gradients = way.main_gradients});
    parameters = masters->parameters();
  }
  torchamp::FusedAdamW optimizer(parameters);
  const auto text = torch::randint(sizes.letters, {rows, sizes.length + 1});
  const auto step = [&] {
    optimizer.zero_grad();
    const support::PeakMemory forward(torch::kCPU);
    const double kept = bytes(forward);
    torch::Tensor loss;
    {
      torchamp::AutocastGuard autocast(
          torch::kCPU, {.dtype = torch::kBFloat16, .enabled = way.autocast || way.masters});
      loss = loss_of(*model, text);
    }
    const double in_forward = bytes(forward);
    const support::PeakMemory backward(torch::kCPU);
    const double after_forward = bytes(backward);
    loss.backward();
    if (masters) masters->take_gradients();
    optimizer.step();
    if (masters) masters->copy_to_model();
    if (shards) shards->copy_to_model();
    return Measured{.kept = kept - before,
                    .after_forward = after_forward - kept,
                    .peak = std::max(in_forward, bytes(backward)) - before};
  };
  (void)step();  // makes the optimizer's state
  Measured least = step();
  for (int i = 0; i < 2; ++i) {  // Gloo's threads may let go of a buffer late
    const Measured next = step();
    least = {.kept = std::min(least.kept, next.kept),
             .after_forward = std::min(least.after_forward, next.after_forward),
             .peak = std::min(least.peak, next.peak)};
  }
  return least;
}
