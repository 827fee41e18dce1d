// SPDX-License-Identifier: BSD-3-Clause
// Windows of several micro-batches, of which each is a graph.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/captured_step.h"
#include "support/expect_error.h"
#include "support/warnings.h"
#include "torchamp/master_weights.h"
#include "torchamp/weight_cache.h"

namespace {

using training_steps::loss_of;
using training_steps::Net;

using CapturedWindows = CapturedStepTest;
INSTANTIATE_TEST_SUITE_P(CudaGraph, CapturedWindows, ::testing::Values(at::kCUDA, at::kPrivateUse1),
                         device_name);

TEST_P(CapturedWindows, GiveTheWeightsAndTheScaleOfEagerOnes) {
  StepTwins twins(GetParam(), {.warmup = 2}, {.micro_batches = 3});
  for (int i = 0; i < 30; ++i) {
    SCOPED_TRACE(i);
    twins.step(i, /*overflows=*/i == 13 || i == 20);
    EXPECT_EQ(twins.captured.train.pending(), (i + 1) % 3);
  }
  EXPECT_EQ(twins.calls, 3 * (2 + 1)) << "two warm-ups and a capture of each micro-batch";
  EXPECT_EQ(twins.captured.train.steps(), 10);
}

TEST_P(CapturedWindows, MayEndEarly) {
  StepTwins twins(GetParam(), {.warmup = 1}, {.micro_batches = 3});
  for (int i = 0; i < 28; ++i) {
    SCOPED_TRACE(i);
    twins.step(i);
    if (i % 7 != 6 && i != 3) continue;
    const auto expected = twins.eager.train.finish(), result = twins.captured.train.finish();
    ASSERT_EQ(result.has_value(), expected.has_value());
    if (result) {
      EXPECT_EQ(result->stepped(), expected->stepped());
      EXPECT_EQ(result->scale(), expected->scale());
    }
    twins.expect_agreement();
  }
}

TEST_P(CapturedWindows, MayHaveSeveralShapes) {
  for (const CudaGraphOptions& options : {CudaGraphOptions{.warmup = 1, .shapes = 2},
                                          CudaGraphOptions{.warmup = 1, .when_possible = true}}) {
    SCOPED_TRACE(options.shapes);
    StepTwins twins(GetParam(), options, {.micro_batches = 2});
    const std::vector<int64_t> rows{4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3,
                                    3, 4, 3, 3, 4, 4, 4, 3, 4, 4, 4};
    for (std::size_t i = 0; i < rows.size(); ++i) {
      SCOPED_TRACE(i);
      const Tensors all = batch(static_cast<int>(i));
      twins.step({all[0].narrow(0, 0, rows[i]).clone(), all[1].narrow(0, 0, rows[i]).clone()});
    }
    EXPECT_LT(twins.calls, 20);
  }
}

TEST_P(CapturedWindows, FollowModesRatesAndOptions) {
  StepTwins twins(GetParam(), {.warmup = 1}, {.micro_batches = 2});
  for (int i = 0; i < 28; ++i) {
    SCOPED_TRACE(i);
    twins.both([i](auto& twin) {
      auto& options =
          static_cast<torch::optim::AdamWOptions&>(twin.optimizer.param_groups()[0].options());
      options.lr(std::ldexp(1., -6 - i % 3));
      if (i == 8) options.betas({0.5, 0.75});
      if (i == 13) twin.net->norm->eval();  // within a window
      if (i == 18) twin.net->train();
      if (i == 23) twin.net->first->weight.set_requires_grad(false);
    });
    twins.step(i);
  }
}

TEST_P(CapturedWindows, ContinueFromALoadedState) {
  StepTwins twins(GetParam(), {.warmup = 1}, {.micro_batches = 2});
  std::vector<std::stringstream> saved(4);
  for (int i = 0; i < 16; ++i) {
    SCOPED_TRACE(i);
    std::size_t which = 0;
    twins.both([&](auto& twin) {
      if (i == 6) {
        torch::save(twin.net, saved[which++]);
        torch::save(twin.optimizer, saved[which++]);
      } else if (i == 10) {
        torch::load(twin.net, saved[which++]);
        torch::load(twin.optimizer, saved[which++]);
      }
    });
    twins.step(i);
  }
}

TEST_P(CapturedWindows, LeaveOutAMicroBatchWhoseFunctionThrows) {
  for (const int failing : {0, 1, 2, 3, 4, 5}) {
    SCOPED_TRACE(failing);
    StepTwins twins(GetParam(), {.warmup = 2}, {.micro_batches = 2});
    bool fails = false;
    const auto loss = [&](Net& net, const Tensors& in) {
      const at::Tensor made = loss_of(net, in);
      if (std::exchange(fails, false)) throw std::runtime_error("mine");
      return made;
    };
    for (int i = 0; i < 12; ++i) {
      if (i == failing) {
        twins.both([](auto& twin) { twin.net->norm->eval(); });  // whose buffers stay
        fails = true;
        EXPECT_THROW(twins.step_captured(batch(i), loss), std::runtime_error);
        twins.both([](auto& twin) { twin.net->norm->train(); });
      }
      twins.step(batch(i), loss);
    }
  }
}

TEST_P(CapturedWindows, GoOnEagerlyIfACaptureFailsInTheMiddle) {
  for (const int failing : {5, 6}) {  // the calls that are captured
    SCOPED_TRACE(failing);
    const CollectedWarnings warnings;
    StepTwins twins(GetParam(), {.warmup = 2, .when_possible = true}, {.micro_batches = 2});
    for (int i = 0; i < 12; ++i) {
      twins.step(batch(i), [&](Net& net, const Tensors& in) {
        const at::Tensor made = loss_of(net, in);
        if (&net == &twins.captured.net && twins.calls == failing) {
          throw std::runtime_error("only here");
        }
        return made;
      });
      EXPECT_EQ(twins.captured.train.pending(), twins.eager.train.pending());
    }
    EXPECT_EQ(twins.captured.train.steps(), 6);
    EXPECT_THAT(warnings.text(), ::testing::HasSubstr("threw while it was captured: only here"));
  }
}

TEST_P(CapturedWindows, TakeCallsWithoutInputsBetweenReplays) {
  StepTwins twins(GetParam(), {.warmup = 1, .when_possible = true}, {.micro_batches = 3});
  for (int i = 0; i < 24; ++i) {
    SCOPED_TRACE(i);
    if (i % 5 != 4) {
      twins.step(i);
      continue;
    }
    const Tensors given = batch(i);
    twins.both([&given](auto& twin) { twin.train([&] { return loss_of(twin.net, given); }); });
    twins.expect_agreement();
  }
}

TEST_P(CapturedWindows, MakeTheirCastsInEachMicroBatch) {
  StepTwins twins(GetParam(), {.warmup = 2, .when_possible = true},
                  {.micro_batches = 2, .cache = torchamp::WeightCache::window});
  for (int i = 0; i < 14; ++i) {
    SCOPED_TRACE(i);
    const Tensors all = batch(i);
    const int64_t rows = i == 9 || i == 11 ? 3 : 4;  // those are eager
    twins.step({all[0].narrow(0, 0, rows).clone(), all[1].narrow(0, 0, rows).clone()});
  }
  EXPECT_EQ(twins.calls, 2 * 3 + 2);
}

TEST_P(CapturedWindows, ReportThatGradientsAreGone) {
  StepTwins twins(GetParam(), {.warmup = 1}, {.micro_batches = 2});
  for (int i = 0; i < 7; ++i) twins.step(i);  // the last one is a replay, of the first half
  twins.captured.optimizer.zero_grad();
  EXPECT_ERROR(twins.step(7), "are gone. Leave out zero_grad()");
}

TEST_P(CapturedWindows, StepMasterWeights) {
  using torchamp::MasterStorage;
  for (const bool main_gradients : {false, true}) {
    for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
      SCOPED_TRACE(main_gradients);
      SCOPED_TRACE(static_cast<int>(storage));
      const torchamp::MasterWeightsOptions masters{
          .dtype = storage == MasterStorage::split ? at::kBFloat16 : at::kHalf,
          .storage = storage,
          .main_gradients = main_gradients};
      const auto make = [](auto parameters) {
        return std::make_unique<torchamp::FusedAdamW>(std::move(parameters),
                                                      torch::optim::AdamWOptions(1. / 128));
      };
      Net eager_net = training_steps::make_net(GetParam());
      Net captured_net = training_steps::make_net(GetParam());
      torchamp::TrainingStep eager(eager_net, make,
                                   {.max_grad_norm = 0.5, .micro_batches = 2, .masters = masters});
      torchamp::TrainingStep captured(captured_net, make,
                                      {.max_grad_norm = 0.5,
                                       .micro_batches = 2,
                                       .masters = masters,
                                       .capture = CudaGraphOptions{.warmup = 1}});
      int calls = 0;
      for (int i = 0; i < 12; ++i) {
        eager(batch(i), [&](const Tensors& in) { return loss_of(eager_net, in); });
        captured(batch(i), [&](const Tensors& in) {
          ++calls;
          return loss_of(captured_net, in);
        });
        expect_same(captured_net->parameters(), eager_net->parameters());
      }
      EXPECT_EQ(calls, 4);
      c10::impl::VirtualGuardImpl(GetParam()).synchronizeDevice(0);
    }
  }
}

}  // namespace
