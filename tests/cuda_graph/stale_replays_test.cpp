// SPDX-License-Identifier: BSD-3-Clause
// Changes that would make a replay silently wrong: the iteration is captured again, or it warns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/captured_step.h"
#include "support/expect_error.h"
#include "support/warnings.h"

namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using training_steps::loss_of;
using training_steps::Net;

using StaleReplays = CapturedStepTest;
INSTANTIATE_TEST_SUITE_P(CudaGraph, StaleReplays, ::testing::Values(at::kCUDA, at::kPrivateUse1),
                         device_name);

// ---- What a capture holds of optimizer and model ------------------------------------------------

TEST_P(StaleReplays, FollowAnOptionThatAnEagerStepHasTakenFirst) {
  StepTwins twins(GetParam(), {.warmup = 1, .when_possible = true});
  for (int i = 0; i < 10; ++i) {
    SCOPED_TRACE(i);
    if (i == 5) {
      const Tensors given = batch(i);
      twins.both([&given](auto& twin) {
        auto& options =
            static_cast<torch::optim::AdamWOptions&>(twin.optimizer.param_groups()[0].options());
        options.betas({0.5, 0.75}).weight_decay(0.25);
        twin.train([&] { return loss_of(twin.net, given); });
      });
    } else {
      twins.step(i);
    }
    twins.expect_agreement();
  }
}

TEST_P(StaleReplays, FollowAnOptionThatAnotherGraphOfTheOptimizerHasTakenFirst) {
  using torchamp::TrainingStep;
  struct Two {
    Two(at::DeviceType device, const torchamp::TrainingStepOptions& options)
        : net(training_steps::make_net(device)),
          optimizer(net->parameters(), torch::optim::AdamWOptions(1. / 128)),
          first(net, optimizer, with(options, scaler)),
          second(net, optimizer, with(options, scaler)) {}
    static torchamp::TrainingStepOptions with(torchamp::TrainingStepOptions options,
                                              torchamp::GradScaler& scaler) {
      options.dtype = at::kHalf;
      options.scaler = scaler;
      return options;
    }
    Net net;
    torchamp::FusedAdamW optimizer;
    torchamp::GradScaler scaler;
    TrainingStep first, second;
  };
  Two eager(GetParam(), {}), captured(GetParam(), {.capture = CudaGraphOptions{.warmup = 1}});
  for (int i = 0; i < 14; ++i) {
    SCOPED_TRACE(i);
    const Tensors given = batch(i);
    for (Two* const two : {&eager, &captured}) {
      auto& options =
          static_cast<torch::optim::AdamWOptions&>(two->optimizer.param_groups()[0].options());
      if (i == 6) options.betas({0.5, 0.75});
      (i % 2 == 0 ? two->first : two->second)(
          given, [two](const Tensors& in) { return loss_of(two->net, in); });
    }
    expect_same(captured.net->parameters(), eager.net->parameters());
  }
  c10::impl::VirtualGuardImpl(GetParam()).synchronizeDevice(0);
}

TEST_P(StaleReplays, FollowWeightsThatAreFrozenAndThawed) {
  StepTwins twins(GetParam(), {.warmup = 1});
  for (int i = 0; i < 12; ++i) {
    SCOPED_TRACE(i);
    twins.both([i](auto& twin) {
      if (i == 4) twin.net->first->weight.set_requires_grad(false);
      if (i == 8) twin.net->first->weight.set_requires_grad(true);
    });
    twins.step(i);
  }
}

TEST_P(StaleReplays, FollowWeightsAndBuffersThatGetOtherMemory) {
  StepTwins twins(GetParam(), {.warmup = 1});
  for (int i = 0; i < 12; ++i) {
    SCOPED_TRACE(i);
    twins.both([i](auto& twin) {
      at::Tensor weight = twin.net->last->weight, mean = twin.net->norm->running_mean;
      if (i == 4) weight.set_data(weight.detach() * 2);
      if (i == 8) mean.set_data(torch::ones_like(mean));
    });
    twins.step(i);
  }
}

TEST_P(StaleReplays, GoOnFromAModelAnOptimizerAndAScalerThatWereLoaded) {
  StepTwins twins(GetParam(), {.warmup = 1});
  std::vector<std::stringstream> saved(4);
  std::vector<torchamp::GradScalerState> scalers;
  for (int i = 0; i < 12; ++i) {
    SCOPED_TRACE(i);
    int which = 0;
    twins.both([&](auto& twin) {
      if (i == 4) {
        torch::save(twin.net, saved[which++]);
        torch::save(twin.optimizer, saved[which++]);
        scalers.push_back(twin.train.scaler().state_dict());
      } else if (i == 8) {
        torch::load(twin.net, saved[which++]);
        torch::load(twin.optimizer, saved[which++]);
        twin.train.scaler().load_state_dict(scalers[which / 2 - 1]);
      }
    });
    twins.step(i, /*overflows=*/i == 6);
  }
}

TEST_P(StaleReplays, FollowTheRulesOfTheScaler) {
  StepTwins twins(GetParam(), {.warmup = 1});
  for (int i = 0; i < 16; ++i) {
    SCOPED_TRACE(i);
    twins.both([i](auto& twin) {
      if (i == 4) twin.train.scaler().set_growth_factor(1.5);
      if (i == 6) twin.train.scaler().set_backoff_factor(0.25);
      if (i == 9) twin.train.scaler().set_growth_interval(2);
    });
    twins.step(i, /*overflows=*/i == 7);
  }
}

TEST_P(StaleReplays, AreNoneWithoutGradients) {
  StepTwins twins(GetParam(), {.warmup = 1});
  const auto loss = [](Net& net, const Tensors& in) { return loss_of(net, in); };
  twins.both([](auto& twin) { twin.net->norm->eval(); });  // whose forward passes change nothing
  for (int i = 0; i < 4; ++i) twins.step(batch(i), loss);
  {
    const at::NoGradGuard no_grad;
    EXPECT_ERROR(twins.step_captured(batch(4), loss), "with grad mode on");
  }
  for (int i = 4; i < 7; ++i) twins.step(batch(i), loss);
}

// ---- What a function takes from the host --------------------------------------------------------

TEST_P(StaleReplays, OfABatchThatTheFunctionTakesByReferenceAreReported) {
  for (const bool tries : {false, true}) {
    SCOPED_TRACE(tries);
    const CollectedWarnings warnings;
    StepTwins twins(GetParam(), {.warmup = 2, .when_possible = tries});
    std::vector<Tensors> batches;  // all of them stay
    for (int i = 0; i < 7; ++i) batches.push_back(batch(i));
    const auto step = [&](int i) {
      twins.step({batches[i][0]}, [&, i](Net& net, const Tensors& in) {
        return loss_of(net, {in[0], batches[i][1]});
      });
    };
    for (int i = 0; i < 2; ++i) step(i);
    step(2);  // the capture, which has this batch
    if (tries) {
      for (int i = 3; i < 7; ++i) step(i);
    }
    EXPECT_THAT(warnings.text(), HasSubstr("that is not among the inputs, and read another one"));
  }
}

TEST_P(StaleReplays, OfIndicesThatTheFunctionTakesByReferenceAreReported) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), {.warmup = 2, .when_possible = true});
  std::vector<at::Tensor> rows;  // all of them stay
  for (int i = 0; i < 7; ++i) rows.push_back(torch::full({2}, i % 4, here().dtype(at::kLong)));
  for (int i = 0; i < 7; ++i) {
    twins.step(batch(i), [&, i](Net& net, const Tensors& in) {
      return (net->forward(in[0]) - in[1]).index({rows[i]}).pow(2).mean();
    });
  }
  EXPECT_THAT(warnings.text(), HasSubstr("aten::index reads a tensor"));
}

TEST_P(StaleReplays, OfMemoryThatIsFreedAreRefused) {
  StepTwins twins(GetParam(), {.warmup = 1});
  const auto step = [&](int i) {
    const at::Tensor target = batch(i)[1];  // freed after the call
    twins.step({batch(i)[0]}, [&](Net& net, const Tensors& in) {
      return loss_of(net, {in[0], target});
    });
  };
  step(0);
  step(1);  // captured with a target that is gone afterwards
  step(2);  // so this is eager
  step(3);
  EXPECT_ERROR(step(4),
               "the iteration reads a tensor that is not among its inputs and that the "
               "program has freed");
  twins.both([](auto& twin) {
    EXPECT_TRUE(twin.net->first->weight.isfinite().all().template item<bool>());
  });
}

TEST_P(StaleReplays, OfMemoryThatIsFreedAreEagerWhenPossible) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), {.warmup = 1, .when_possible = true});
  for (int i = 0; i < 9; ++i) {
    const at::Tensor target = batch(i)[1];
    twins.step({batch(i)[0]}, [&](Net& net, const Tensors& in) {
      return loss_of(net, {in[0], target});
    });
  }
  // The next target may be where the last one was, or elsewhere.
  EXPECT_THAT(warnings.text(),
              AnyOf(HasSubstr("has freed since the capture"), HasSubstr("read another one")));
}

TEST_P(StaleReplays, OfConstantsThatStayAreRight) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), {.warmup = 2});
  at::Tensor mask, made_late;
  mask = torch::full({4, 1}, 0.5, here());
  for (int i = 0; i < 8; ++i) {
    twins.step(batch(i), [&](Net& net, const Tensors& in) {
      if (!made_late.defined()) made_late = torch::ones({4, 1}, here()) * 0.25;
      return (net->forward(in[0]) * mask - in[1] * made_late).pow(2).mean();
    });
  }
  EXPECT_EQ(twins.calls, 3);
  EXPECT_EQ(warnings.text().find("CudaGraph:"), std::string::npos) << warnings.text();
}

TEST_P(StaleReplays, OfNumbersThatChangeAreReported) {
  const CollectedWarnings warnings;
  StepTwins twins(GetParam(), {.warmup = 2});
  double weight = 1.;
  for (int i = 0; i < 3; ++i, weight *= 0.5) {
    twins.step(batch(i), [&](Net& net, const Tensors& in) { return loss_of(net, in) * weight; });
  }
  EXPECT_THAT(warnings.text(), HasSubstr("takes another number than in the call before: pass it as "
                                         "an input"));
}

TEST_P(StaleReplays, OfRandomNumbersOfTheHostAreRefused) {
  StepTwins twins(GetParam(), {.warmup = 1});
  EXPECT_ERROR(twins.step(batch(0),
                          [](Net& net, const Tensors& in) {
                            (void)torch::rand({1});
                            return loss_of(net, in);
                          }),
               "random numbers of the host, which replays would repeat");
}

// ---- Several TrainingSteps ----------------------------------------------------------------------

TEST_P(StaleReplays, OfTwoTrainingStepsThatShareAModelGoOnFromEachOther) {
  struct Two {
    Two(at::DeviceType device, const torchamp::TrainingStepOptions& options)
        : net(training_steps::make_net(device)),
          adam(net->parameters(), torch::optim::AdamWOptions(1. / 128)),
          sgd(net->last->parameters(), torch::optim::SGDOptions(1. / 64).momentum(0.5)),
          all(net, adam, options),
          head(net, sgd, options) {}
    Net net;
    torchamp::FusedAdamW adam;
    torchamp::FusedSGD sgd;
    torchamp::TrainingStep all, head;
  };
  Two eager(GetParam(), {.dtype = at::kHalf}),
      captured(GetParam(), {.dtype = at::kHalf, .capture = CudaGraphOptions{.warmup = 1}});
  for (int i = 0; i < 14; ++i) {
    SCOPED_TRACE(i);
    const Tensors given = batch(i);
    for (Two* const two : {&eager, &captured}) {
      (i % 3 == 2 ? two->head : two->all)(
          given, [two](const Tensors& in) { return loss_of(two->net, in); });
    }
    expect_same(captured.net->parameters(), eager.net->parameters());
    expect_same(captured.net->buffers(), eager.net->buffers());
  }
  c10::impl::VirtualGuardImpl(GetParam()).synchronizeDevice(0);
}

TEST_P(StaleReplays, AreNoneAfterAnExceptionInAWarmUpOrTheCapture) {
  for (const int failing : {0, 1, 2}) {
    SCOPED_TRACE(failing);
    StepTwins twins(GetParam(), {.warmup = 2});
    bool fails = false;
    const auto loss = [&](Net& net, const Tensors& in) {
      const at::Tensor made = loss_of(net, in);
      if (std::exchange(fails, false)) throw std::runtime_error("mine");
      return made;
    };
    for (int i = 0; i < 7; ++i) {
      if (i == failing) {  // whose forward passes count in the batch norm of an eager iteration
        twins.both([](auto& twin) { twin.net->norm->eval(); });
        fails = true;
        EXPECT_THROW(twins.step_captured(batch(i), loss), std::runtime_error);
        twins.both([](auto& twin) { twin.net->norm->train(); });
      }
      twins.step(batch(i), loss);
    }
  }
}

}  // namespace
