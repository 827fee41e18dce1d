// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/accumulate.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/optim.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "support/call_counter.h"
#include "support/devices.h"
#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/non_finite.h"
#include "support/on_device.h"
#include "support/optimizers.h"
#include "support/skips.h"
#include "support/tolerances.h"

using torchamp::Accumulation;
using torchamp::AccumulationResult;
using torchamp::GradScaler;

namespace {

class AccumulateOn : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
  at::Tensor tensor(std::vector<float> values) const {
    return torch::tensor(values).to(GetParam());
  }
};

}  // namespace

// ---- One scale for a window ---------------------------------------------------------------------

TEST_P(AccumulateOn, StepsWithTheMeanAfterTheLastMicroBatch) {
  const at::Tensor w = tensor({0}).requires_grad_();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 8., .growth_interval = 2});
  Accumulation accumulation(scaler, optimizer, 3);
  for (int window = 0; window < 2; ++window) {
    EXPECT_FALSE(accumulation.backward((w * 1).sum()));
    EXPECT_FALSE(accumulation.backward((w * 2).sum()));
    EXPECT_EQ(accumulation.pending(), 2);
    const auto result = accumulation.backward((w * 6).sum());
    ASSERT_TRUE(result);
    EXPECT_TRUE(result->stepped());
    EXPECT_EQ(accumulation.pending(), 0);
    EXPECT_FALSE(w.grad().defined());
  }
  expect_close(w.detach(), tensor({-6}));
  EXPECT_EQ(scaler.get_scale(), 16.) << "a window is an iteration";
}

TEST_P(AccumulateOn, SkipsTheWindowForOneBadMicroBatch) {
  const at::Tensor w = tensor({0}).requires_grad_();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 8.});
  Accumulation accumulation(scaler, optimizer, 2);
  accumulation.backward((w * kInf).sum());
  EXPECT_FALSE(accumulation.backward((w * 1).sum())->stepped());
  expect_close(w.detach(), tensor({0}));
  EXPECT_EQ(scaler.get_scale(), 4.);
}

TEST_P(AccumulateOn, ClipsBeforeTheStep) {
  const at::Tensor w = tensor({0}).requires_grad_();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 8.});
  Accumulation accumulation(scaler, optimizer, 2);
  accumulation.before_step([&] { w.mutable_grad().clamp_max_(3.); });
  accumulation.backward((w * 8).sum());
  accumulation.backward((w * 8).sum());
  expect_close(w.detach(), tensor({-3}));
}

TEST(Accumulation, FlushesAnIncompleteWindow) {
  const at::Tensor w = torch::zeros({1}, torch::requires_grad());
  auto optimizer = sgd({w});
  GradScaler scaler;
  Accumulation accumulation(scaler, optimizer, 4);
  EXPECT_FALSE(accumulation.flush());
  accumulation.backward((w * 4).sum());
  ASSERT_TRUE(accumulation.flush());
  EXPECT_EQ(w.item<float>(), -1.F);
  EXPECT_FALSE(accumulation.flush());
}

TEST(Accumulation, RefusesAScaleThatChangesWithinAWindow) {
  for (const bool on_device : {false, true}) {
    const at::Tensor w = torch::zeros({1}, torch::requires_grad());
    auto optimizer = sgd({w});
    GradScaler scaler;
    scaler.scale(w.sum());
    if (on_device) move_to_device(scaler);
    Accumulation accumulation(scaler, optimizer, 3);
    accumulation.backward(w.sum());
    scaler.update(2.);
    EXPECT_ERROR(accumulation.backward(w.sum()),
                 "Accumulation::backward: the scale has changed after 1 of 3 micro-batches");
    EXPECT_ERROR(accumulation.flush(), "Accumulation::flush: the scale has changed after 1 of 3");
    accumulation.discard();
    EXPECT_FALSE(w.grad().defined());
    EXPECT_EQ(accumulation.pending(), 0);
    for (int i = 0; i < 3; ++i) accumulation.backward((w * 2).sum());
    EXPECT_EQ(w.item<float>(), -2.F);
  }
}

TEST(Accumulation, BeginsANewWindowIfUpdateThrows) {
  const at::Tensor w = torch::zeros({1}, torch::requires_grad());
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 8., .max_skips_in_a_row = 1});
  Accumulation accumulation(scaler, optimizer, 1);
  EXPECT_ERROR(accumulation.backward((w * kInf).sum()), "1 consecutive iterations");
  EXPECT_EQ(accumulation.pending(), 0);
  scaler.update(4.);
  EXPECT_TRUE(accumulation.backward((w * 2).sum())->stepped());
  EXPECT_EQ(w.item<float>(), -2.F);
}

TEST(Accumulation, ChecksItsArgumentsAndWorksDisabled) {
  const at::Tensor w = torch::zeros({1}, torch::requires_grad());
  auto optimizer = sgd({w});
  GradScaler scaler({.enabled = false});
  EXPECT_ERROR(Accumulation(scaler, optimizer, 0), "micro_batches is 0");
  Accumulation accumulation(scaler, optimizer, 2);
  EXPECT_ERROR(accumulation.backward({}), "the loss is undefined");
  accumulation.backward((w * 2).sum());
  EXPECT_TRUE(accumulation.backward((w * 4).sum())->stepped());
  EXPECT_EQ(w.item<float>(), -3.F);
}

// ---- One bad micro-batch at a time --------------------------------------------------------------

TEST_P(AccumulateOn, DropsTheBadMicroBatchesAndKeepsTheOthers) {
  for (const bool with_fused : {false, true}) {
    SCOPED_TRACE(with_fused);
    const at::Tensor w = tensor({0, 0}).requires_grad_();
    auto plain = sgd({w});
    PlainScaledSGD fused({w}, torch::optim::SGDOptions(1.));
    torch::optim::Optimizer& optimizer =
        with_fused ? static_cast<torch::optim::Optimizer&>(fused) : plain;
    GradScaler scaler({.init_scale = 16.});
    DroppingAccumulation accumulation(scaler, optimizer);
    accumulation.backward((w * tensor({1, 2})).sum());
    accumulation.backward((w * tensor({kInf, 5})).sum());
    accumulation.backward((w * tensor({3, 6})).sum());
    accumulation.backward((w * tensor({7, kNaN})).sum());
    EXPECT_EQ(accumulation.pending(), 4);
    const AccumulationResult result = accumulation.step();
    EXPECT_TRUE(result);
    EXPECT_EQ(result.kept(), 2);
    EXPECT_EQ(result.dropped(), 2);
    EXPECT_EQ(result.micro_batches(), 4);
    expect_close(w.detach(), tensor({-2, -4}));
    EXPECT_EQ(scaler.get_scale(), 4.) << "the scale changed within the window";
    EXPECT_EQ(accumulation.pending(), 0);

    // The next window starts afresh; nothing of it is good.
    accumulation.backward((w * kInf).sum());
    const AccumulationResult none = accumulation.step();
    EXPECT_FALSE(none);
    EXPECT_EQ(none.dropped(), 1);
    expect_close(w.detach(), tensor({-2, -4}));
    accumulation.backward((w * 1).sum());
    EXPECT_EQ(accumulation.step().dropped(), 0);
    expect_close(w.detach(), tensor({-3, -5}));
  }
}

TEST_P(AccumulateOn, MakesTheStepsOfAFusedOptimizerThatTheGoodMicroBatchesAloneWouldMake) {
  const at::Tensor w = tensor({1, 2, 3}).requires_grad_();
  const at::Tensor expected = tensor({1, 2, 3}).requires_grad_();
  torchamp::FusedAdam fused(std::vector<at::Tensor>{w}, torch::optim::AdamOptions(0.1));
  torch::optim::Adam plain({expected}, torch::optim::AdamOptions(0.1));
  GradScaler scaler({.init_scale = 16.});
  DroppingAccumulation accumulation(scaler, fused);
  for (int window = 0; window < 6; ++window) {
    at::Tensor sum = tensor({0, 0, 0});
    int kept = 0;
    for (int i = 0; i < 3; ++i) {
      at::Tensor gradient = torch::randn({3}).to(GetParam());
      if (window == 0 || (window + i) % 3 == 0) {  // the first window is all bad
        gradient[i].fill_(kNaN);
      } else {
        sum += gradient;
        ++kept;
      }
      accumulation.backward((w * gradient).sum());
    }
    const AccumulationResult result = accumulation.step();
    if (kept > 0) {
      expected.mutable_grad() = sum / kept;
      plain.step();
    }
    EXPECT_EQ(result.kept(), kept);
    EXPECT_EQ(result.stepped(), kept > 0);
    expect_close(w.detach(), expected.detach());
  }
}

TEST_P(AccumulateOn, SumsInFp32AndGivesEachParameterItsOwnDtype) {
  const at::Tensor single = tensor({0}).requires_grad_();
  const at::Tensor twice = tensor({0}).to(at::kDouble).requires_grad_();
  const at::Tensor brain = tensor({0}).to(at::kBFloat16).requires_grad_();
  const at::Tensor complex = tensor({0}).to(at::kComplexFloat).requires_grad_();
  const at::Tensor unused = tensor({0}).requires_grad_();
  const at::Tensor transposed =
      torch::zeros({2, 3}, at::TensorOptions(GetParam())).t().requires_grad_();
  auto optimizer = sgd({single, twice, brain, complex, unused, transposed});
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer);
  for (int i = 0; i < 300; ++i) {
    accumulation.backward((single * 1).sum() + (twice * 2).sum().to(at::kFloat) +
                          (brain * 1).sum().to(at::kFloat) +
                          torch::view_as_real(complex * 3).sum() + (transposed * 5).sum());
  }
  std::vector<at::ScalarType> dtypes;
  EXPECT_TRUE(accumulation.step([&] {
    for (const at::Tensor& p : {single, twice, brain, complex, transposed}) {
      EXPECT_EQ(p.grad().scalar_type(), p.scalar_type());
    }
    EXPECT_FALSE(unused.grad().defined());
    EXPECT_EQ(brain.grad().item<float>(), 1.F) << "300 ones do not add up to 300 in bf16";
  }));
  expect_close(single.detach(), tensor({-1}));
  expect_close(twice.detach(), tensor({-2}).to(at::kDouble));
  expect_close(transposed.detach(), torch::full({3, 2}, -5., at::TensorOptions(GetParam())));
}

TEST_P(AccumulateOn, NeitherReadsNorGrowsWithTheParametersUntilItSteps) {
  const auto calls = [&](int parameters) {
    std::vector<at::Tensor> all;
    at::Tensor loss = torch::zeros({}, at::TensorOptions(GetParam()));
    for (int i = 0; i < parameters; ++i) all.push_back(tensor({0}).requires_grad_());
    PlainScaledSGD optimizer(all, torch::optim::SGDOptions(1.));
    GradScaler scaler;
    DroppingAccumulation accumulation(scaler, optimizer);
    const auto backward = [&] { accumulation.backward(torch::cat(all).sum()); };
    backward();
    const CallCounter counter;
    backward();
    EXPECT_EQ(counter.reads(), 0);
    return counter.calls().at("aten::_fused_sgd_");
  };
  EXPECT_EQ(calls(2), 1);
  EXPECT_EQ(calls(50), 1);
}

TEST(DroppingAccumulation, FollowsTheOtherProcesses) {
  const at::Tensor w = torch::zeros({1}, torch::requires_grad());
  auto optimizer = sgd({w});
  int calls = 0;
  GradScaler scaler({.agree_found_inf = [&](at::Tensor& flag) { flag.fill_(++calls == 2); }});
  DroppingAccumulation accumulation(scaler, optimizer);
  for (const float gradient : {1.F, 100.F, 3.F}) accumulation.backward((w * gradient).sum());
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(accumulation.step().dropped(), 1);
  EXPECT_EQ(w.item<float>(), -2.F);
}

TEST(DroppingAccumulation, WorksDisabledAndNamesItsMisuse) {
  const at::Tensor w = torch::zeros({3}, torch::requires_grad());
  auto optimizer = sgd({w});
  GradScaler disabled({.enabled = false});
  DroppingAccumulation accumulation(disabled, optimizer);
  EXPECT_FALSE(accumulation.flush());
  accumulation.backward((w * 2).sum());
  accumulation.backward((w * 4).sum());
  EXPECT_EQ(accumulation.step().kept(), 2);
  expect_close(w.detach(), torch::full({3}, -3.));

  const at::Tensor table = torch::zeros({5, 1}, torch::requires_grad());
  auto sparse = sgd({table});
  GradScaler scaler;
  DroppingAccumulation other(scaler, sparse);
  const at::Tensor rows = torch::embedding(table, torch::tensor({1, 2}), -1, false, true);
  EXPECT_ERROR(other.backward(rows.sum()), "With .drop_bad gradients must be dense");
  EXPECT_FALSE(scaler.is_unscaled(sparse));
  other.backward((table * 2).sum());
  EXPECT_TRUE(other.step()) << "the failed call left no trace";
}

TEST(Accumulation, RefusesAWindowThatHasLostSomeOfItsGradients) {
  const at::Tensor a = torch::zeros({1}, torch::requires_grad());
  const at::Tensor b = torch::zeros({1}, torch::requires_grad());
  auto optimizer = sgd({a, b});
  GradScaler scaler;
  Accumulation accumulation(scaler, optimizer, 3);
  accumulation.backward((a + b).sum());
  a.mutable_grad().reset();
  EXPECT_ERROR(accumulation.backward(b.sum()), "gradients of 1 of 3 micro-batches are gone");
  accumulation.discard();
  accumulation.backward(a.sum());
  EXPECT_NO_THROW(accumulation.backward(b.sum())) << "gradients may come later";
}

TEST(Accumulation, LeavesTheScalerAloneIfTheLossIsRefused) {
  const at::Tensor w = torch::zeros({1}, torch::requires_grad());
  auto optimizer = sgd({w});
  GradScaler scaler;
  Accumulation accumulation(scaler, optimizer, 2);
  EXPECT_ERROR(accumulation.backward(torch::ones({})), "requires_grad is 0");
  EXPECT_ERROR(accumulation.backward(w.expand({2})), "the loss has 2 element(s)");
  EXPECT_FALSE(scaler.scale_tensor().defined());
}

INSTANTIATE_TEST_SUITE_P(Devices, AccumulateOn, all_devices(), device_name);
