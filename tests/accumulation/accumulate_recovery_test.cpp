// SPDX-License-Identifier: BSD-3-Clause
// What an Accumulation does after an error, and what it does not take.
#include <torchamp/accumulate.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/optim.h>
#include <torchamp/training_checkpoint.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/non_finite.h"
#include "support/optimizers.h"
#include "support/temporary_folder.h"
#include "support/warnings.h"

using torchamp::Accumulation;
using torchamp::GradScaler;

// ---- Accumulation -------------------------------------------------------------------------------

TEST(AccumulationAfterAnError, AddsNothingToAWindowWhoseStepFailed) {
  for (const bool in_optimizer : {false, true}) {
    SCOPED_TRACE(in_optimizer);
    const at::Tensor w = zero();
    FailingSgd optimizer({w}, torch::optim::SGDOptions(1.));
    optimizer.fails = in_optimizer;
    bool fails = !in_optimizer;
    GradScaler scaler({.init_scale = 65536.});
    Accumulation accumulation(scaler, optimizer, 2);
    if (!in_optimizer) {
      accumulation.before_step([&] {
        if (fails) throw std::runtime_error("mine");
      });
    }
    accumulation.backward((w * 1).sum());
    EXPECT_THROW(accumulation.backward((w * 3).sum()), std::runtime_error);
    EXPECT_EQ(accumulation.pending(), 2);
    EXPECT_ERROR(accumulation.backward((w * 5).sum()), "discard()");
    EXPECT_ERROR(accumulation.backward((w * 5).sum()), "the step with 2 of 2 micro-batches has");
    EXPECT_EQ(w.item<float>(), 0.F);

    // The step may be tried again ...
    optimizer.fails = fails = false;
    EXPECT_TRUE(accumulation.flush()->stepped());
    EXPECT_EQ(w.item<float>(), -2.F);

    // ... or the window dropped, with what the scaler has recorded of it.
    optimizer.fails = in_optimizer;
    fails = !in_optimizer;
    accumulation.backward((w * 1).sum());
    EXPECT_THROW(accumulation.backward((w * 3).sum()), std::runtime_error);
    accumulation.discard();
    EXPECT_FALSE(scaler.is_unscaled(optimizer));
    EXPECT_FALSE(w.grad().defined());
    optimizer.fails = fails = false;
    accumulation.backward((w * 2).sum());
    EXPECT_TRUE(accumulation.backward((w * 6).sum())->stepped());
    EXPECT_EQ(w.item<float>(), -6.F);
  }
}

TEST(AccumulationAfterAnError, AddsNothingToAnIncompleteWindowWhoseStepFailed) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  bool fails = true;
  GradScaler scaler({.init_scale = 65536.});
  Accumulation accumulation(scaler, optimizer, 4);
  accumulation.before_step([&] {
    if (fails) throw std::runtime_error("mine");
  });
  accumulation.backward((w * 4).sum());
  EXPECT_THROW(accumulation.flush(), std::runtime_error);
  EXPECT_ERROR(accumulation.backward((w * 4).sum()), "the step with 1 of 4 micro-batches has");
  fails = false;
  accumulation.flush();
  EXPECT_EQ(w.item<float>(), -1.F);
}

TEST(AccumulationAfterAnError, DividesGradientsOnceThoughAnUpdateComesBeforeTheStepIsTriedAgain) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  bool fails = true;
  GradScaler scaler({.init_scale = 65536.});
  Accumulation accumulation(scaler, optimizer, 2);
  accumulation.before_step([&] {
    if (fails) throw std::runtime_error("mine");
  });
  accumulation.backward((w * 1).sum());
  EXPECT_THROW(accumulation.backward((w * 3).sum()), std::runtime_error);
  scaler.update();  // another accumulation's, say
  fails = false;
  EXPECT_ERROR(accumulation.flush(), "Call discard() to begin a new window");
  EXPECT_EQ(w.item<float>(), 0.F);
  accumulation.discard();
  accumulation.backward((w * 1).sum());
  EXPECT_TRUE(accumulation.backward((w * 3).sum())->stepped());
  EXPECT_EQ(w.item<float>(), -2.F);
}

TEST(AccumulationAfterAnError, AddsNothingToGradientsThatTheProgramUnscaledOrSteppedWith) {
  for (const bool stepped : {false, true}) {
    const at::Tensor w = zero();
    auto optimizer = sgd({w});
    GradScaler scaler({.init_scale = 65536.});
    Accumulation accumulation(scaler, optimizer, 4);
    accumulation.backward((w * 4).sum());
    if (stepped) {
      scaler.step(optimizer);
    } else {
      scaler.unscale_(optimizer);
    }
    EXPECT_ERROR(accumulation.backward((w * 4).sum()), "Call discard() to begin a new window");
    accumulation.discard();
    for (int i = 0; i < 4; ++i) accumulation.backward((w * 2).sum());
    EXPECT_EQ(w.item<float>(), stepped ? -3.F : -2.F);
  }
}

TEST(AccumulationMisuse, AStepOfTheProgramsOwnWithinAWindowIsAnErrorAfterItsUpdate) {
  for (const bool fused : {false, true}) {
    const at::Tensor w = zero();
    torch::optim::SGD plain({w}, torch::optim::SGDOptions(1.));
    torchamp::FusedSGD of_ours({w}, torch::optim::SGDOptions(1.));
    torch::optim::Optimizer& optimizer =
        fused ? static_cast<torch::optim::Optimizer&>(of_ours) : plain;
    GradScaler scaler({.init_scale = 1024.});  // which stays as it is
    Accumulation accumulation(scaler, optimizer, 2);
    accumulation.backward((w * 4).sum());
    scaler.step(optimizer);
    scaler.update();
    const std::string error =
        ": the scaler has stepped with the gradients of 1 of 2 micro-batches, or unscaled them, in "
        "an iteration that has ended. Leave step and update to the accumulation. Call discard() to "
        "begin a new window.";
    EXPECT_ERROR(accumulation.backward((w * 4).sum()), "Accumulation::backward" + error);
    EXPECT_ERROR(accumulation.flush(), "Accumulation::flush" + error);
    accumulation.discard();
    for (int i = 0; i < 2; ++i) accumulation.backward((w * 2).sum());
    EXPECT_EQ(w.item<float>(), -4.F);
    // Before update(), a step with what there is may be left to flush().
    accumulation.backward((w * 4).sum());
    scaler.unscale_(optimizer);
    EXPECT_TRUE(accumulation.flush()->stepped());
    EXPECT_EQ(w.item<float>(), -6.F);
  }
}

TEST(AccumulationMisuse, AWindowThatIsLeftOpenIsAWarning) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler;
  const CollectedWarnings warnings;
  {
    Accumulation accumulation(scaler, optimizer, 2);
    Accumulation moved = std::move(accumulation);
    for (int i = 0; i < 4; ++i) moved.backward(w.sum());
    moved.backward(w.sum());
    moved.discard();
    DroppingAccumulation safe(scaler, optimizer);
    safe.backward(w.sum());
    safe.step();
  }
  EXPECT_EQ(warnings.text(), "");
  { Accumulation(scaler, optimizer, 4).backward(w.sum()); }
  EXPECT_EQ(warnings.text(),
            "Accumulation: destroyed with 1 of 4 micro-batches pending; later gradients will be "
            "added to theirs. First call flush() to step with them, or discard() to drop them.\n");
  { DroppingAccumulation(scaler, optimizer, 4).backward(w.sum()); }
  EXPECT_THAT(
      warnings.text(),
      ::testing::EndsWith("\nAccumulation: destroyed with 1 of 4 micro-batches pending. First "
                          "call flush() to step with them, or discard() to drop them.\n"));
}

TEST(AccumulationAfterAnError, DropsAWindowToWhichHalfAMicroBatchWasAdded) {
  const at::Tensor w = zero(), v = zero();
  torch::optim::SGD optimizer(std::vector<at::Tensor>{w, v}, torch::optim::SGDOptions(1.));
  GradScaler scaler({.init_scale = 4.});
  Accumulation accumulation(scaler, optimizer, 2);
  const auto failing = [&] {
    const at::Tensor late = w * 1;
    late.register_hook([](const at::Tensor&) { throw std::runtime_error("in a hook"); });
    return (late + v * 8).sum();
  };
  EXPECT_ANY_THROW(accumulation.backward(failing()));
  EXPECT_ERROR(accumulation.backward((w * 1).sum()),
               "backward() has failed, so the gradients may hold part");
  EXPECT_ERROR(accumulation.flush(), "Call discard() to begin a new window");
  accumulation.discard();
  for (int i = 0; i < 2; ++i) accumulation.backward((w * 1 + v * 2).sum());
  EXPECT_EQ(w.item<float>(), -1.F);
  EXPECT_EQ(v.item<float>(), -2.F);
  // A loss that cannot be added is no such failure.
  EXPECT_ERROR(accumulation.backward(torch::ones({})), "requires_grad is 0");
  EXPECT_ERROR(accumulation.backward((w * torch::ones({3}))), "the loss has 3 element(s)");
  for (int i = 0; i < 2; ++i) accumulation.backward((w * 1).sum());
  EXPECT_EQ(w.item<float>(), -2.F);
}

TEST(AccumulationAfterAnError, GoesOnAfterALimitOfTheScaler) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler({.init_scale = 8., .max_skips_in_a_row = 1});
  Accumulation accumulation(scaler, optimizer, 1);
  for (int i = 0; i < 2; ++i) {
    EXPECT_ERROR(accumulation.backward((w * kInf).sum()), "1 consecutive iterations");
  }
  EXPECT_TRUE(accumulation.backward((w * 2).sum())->stepped());
  EXPECT_EQ(w.item<float>(), -2.F);
}

TEST(AccumulationMisuse, ClearingGradientsWithinAWindowIsAnError) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler;
  Accumulation accumulation(scaler, optimizer, 4);
  optimizer.zero_grad();  // before the first: nothing is lost
  accumulation.backward((w * 4).sum());
  optimizer.zero_grad();
  EXPECT_ERROR(accumulation.backward((w * 4).sum()),
               "the gradients of 1 of 4 micro-batches are gone. Leave out zero_grad()");
  EXPECT_ERROR(accumulation.flush(), "Accumulation::flush: the gradients of 1 of 4");
  accumulation.discard();
  for (int i = 0; i < 4; ++i) accumulation.backward((w * 4).sum());
  EXPECT_EQ(w.item<float>(), -4.F);
  // A micro-batch may give no gradients at all.
  const at::Tensor other = zero();
  for (int i = 0; i < 3; ++i) accumulation.backward(other.sum());
  EXPECT_TRUE(accumulation.backward((w * 4).sum())->stepped());
}

TEST(AccumulationMisuse, TakesNoLossThatIsScaledAlready) {
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  GradScaler scaler;
  Accumulation accumulation(scaler, optimizer, 2);
  EXPECT_ERROR(accumulation.backward(scaler.scale(w.sum())),
               "Accumulation::backward: this tensor has been scaled already");
  DroppingAccumulation safe(scaler, optimizer);
  EXPECT_ERROR(safe.backward(scaler.scale(w.sum())), "has been scaled already");
  EXPECT_EQ(safe.pending() + accumulation.pending(), 0);
}

// ---- Checkpoints --------------------------------------------------------------------------------

TEST(AccumulationInACheckpoint, IsNotSavedWithinAWindow) {
  const TemporaryFolder folder;
  const at::Tensor w = zero();
  auto optimizer = sgd({w});
  for (const bool enabled : {false, true}) {
    GradScaler scaler({.enabled = enabled});
    torchamp::TrainingCheckpoint checkpoint(folder / "run.pt");
    checkpoint.add("optimizer", optimizer).add("scaler", scaler);
    {
      Accumulation accumulation(scaler, optimizer, 2);
      accumulation.backward(w.sum());
      EXPECT_ERROR(checkpoint.save(), "within a window of gradient accumulation");
      accumulation.backward(w.sum());
      checkpoint.save();
      accumulation.backward(w.sum());
      EXPECT_ERROR((void)checkpoint.load(), "within a window of gradient accumulation");
      Accumulation moved = std::move(accumulation);
      EXPECT_ERROR(checkpoint.save(), "within a window of gradient accumulation");
      moved.discard();
      checkpoint.save();
      moved.backward(w.sum());
    }
    checkpoint.save();  // a window that is gone holds nothing
    DroppingAccumulation safe(scaler, optimizer);
    safe.backward(w.sum());
    EXPECT_ERROR(checkpoint.save(), "within a window of gradient accumulation");
    safe.step();
    checkpoint.save();
    safe.backward(w.sum());
    safe.discard();
    checkpoint.save();
    EXPECT_TRUE(checkpoint.load());
  }
}
