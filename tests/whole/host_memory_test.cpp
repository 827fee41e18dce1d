// SPDX-License-Identifier: BSD-3-Clause
// Changes the process's malloc, and counts what it asks of the kernel.
#include "torchamp/host_memory.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>

#include "torchamp/autocast.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"

namespace {

int64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// A training program whose gradients and activations are blocks of 1 to 4 MB.
class Training {
 public:
  Training() {
    for (int i = 0; i < 4; ++i) {
      model_->push_back(torch::nn::Linear(512, 2048));
      model_->push_back(torch::nn::ReLU());
      model_->push_back(torch::nn::Linear(2048, 512));
    }
    optimizer_ = std::make_unique<torchamp::FusedAdamW>(model_->parameters(), 1e-3);
  }

  void step() {
    optimizer_->zero_grad();
    at::Tensor loss;
    {
      const torchamp::AutocastGuard autocast(at::kCPU);
      loss = torch::mse_loss(model_->forward(input_), input_);
    }
    scaler_.scale(loss).backward();
    scaler_.step(*optimizer_);
    scaler_.update();
  }

  /// The fewest of some times: a machine that is short of memory takes pages back.
  int64_t faults_of_steps(int warm_up, int steps) {
    for (int i = 0; i < warm_up; ++i) step();
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (int time = 0; time < 5; ++time) {
      const int64_t before = page_faults();
      for (int i = 0; i < steps; ++i) step();
      fewest = std::min(fewest, page_faults() - before);
    }
    return fewest;
  }

 private:
  torch::nn::Sequential model_;
  std::unique_ptr<torchamp::FusedAdamW> optimizer_;
  torchamp::GradScaler scaler_;
  at::Tensor input_ = torch::randn({64, 512});
};

TEST(KeepHostMemory, LetsAStepTakeNoPageFaultsToSpeakOf) {
  if (!torchamp::keep_host_memory()) GTEST_SKIP() << "malloc is not glibc's";
  Training training;
  EXPECT_LT(training.faults_of_steps(5, 5), 100);
}

TEST(KeepHostMemory, MayBeCalledAgainAndByAnyThread) {
  const bool kept = torchamp::keep_host_memory();
  std::thread([&] { EXPECT_EQ(torchamp::keep_host_memory(), kept); }).join();
  if (!kept) GTEST_SKIP() << "malloc is not glibc's";
  Training training;
  EXPECT_LT(training.faults_of_steps(5, 5), 100);
}

TEST(KeepHostMemory, GivesNoBlockPagesOfItsOwn) {
  if (!torchamp::keep_host_memory()) GTEST_SKIP() << "malloc is not glibc's";
  const std::size_t before = mallinfo2().hblks;
  const at::Tensor large = torch::empty({12 << 20});  // 48 MB: above all of glibc's own limits
  EXPECT_EQ(mallinfo2().hblks, before);
}

}  // namespace
