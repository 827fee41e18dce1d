// SPDX-License-Identifier: BSD-3-Clause
// A graph for each of several combinations of shapes and dtypes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "support/captured_step.h"
#include "support/expect_error.h"

namespace {

using training_steps::batch_of;
using training_steps::loss_of;
using training_steps::Net;

using CapturedShapes = CapturedStepTest;
INSTANTIATE_TEST_SUITE_P(CudaGraph, CapturedShapes, ::testing::Values(at::kCUDA, at::kPrivateUse1),
                         device_name);

/// The first `rows` of batch `number`.
Tensors rows_of(at::DeviceType device, int number, int64_t rows) {
  const Tensors all = batch_of(device, number);
  return {all[0].narrow(0, 0, rows).clone(), all[1].narrow(0, 0, rows).clone()};
}

TEST_P(CapturedShapes, EachHasItsGraph) {
  StepTwins twins(GetParam(), {.warmup = 2, .shapes = 3});
  for (int i = 0; i < 18; ++i) {
    SCOPED_TRACE(i);
    twins.step(rows_of(GetParam(), i, 2 + i % 3));
  }
  EXPECT_EQ(twins.calls, 3 * (2 + 1)) << "two warm-ups and a capture of each";
}

TEST_P(CapturedShapes, OverflowsOfOneAreSeenByTheOthers) {
  StepTwins twins(GetParam(), {.warmup = 1, .shapes = 2});
  for (int i = 0; i < 16; ++i) {
    SCOPED_TRACE(i);
    Tensors given = rows_of(GetParam(), i, 3 + i % 2);
    if (i % 5 == 4) given[1].fill_(INFINITY);
    twins.step(given);
  }
  EXPECT_EQ(twins.calls, 2 * 2);
}

TEST_P(CapturedShapes, DtypesAreAPartOfThem) {
  StepTwins twins(GetParam(), {.warmup = 1, .shapes = 2});
  for (int i = 0; i < 8; ++i) {
    Tensors given = batch(i);
    if (i % 2 == 1) given[1] = given[1].to(at::kHalf);
    twins.step(given);
  }
  EXPECT_EQ(twins.calls, 2 * 2);
}

TEST_P(CapturedShapes, BeyondTheirNumberTheOthersGoOnEagerly) {
  StepTwins twins(GetParam(), {.warmup = 1, .shapes = 2});
  for (int i = 0; i < 15; ++i) {
    SCOPED_TRACE(i);
    twins.step(rows_of(GetParam(), i, 2 + i % 3));
  }
  EXPECT_EQ(twins.calls, 2 + 2 + 5) << "the third is called in turn with the others, always";
}

TEST_P(CapturedShapes, OneThatIsNoLongerCalledMakesRoom) {
  StepTwins twins(GetParam(), {.warmup = 1, .shapes = 2});
  const auto run = [&](std::vector<int64_t> rows, int calls) {
    const int before = twins.calls;
    int number = 0;
    for (const int64_t one : rows) twins.step(rows_of(GetParam(), ++number, one));
    EXPECT_EQ(twins.calls - before, calls);
  };
  run({2, 3, 2, 3, 2, 3}, 4);
  run({4, 3, 4, 3, 4, 3}, 2);  // 2 makes room for 4
  run({2, 2, 2}, 2);           // and 4 for 2
  run({3, 2, 3}, 0);
}

TEST_P(CapturedShapes, AnotherShapeIsAnErrorIfThereIsOneGraph) {
  StepTwins twins(GetParam(), {.warmup = 1});
  for (int i = 0; i < 3; ++i) twins.step(i);
  EXPECT_ERROR(twins.step(rows_of(GetParam(), 3, 2)), "set CudaGraphOptions::shapes");
}

TEST_P(CapturedShapes, ALastBatchIsEagerWhenPossible) {
  StepTwins twins(GetParam(), {.warmup = 2, .when_possible = true});
  for (int i = 0; i < 12; ++i) twins.step(rows_of(GetParam(), i, i % 4 == 3 ? 2 : 4));
  EXPECT_EQ(twins.calls, 3 + 3) << "three smaller batches";
}

TEST_P(CapturedShapes, GradientsAfterAReplayAreNeverAnotherGraphs) {
  StepTwins twins(GetParam(), {.warmup = 1, .shapes = 2});
  for (int i = 0; i < 10; ++i) {
    SCOPED_TRACE(i);
    twins.step(rows_of(GetParam(), i, 2 + i % 2));
    const auto kept = twins.captured.net->parameters(), expected = twins.eager.net->parameters();
    for (std::size_t p = 0; p < kept.size(); ++p) {
      const at::Tensor gradient = expected[p].grad();
      if (!kept[p].grad().defined() || !gradient.isfinite().all().item<bool>()) continue;
      expect_same(kept[p].grad(), gradient);
    }
  }
}

TEST_P(CapturedShapes, FollowRatesOptionsAndModes) {
  StepTwins twins(GetParam(), {.warmup = 1, .shapes = 2});
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE(i);
    twins.both([i](auto& twin) {
      auto& options =
          static_cast<torch::optim::AdamWOptions&>(twin.optimizer.param_groups()[0].options());
      options.lr(std::ldexp(1., -6 - i % 3));
      if (i == 8) options.betas({0.5, 0.75});
      if (i == 12) twin.net->norm->eval();
      if (i == 16) twin.net->train();
    });
    twins.step(rows_of(GetParam(), i, 2 + i % 2));
  }
}

TEST_P(CapturedShapes, FunctionsOfDifferentTypesHaveAGraphEach) {
  for (const bool by_std_function : {false, true}) {
    StepTwins twins(GetParam(), {.warmup = 1, .shapes = 2});
    for (int i = 0; i < 8; ++i) {
      SCOPED_TRACE(i);
      const Tensors given = batch(i);
      twins.both([&](auto& twin) {
        const auto mean = [&twin](const Tensors& in) { return loss_of(twin.net, in); };
        const auto sum = [&twin](const Tensors& in) { return loss_of(twin.net, in) * 4; };
        using Loss = std::function<at::Tensor(const Tensors&)>;
        if (by_std_function) {
          twin.train(given, i % 2 == 0 ? Loss(mean) : Loss(sum));
        } else if (i % 2 == 0) {
          twin.train(given, mean);
        } else {
          twin.train(given, sum);
        }
      });
      twins.expect_agreement();
    }
  }
}

TEST_P(CapturedShapes, AnotherFunctionIsAnErrorIfThereIsOneGraph) {
  StepTwins twins(GetParam(), {.warmup = 1});
  for (int i = 0; i < 3; ++i) twins.step(i);
  EXPECT_ERROR(
      twins.captured.train(batch(3),
                           [&](const Tensors& in) { return loss_of(twins.captured.net, in) * 2; }),
      "the function is another one than in the first call");
  twins.step(4);
}

TEST_P(CapturedShapes, NoneIsRefused) {
  EXPECT_ERROR(StepTwins(GetParam(), {.shapes = 0}), "CudaGraph: shapes is 0");
}

}  // namespace
