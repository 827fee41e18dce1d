// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/models/bert.h"
#include "benchmark/models/checkerboard.h"
#include "benchmark/models/feed_forward.h"
#include "benchmark/models/gpt.h"
#include "benchmark/models/unet.h"
#include "benchmark/models/yolo.h"
#include "benchmark/workload.h"
#include "support/arguments.h"

/// What the comparison knows of a workload before it is made.
struct ModelEntry {
  std::string name, title;
  std::map<Preset, Sizes> sizes;
  std::map<Preset, std::int64_t> steps;  ///< per round
  /// What torch.amp saved of the time against fp32 on NVIDIA's V100 and T4, see write_report().
  std::string saved_elsewhere;
  std::unique_ptr<Workload> (*make)(const Sizes&);
};

template <class Model>
ModelEntry model_entry(std::string name, std::string title, std::array<std::int64_t, 3> steps,
                       std::string saved_elsewhere = "") {
  ModelEntry entry{std::move(name),
                   std::move(title),
                   {},
                   {},
                   std::move(saved_elsewhere),
                   [](const Sizes& sizes) -> std::unique_ptr<Workload> {
                     return std::make_unique<Model>(sizes);
                   }};
  std::size_t i = 0;
  for (const Preset preset : {Preset::small, Preset::large, Preset::full}) {
    entry.sizes[preset] = Model::sizes(preset);
    entry.steps[preset] = steps[i++];
  }
  return entry;
}

inline const std::vector<ModelEntry>& all_models() {
  static const std::vector<ModelEntry> models{
      model_entry<FeedForward>("feed_forward", "Feed-forward", {40, 10, 50}, "nothing"),
      model_entry<UNet>("unet", "UNet", {4, 2, 8}, "5 to 30 %"),
      model_entry<Bert>("bert", "BERT", {20, 2, 16}, "50 to 60 %"),
      model_entry<GptWorkload>("gpt", "GPT", {10, 2, 16}),
      model_entry<Yolo>("yolo", "YOLO", {4, 2, 2}),  // of four batches each
      model_entry<Checkerboard>("checkerboard", "Checkerboard", {40, 4, 10}),
      model_entry<GptGeneration<false>>("gpt_generation", "GPT, generating", {1, 1, 2}),
      model_entry<GptGeneration<true>>("gpt_cached", "GPT, generating with a cache", {2, 1, 4}),
  };
  return models;
}

/// Whether a model is there for inference alone: it trains as "gpt" does.
inline bool only_predicts(const ModelEntry& model) {
  return model.name.starts_with("gpt_");
}
/// Whether a model is one that programs infer with, rather than a small one to train.
inline bool is_for_inference(const ModelEntry& model) {
  return model.name != "feed_forward" && model.name != "checkerboard";
}

inline const ModelEntry& find_model(const std::string& name) {
  std::string known;
  for (const ModelEntry& entry : all_models()) {
    if (entry.name == name) return entry;
    known += (known.empty() ? "" : ", ") + entry.name;
  }
  throw support::UsageError("there is no model '" + name + "'; there are " + known);
}
