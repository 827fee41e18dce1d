// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/models/bert.h"
#include "benchmark/models/checkerboard.h"
#include "benchmark/models/feed_forward.h"
#include "benchmark/models/unet.h"
#include "benchmark/models/yolo.h"
#include "benchmark/workload.h"
#include "support/arguments.h"

/// What the comparison knows of a workload before it is made.
struct ModelEntry {
  std::string name, title;
  Sizes small, full;                     ///< the presets
  std::int64_t small_steps, full_steps;  ///< per round
  std::unique_ptr<Workload> (*make)(const Sizes&);
};

template <class Model>
ModelEntry model_entry(std::string name, std::string title, std::int64_t small_steps,
                       std::int64_t full_steps) {
  return {std::move(name),
          std::move(title),
          Model::sizes(true),
          Model::sizes(false),
          small_steps,
          full_steps,
          [](const Sizes& sizes) -> std::unique_ptr<Workload> {
            return std::make_unique<Model>(sizes);
          }};
}

inline const std::vector<ModelEntry>& all_models() {
  static const std::vector<ModelEntry> models{
      model_entry<FeedForward>("feed_forward", "Feed-forward", 40, 100),
      model_entry<UNet>("unet", "UNet", 4, 8),
      model_entry<Bert>("bert", "BERT", 20, 8),
      model_entry<Yolo>("yolo", "YOLO", 4, 4),
      model_entry<Checkerboard>("checkerboard", "Checkerboard", 40, 10),
  };
  return models;
}

inline const ModelEntry& find_model(const std::string& name) {
  std::string known;
  for (const ModelEntry& entry : all_models()) {
    if (entry.name == name) return entry;
    known += (known.empty() ? "" : ", ") + entry.name;
  }
  throw support::UsageError("there is no model '" + name + "'; there are " + known);
}
