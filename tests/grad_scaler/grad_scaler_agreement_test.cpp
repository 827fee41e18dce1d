// SPDX-License-Identifier: BSD-3-Clause
// Processes that agree on the overflow flag, played by threads that meet in a sum.
#include <torchamp/grad_scaler.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/closure_step.h>

#include <barrier>
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/on_device.h"
#include "support/optimizers.h"

using torchamp::GradScaler;
using torchamp::GradScalerOptions;

namespace {

/// A sum over `ranks` threads that all have to come.
class AllReduce {
 public:
  explicit AllReduce(int ranks) : arrive_(ranks, Swap{*this}), leave_(ranks) {}

  void operator()(at::Tensor& flag) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      sum_ += flag.item<float>();
      ++calls;
    }
    arrive_.arrive_and_wait();
    flag.fill_(total_);
    leave_.arrive_and_wait();
  }

  int calls = 0;

 private:
  struct Swap {
    AllReduce& self;
    void operator()() noexcept { self.total_ = std::exchange(self.sum_, 0.F); }
  };

  std::mutex mutex_;
  std::barrier<Swap> arrive_;
  std::barrier<> leave_;
  float sum_ = 0;
  float total_ = 0;
};

enum class Path {
  plain,
  unscaled_by_hand,
  fused,
  fused_unscaled_by_hand,
  unscaled_and_not_stepped
};
constexpr Path kPaths[] = {Path::plain, Path::unscaled_by_hand, Path::fused,
                           Path::fused_unscaled_by_hand, Path::unscaled_and_not_stepped};

}  // namespace

TEST(GradScalerAgreement, HoldsOnEveryPathForEveryRank) {
  constexpr int ranks = 3;
  for (const Path path : kPaths) {
    SCOPED_TRACE(static_cast<int>(path));
    AllReduce all_reduce(ranks);
    std::vector<std::vector<double>> scales(ranks);
    std::vector<std::vector<bool>> stepped(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        GradScaler scaler({.init_scale = 16.,
                           .growth_interval = 2,
                           .agree_found_inf = [&](at::Tensor& flag) { all_reduce(flag); }});
        const at::Tensor w = torch::zeros({1}, torch::requires_grad());
        PlainScaledSGD fused({w}, torch::optim::SGDOptions(1.));
        auto plain = sgd({w});
        const bool is_fused = path == Path::fused || path == Path::fused_unscaled_by_hand;
        torch::optim::Optimizer& optimizer =
            is_fused ? static_cast<torch::optim::Optimizer&>(fused) : plain;
        for (int i = 0; i < 8; ++i) {
          // In turn one rank holds an inf, and another has no gradient at all.
          const bool bad = i % 4 == rank;
          const bool none = i % 4 == (rank + 1) % ranks;
          w.mutable_grad() = none ? at::Tensor() : torch::full({1}, bad ? HUGE_VAL : 16.);
          scaler.scale(torch::ones({}));
          if (path == Path::unscaled_by_hand || path == Path::fused_unscaled_by_hand ||
              path == Path::unscaled_and_not_stepped) {
            scaler.unscale_(optimizer);
          }
          if (path != Path::unscaled_and_not_stepped) {
            stepped[static_cast<std::size_t>(rank)].push_back(scaler.step(optimizer).stepped());
          }
          scaler.update();
          scales[static_cast<std::size_t>(rank)].push_back(scaler.get_scale());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(all_reduce.calls, 8 * ranks) << "once for each iteration";
    // Bad, bad, bad, good, and again.
    EXPECT_EQ(scales[0], (std::vector<double>{8, 4, 2, 2, 1, 0.5, 0.25, 0.25}));
    for (int rank = 1; rank < ranks; ++rank) {
      EXPECT_EQ(scales[static_cast<std::size_t>(rank)], scales[0]);
      EXPECT_EQ(stepped[static_cast<std::size_t>(rank)], stepped[0]);
    }
    for (std::size_t i = 0; i < stepped[0].size(); ++i) EXPECT_EQ(stepped[0][i], i % 4 == 3);
  }
}

TEST(GradScalerAgreement, SkipsAClosureOnEveryRankIfOneOverflows) {
  constexpr int ranks = 3;
  AllReduce all_reduce(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      GradScaler scaler(
          {.init_scale = 16., .agree_found_inf = [&](at::Tensor& flag) { all_reduce(flag); }});
      const at::Tensor w = torch::ones({2}, torch::requires_grad());
      torch::optim::LBFGS optimizer({w}, torch::optim::LBFGSOptions(0.1).max_iter(3));
      int evaluations = 0;
      const auto loss = [&] {
        const bool bad = evaluations++ == rank;  // each rank's own one, one after the other
        return (w * w).sum() * (bad ? HUGE_VAL : 1.);
      };
      for (int i = 0; i < ranks; ++i) {
        EXPECT_FALSE(step(scaler, optimizer, loss));
        scaler.update();
      }
      const torchamp::StepResult result = step(scaler, optimizer, loss);
      EXPECT_TRUE(result);
      EXPECT_EQ(result.scale(), 2.);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 2.);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(GradScalerAgreement, GivesTheOptimizerAFlagOfExactlyOne) {
  GradScaler scaler({.agree_found_inf = [](at::Tensor& flag) { flag = torch::full({1}, 7); }});
  scaler.scale(torch::ones({}));
  PlainScaledSGD fused({parameter_with(torch::ones({1}))}, torch::optim::SGDOptions(1.));
  EXPECT_FALSE(scaler.step(fused));
  EXPECT_EQ(fused.given_found_inf.item<float>(), 1.F) << "ATen's fused kernels test for 1";
  EXPECT_EQ(fused.given_found_inf.dim(), 0);
  EXPECT_EQ(fused.given_found_inf.scalar_type(), at::kFloat);
}

TEST(GradScalerAgreement, IsAskedOncePerOptimizer) {
  int calls = 0;
  GradScaler scaler({.agree_found_inf = [&](at::Tensor&) { ++calls; }});
  scaler.scale(torch::ones({}));
  auto one = sgd({parameter_with(torch::ones({1}))});
  auto two = sgd({parameter_with(torch::ones({1}))});
  scaler.unscale_(one);
  EXPECT_EQ(calls, 0);
  scaler.step(one);
  scaler.step(two);
  EXPECT_EQ(calls, 2);
  scaler.update();
  EXPECT_EQ(calls, 2);
}

TEST(GradScalerAgreement, FailsWithoutChangingTheScaler) {
  bool fails = true;
  GradScaler scaler({.agree_found_inf = [&](at::Tensor& flag) {
    TORCH_CHECK(!fails || flag.defined(), "unused");
    if (fails) flag = at::Tensor();
  }});
  scaler.scale(torch::ones({}));
  const at::Tensor w = parameter_with(torch::full({1}, 65536.));
  auto optimizer = sgd({w});
  EXPECT_ERROR(scaler.step(optimizer),
               "found_inf is not a tensor of one element after agree_found_inf");
  fails = false;
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(w.item<float>(), -1.F);
}

TEST(GradScalerAgreement, CountsAnotherRanksInfWithoutItsOwnGradients) {
  for (const bool on_device : {false, true}) {
    GradScaler scaler({.agree_found_inf = [](at::Tensor& flag) { flag.fill_(1); }});
    scaler.scale(torch::ones({}));
    if (on_device) move_to_device(scaler);
    auto optimizer = sgd({torch::ones({1}, torch::requires_grad())});
    const torchamp::StepResult result = scaler.step(optimizer);
    EXPECT_FALSE(result.stepped());
    EXPECT_EQ(result.skips_in_a_row(), 1);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32768.);
  }
}

TEST(GradScalerAgreement, LetsARecheckSeeWhatCameAfterTheFlagWasAskedFor) {
  int calls = 0;
  GradScaler scaler({.agree_found_inf = [&](at::Tensor&) { ++calls; }, .recheck = true});
  scaler.scale(torch::ones({}));
  const at::Tensor w = parameter_with(torch::full({1}, 65536.));
  auto optimizer = sgd({w});
  scaler.unscale_(optimizer);
  const at::Tensor asked = scaler.found_inf(optimizer);
  w.mutable_grad().fill_(HUGE_VAL);
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_EQ(w.item<float>(), 0.F);
  EXPECT_EQ(asked.item<float>(), 0.F) << "as it was when it was asked for";
  EXPECT_EQ(calls, 2);
}

TEST(GradScalerAgreement, HoldsForAFusedStepThatIsTriedAgain) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    int calls = 0;
    GradScaler scaler({.agree_found_inf = [&](at::Tensor& flag) {
      ++calls;
      flag.fill_(1);  // another process's
    }});
    FailingScaledSgd optimizer({parameter_with(torch::ones({1}))}, torch::optim::SGDOptions(1.));
    scaler.scale(torch::ones({}));
    optimizer.fails = fails;
    if (fails) {
      EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
    }
    optimizer.fails = false;
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(scaler.get_scale(), 32768.);
  }
}
