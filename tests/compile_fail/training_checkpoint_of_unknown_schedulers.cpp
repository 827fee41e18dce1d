// SPDX-License-Identifier: BSD-3-Clause
// error: cannot save your own scheduler.*ReduceLROnPlateauScheduler, whose state is private
#include <torchamp/training_checkpoint.h>

struct Constant : torch::optim::LRScheduler {
  using LRScheduler::LRScheduler;
  std::vector<double> get_lrs() override { return get_current_lrs(); }
};

void of_unknown_schedulers(Constant& own, torch::optim::ReduceLROnPlateauScheduler& libtorchs) {
  torchamp::TrainingCheckpoint checkpoint("run.pt");
  checkpoint.add("own", own);
  checkpoint.add("LibTorch's", libtorchs);
}
