// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/training_checkpoint.h>
#include <torchamp/training_step.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "support/arguments.h"

#ifdef GPT_HAVE_GLOO

#include <torchamp/distributed/checkpoint.h>
#include <torchamp/distributed/process_group.h>
#include <torchamp/distributed/training_group.h>

/// The processes that torchrun started; without it, this one alone.
class Processes {
 public:
  int rank() const { return group_->getRank(); }
  int count() const { return group_->getSize(); }

  /// The one of the devices of this type that this process trains on.
  torch::Device device_of(torch::Device type) const {
    if (type.is_cpu()) return type;
    const int number = torchamp::ProcessEnvironment::read().local_rank;
    return {type.type(), static_cast<c10::DeviceIndex>(number)};
  }

  /// Lets a TrainingStep train with all of them.
  void add_to(torchamp::TrainingStepOptions& options) const {
    if (count() > 1) options.group = group_;
  }

  void save(const torchamp::TrainingCheckpoint& checkpoint) const {
    count() > 1 ? torchamp::save_together(checkpoint, group_) : checkpoint.save();
  }
  bool load(torchamp::TrainingCheckpoint& checkpoint) const {
    return count() > 1 ? torchamp::load_together(checkpoint, group_) : checkpoint.load();
  }

 private:
  torchamp::ProcessGroupPtr group_ =
      torchamp::make_process_group({.timeout = std::chrono::minutes(5)});
};

#else

/// Without Gloo's headers: this process alone.
class Processes {
 public:
  Processes() {
    const char* const count = std::getenv("WORLD_SIZE");
    if (count && count != std::string("1")) {
      throw support::UsageError(
          "built for one process, without Gloo's headers (apt install libgloo-dev)");
    }
  }
  int rank() const { return 0; }
  int count() const { return 1; }
  torch::Device device_of(torch::Device type) const { return type; }
  void add_to(torchamp::TrainingStepOptions&) const {}
  void save(const torchamp::TrainingCheckpoint& checkpoint) const { checkpoint.save(); }
  bool load(torchamp::TrainingCheckpoint& checkpoint) const { return checkpoint.load(); }
};

#endif
