// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/training_checkpoint.h>
#include <torchamp/training_step.h>

void load_discarded(torchamp::TrainingStep& train) {
  // error: ignoring return value.*nodiscard
  train.load("run.pt");
}

struct Constant : torch::optim::LRScheduler {
  using LRScheduler::LRScheduler;
  std::vector<double> get_lrs() override { return get_current_lrs(); }
};

void of_an_own_scheduler(torchamp::TrainingCheckpoint& checkpoint, Constant& scheduler) {
  // error: cannot save your own scheduler
  checkpoint.add("scheduler", scheduler);
}

void of_a_scheduler_with_private_state(torchamp::TrainingCheckpoint& checkpoint,
                                       torch::optim::ReduceLROnPlateauScheduler& scheduler) {
  // error: ReduceLROnPlateauScheduler, whose state is private
  checkpoint.add("scheduler", scheduler);
}
