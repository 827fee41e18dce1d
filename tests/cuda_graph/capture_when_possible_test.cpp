// SPDX-License-Identifier: BSD-3-Clause
// Iterations that are captured if they can be, and otherwise run eagerly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <stdexcept>
#include <string>

#include "support/captured_step.h"
#include "support/expect_error.h"
#include "support/warnings.h"
#include "torchamp/recompute.h"

namespace {

using ::testing::HasSubstr;
using training_steps::loss_of;
using training_steps::Net;

using CaptureWhenPossible = CapturedStepTest;
INSTANTIATE_TEST_SUITE_P(CudaGraph, CaptureWhenPossible,
                         ::testing::Values(at::kCUDA, at::kPrivateUse1), device_name);

const CudaGraphOptions when_possible{.warmup = 2, .when_possible = true};

/// Expects that `text` holds `part` once.
void expect_said_once(const std::string& text, const std::string& part) {
  const auto found = text.find(part);
  EXPECT_NE(found, std::string::npos) << "not in: " << text;
  if (found == std::string::npos) return;
  EXPECT_EQ(text.find(part, found + 1), std::string::npos) << "twice: " << text;
}

constexpr const char* goes_on = "iterations run eagerly, with the same results";

TEST_P(CaptureWhenPossible, CapturesWhatCanBeCapturedAndSaysNothing) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  for (int i = 0; i < 9; ++i) twins.step(i, /*overflows=*/i % 4 == 3);
  EXPECT_EQ(twins.calls, 3) << "replays call nothing";
  EXPECT_EQ(twins.captured.train.steps(), 9);
  EXPECT_THAT(warnings.text(), ::testing::Not(HasSubstr(goes_on)));
}

TEST_P(CaptureWhenPossible, GoesOnWithAnOrdinaryOptimizer) {
  const CollectedWarnings warnings;
  StepTwins<torch::optim::SGD, torch::optim::SGDOptions> twins(GetParam(), when_possible);
  for (int i = 0; i < 6; ++i) twins.step(i, /*overflows=*/i == 3);
  EXPECT_EQ(twins.calls, 6);
  expect_said_once(warnings.text(), "an ordinary optimizer decides on the host");
}

TEST_P(CaptureWhenPossible, GoesOnWithAFunctionThatReadsTheDeviceAndNamesTheOp) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  for (int i = 0; i < 6; ++i) {
    twins.step(batch(i), [](Net& net, const Tensors& in) {
      const at::Tensor loss = loss_of(net, in);
      return loss.item<float>() > 1e6F ? loss * 0.5 : loss;
    });
  }
  EXPECT_EQ(twins.calls, 6);
  expect_said_once(warnings.text(), "aten::_local_scalar_dense (Tensor::item)");
  expect_said_once(warnings.text(), goes_on);
}

TEST_P(CaptureWhenPossible, GoesOnWithABranchThatChangesShapes) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  for (int i = 0; i < 7; ++i) {
    twins.step(batch(i), [i](Net& net, const Tensors& in) {
      if (i % 2 == 0) return loss_of(net, in);
      return loss_of(net, {in[0].narrow(0, 0, 2), in[1].narrow(0, 0, 2)});
    });
  }
  EXPECT_EQ(twins.calls, 7 + 1) << "one of them in a capture that was dropped";
  expect_said_once(warnings.text(), "the iteration is not the same in each call");
}

TEST_P(CaptureWhenPossible, GoesOnWithNumbersThatTheHostChanges) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  double weight = 1.;
  for (int i = 0; i < 7; ++i, weight *= 0.5) {
    twins.step(batch(i), [&](Net& net, const Tensors& in) { return loss_of(net, in) * weight; });
  }
  expect_said_once(warnings.text(), "aten::mul takes another number than in the call before");
}

TEST_P(CaptureWhenPossible, GoesOnWithinAWindowWhoseCaptureIsRefusedAfterItRan) {
  for (const int changing : {0, 1, 2}) {  // the micro-batch with the number that changes
    SCOPED_TRACE(changing);
    const CollectedWarnings warnings;
    StepTwins twins(GetParam(), when_possible, {.micro_batches = 3});
    double weight = 1.;
    for (int i = 0; i < 18; ++i) {
      if (i % 3 == changing) weight *= 0.5;
      const double factor = i % 3 == changing ? weight : 1.;
      twins.step(batch(i), [&](Net& net, const Tensors& in) { return loss_of(net, in) * factor; });
    }
    EXPECT_EQ(twins.captured.train.steps(), 6);
    expect_said_once(warnings.text(), "aten::mul takes another number than in the call before");
    EXPECT_THAT(warnings.text(), ::testing::Not(HasSubstr("were written to or replaced")));
  }
}

TEST_P(CaptureWhenPossible, TakesNoStepWithoutGradients) {
  for (const int64_t micro_batches : {1, 2}) {
    SCOPED_TRACE(micro_batches);
    const CollectedWarnings warnings;
    const at::Tensor reached = torch::ones({4}, here()).requires_grad_();
    StepTwins twins(GetParam(), when_possible, {.micro_batches = micro_batches});
    for (int i = 0; i < 12; ++i) {
      const auto result = twins.step_captured(
          batch(i), [&](Net&, const Tensors& in) { return (in[0].sum() * reached).mean(); });
      EXPECT_FALSE(result.stepped()) << i;
    }
    EXPECT_LT(twins.calls, 12) << "the rest was replayed";
    twins.step_captured(batch(0),
                        [&](Net&, const Tensors& in) { return (in[0].sum() * reached).mean(); });
    const auto last = twins.captured.train.finish();
    EXPECT_EQ(last.has_value(), micro_batches == 2);
    EXPECT_FALSE(last && last->stepped());
  }
}

TEST_P(CaptureWhenPossible, GoesOnWithRandomNumbersOfTheHost) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  for (int i = 0; i < 6; ++i) {
    twins.step(batch(i), [i](Net& net, const Tensors& in) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(i));
      const at::Tensor chance = at::empty({1}).uniform_(0., 1., generator);
      return chance.const_data_ptr<float>()[0] < 0.5F ? loss_of(net, in) : loss_of(net, in) * 2;
    });
  }
  EXPECT_EQ(twins.calls, 6);
  expect_said_once(warnings.text(), "random numbers of the host");
}

TEST_P(CaptureWhenPossible, GoesOnIfTheCaptureFailsAndTakesThatStepOnce) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  int calls_of_both = 0;
  for (int i = 0; i < 7; ++i) {
    twins.step(batch(i), [&](Net& net, const Tensors& in) {
      if (++calls_of_both == 6) throw std::runtime_error("only here");  // the third of the captured
      return loss_of(net, in);
    });
  }
  EXPECT_EQ(twins.captured.train.steps(), 7);
  EXPECT_EQ(twins.calls, 7 + 1);
  expect_said_once(warnings.text(), "the function threw while it was captured: only here");
}

TEST_P(CaptureWhenPossible, GoesOnIfAnEarlierAutogradGraphIsAlive) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  const at::Tensor alive = twins.captured.net->last->weight.square().sum();
  alive.backward({}, /*retain_graph=*/true);  // its nodes belong to the caller's stream
  for (int i = 0; i < 7; ++i) twins.step(i, /*overflows=*/i == 4);
  EXPECT_EQ(twins.captured.train.steps(), 7);
#if TORCH_VERSION_MINOR >= 15
  EXPECT_EQ(twins.calls, 7 + 1);
  expect_said_once(warnings.text(), "an autograd graph of an earlier eager step");
#endif
}

TEST_P(CaptureWhenPossible, GoesOnWithCheckpointsThatKeepTheRandomState) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  for (int i = 0; i < 6; ++i) {
    twins.step(batch(i), [](Net& net, const Tensors& in) {
      const at::Tensor hidden = torchamp::checkpoint(
          [&net](const at::Tensor& x) { return net->first->forward(x).tanh(); }, in[0]);
      return hidden.to(at::kFloat).square().mean();
    });
  }
  EXPECT_EQ(twins.calls, 6);
  expect_said_once(warnings.text(), "cannot preserve the random state");
}

TEST_P(CaptureWhenPossible, GoesOnWithInputsThatNoGraphTakes) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  for (int i = 0; i < 5; ++i) {
    Tensors given = batch(i);
    given[0].requires_grad_();
    twins.step(given);
  }
  EXPECT_EQ(twins.calls, 5);
  expect_said_once(warnings.text(), "input 0 requires grad");
}

TEST_P(CaptureWhenPossible, GoesOnWithoutInputs) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), when_possible);
  for (int i = 0; i < 4; ++i) {
    const Tensors given = batch(i);
    twins.both([&given](auto& twin) { twin.train([&] { return loss_of(twin.net, given); }); });
    twins.expect_agreement();
    twins.step(i);
  }
  EXPECT_EQ(twins.calls, 3) << "those with inputs are captured all the same";
  expect_said_once(warnings.text(), "pass the function's inputs");
}

TEST_P(CaptureWhenPossible, TakesInputsFromTheHostCapturedOrNot) {
  for (const bool reads : {false, true}) {
    StepTwins twins(GetParam(), when_possible);
    for (int i = 0; i < 5; ++i) {
      Tensors given = batch(i), from_host{given[0].cpu(), given[1].cpu()};
      const auto loss = [reads](Net& net, const Tensors& in) {
        at::Tensor value = loss_of(net, in);
        if (reads) (void)value.item<float>();
        return value;
      };
      twins.eager.train(given, [&](const Tensors& in) { return loss(twins.eager.net, in); });
      twins.captured.train(from_host,
                           [&](const Tensors& in) { return loss(twins.captured.net, in); });
      twins.expect_agreement();
    }
  }
}

TEST(CaptureWhenPossibleOnCPU, GoesOnWithoutGraphs) {
  const CollectedWarnings warnings;
  StepTwins twins(at::kCPU, when_possible);
  for (int i = 0; i < 5; ++i) twins.step(i);
  EXPECT_EQ(twins.calls, 5);
  expect_said_once(warnings.text(), "for which LibTorch has no graphs");
}

}  // namespace
