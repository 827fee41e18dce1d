// SPDX-License-Identifier: BSD-3-Clause
// Mistakes in the function that a TrainingStep is given, and what looks like one and is right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "support/training_steps.h"
#include "support/warnings.h"
#include "torchamp/master_weights.h"
#include "torchamp/torchamp.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/training_step.h"

namespace {

using at::Tensor;
using torchamp::GradScalerOptions;
using torchamp::MasterStorage;
using torchamp::MasterWeightsOptions;
using torchamp::TrainingStep;
using torchamp::TrainingStepOptions;
using training_steps::batch_of;
using training_steps::expect_same_bits;
using training_steps::expect_same_weights;
using training_steps::loss_of;
using training_steps::make_net;
using training_steps::Net;

constexpr const char* own_backward = "the function has called backward() without scale";

TrainingStepOptions scaled(std::int64_t parts = 1) {
  return {
      .dtype = at::kFloat, .scaler = GradScalerOptions{.init_scale = 64.}, .micro_batches = parts};
}

std::unique_ptr<torch::optim::Optimizer> fused_adamw(std::vector<Tensor> parameters) {
  return std::make_unique<torchamp::FusedAdamW>(std::move(parameters));
}

/// The loss, of which the mistake has computed the gradients already.
Tensor with_backward(const Tensor& loss) {
  loss.backward({}, /*retain_graph=*/true);
  return loss;
}

// ---- backward() in the function -----------------------------------------------------------------

class FunctionOfATrainingStep : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
  static Tensor loss(Net& net, int number = 0) {
    return loss_of(net, batch_of(GetParam(), number));
  }
};
INSTANTIATE_TEST_SUITE_P(TrainingStep, FunctionOfATrainingStep, all_devices(), device_name);

TEST_P(FunctionOfATrainingStep, ThatCallsBackwardIsAnErrorThatLeavesNoTrace) {
  for (const std::int64_t parts : {1, 2}) {
    Net calm = make_net(GetParam()), shaken = make_net(GetParam());
    torchamp::FusedAdamW optimizer(calm->parameters()), other(shaken->parameters());
    TrainingStep expected(calm, optimizer, scaled(parts)), train(shaken, other, scaled(parts));
    for (int i = 0; i < 4; ++i) {
      if (i % parts == 0) {
        EXPECT_ERROR(train([&] { return with_backward(loss(shaken, i)); }), own_backward);
        EXPECT_EQ(train.pending(), 0);
      }
      expected([&] { return loss(calm, i); });
      train([&] { return loss(shaken, i); });
    }
    expect_same_weights(shaken, calm);
  }
}

TEST_P(FunctionOfATrainingStep, ThatCallsBackwardOfAPartIsAnError) {
  Net net = make_net(GetParam());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, scaled());
  EXPECT_ERROR(train([&] {
                 net->last->weight.pow(2).sum().backward();
                 return loss(net);
               }),
               "train.scaler().scale(loss).backward()");
}

TEST_P(FunctionOfATrainingStep, ThatCallsBackwardWithAFixedScaleOfOneIsReportedOnce) {
  Net net = make_net(GetParam());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, {.dtype = at::kBFloat16});
  for (int i = 0; i < 2; ++i) {
    const CollectedWarnings warnings;
    EXPECT_TRUE(train([&] { return with_backward(loss(net)); })) << "a program may mean it";
    EXPECT_EQ(warnings.text().find(own_backward) != std::string::npos, i == 0) << warnings.text();
  }
}

TEST_P(FunctionOfATrainingStep, ThatCallsBackwardLaterInAWindowIsReportedOnce) {
  Net net = make_net(GetParam());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, scaled(2));
  const CollectedWarnings warnings;
  for (int i = 0; i < 2; ++i) {
    train([&] { return loss(net); });
    train([&] { return with_backward(loss(net)); });
    train([&] { return loss(net); });
    loss(net).backward();  // between two calls, as another model's step does
    train([&] { return loss(net); });
  }
  constexpr const char* text = "or a backward() outside of the TrainingStep";
  EXPECT_NE(warnings.text().find(text), std::string::npos) << warnings.text();
  EXPECT_EQ(warnings.text().find(text), warnings.text().rfind(text));
}

TEST(FunctionOfATrainingStepInAWindow, ThatClearsGradientsIsAnErrorAlthoughItScalesALoss) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, scaled(2));
  train([&] { return loss_of(net, batch_of(at::kCPU, 0)); });
  EXPECT_ERROR(train([&] {
                 optimizer.zero_grad();
                 train.scaler().scale(net->last->weight.sum()).backward();
                 return loss_of(net, batch_of(at::kCPU, 1));
               }),
               "are gone");
}

TEST(FunctionOfATrainingStepInAWindow, ThatClearsGradientsIsReportedIfItsLossMakesNewOnes) {
  const CollectedWarnings warnings;
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, scaled(2));
  train([&] { return loss_of(net, batch_of(at::kCPU, 0)); });
  train([&] {
    optimizer.zero_grad();
    train.scaler().scale(loss_of(net, batch_of(at::kCPU, 1))).backward();
    return loss_of(net, batch_of(at::kCPU, 2));
  });
  EXPECT_THAT(warnings.text(), testing::HasSubstr("were written to or replaced"));
}

TEST(FunctionOfATrainingStepWithMasters, ThatCallsBackwardIsAnError) {
  for (const auto& [storage, main_gradients] : {std::pair(MasterStorage::full, false),
                                                {MasterStorage::full, true},
                                                {MasterStorage::split, false}}) {
    Net net = make_net(at::kCPU);
    TrainingStep train(
        net, fused_adamw,
        {.scaler = GradScalerOptions{.init_scale = 64.},
         .masters = MasterWeightsOptions{
             .dtype = at::kBFloat16, .storage = storage, .main_gradients = main_gradients}});
    const auto loss = [&] { return loss_of(net, batch_of(at::kCPU, 0)); };
    EXPECT_ERROR(train([&] { return with_backward(loss()); }), own_backward);
    EXPECT_TRUE(train(loss));
  }
}

TEST(FunctionOfATrainingStepWithALog, ThatIsMistakenIsAnErrorAllTheSame) {
  const TemporaryFolder folder;
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStepOptions options = scaled();
  options.log = (folder / "run.csv").string();
  TrainingStep train(net, optimizer, options);
  const auto loss = [&] { return loss_of(net, batch_of(at::kCPU, 0)); };
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(train(loss));
    EXPECT_ERROR(train([&] { return with_backward(loss()); }), own_backward);
    EXPECT_ERROR(train([&] { return train.scaler().scale(loss()) / 2; }), "scaled already");
  }
}

// ---- A scaled loss ------------------------------------------------------------------------------

TEST_P(FunctionOfATrainingStep, ThatReturnsAScaledLossIsAnErrorThatLeavesTheWindow) {
  for (const std::int64_t parts : {1, 2}) {
    Net calm = make_net(GetParam()), shaken = make_net(GetParam());
    torchamp::FusedAdamW optimizer(calm->parameters()), other(shaken->parameters());
    TrainingStep expected(calm, optimizer, scaled(parts)), train(shaken, other, scaled(parts));
    for (int i = 0; i < 4; ++i) {
      expected([&] { return loss(calm, i); });
      EXPECT_ERROR(train([&] { return train.scaler().scale(loss(shaken, i)); }), "scaled already");
      EXPECT_ERROR(train([&] { return train.scaler().scale(loss(shaken, i)) / 2; }),
                   "scaled already");
      EXPECT_EQ(train.pending(), i % parts);
      train([&] { return loss(shaken, i); });
    }
    expect_same_weights(shaken, calm);
  }
}

// ---- The program's own calls of the scaler ------------------------------------------------------

/// The texts of errors and warnings that `call` gives.
std::string texts_of(const auto& call) {
  const CollectedWarnings warnings;
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace() + warnings.text();
  }
  return warnings.text();
}

TEST(TrainingStepMessages, NameATrainingStepAndNoneOfItsParts) {
  for (const std::int64_t parts : {1, 2, 3}) {
    Net net = make_net(at::kCPU);
    torchamp::FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(1e-3));
    TrainingStep train(net, optimizer, scaled(parts));
    torchamp::GradScaler& scaler = train.scaler();
    const auto loss = [&] { return loss_of(net, batch_of(at::kCPU, 0)); };
    const std::pair<const char*, std::function<void()>> mistakes[] = {
        {"unscale", [&] { scaler.unscale_(optimizer); }},
        {"step", [&] { scaler.step(optimizer); }},
        {"the scale has changed", [&] { scaler.update(8.); }},
        {"the scaler has stepped", [&] { scaler.step(optimizer), scaler.update(); }},
        {"are gone", [&] { optimizer.zero_grad(); }},
        {"written to", [&] { net->last->weight.mutable_grad().mul_(0.5); }}};
    for (const auto& [text, mistake] : mistakes) {
      SCOPED_TRACE(c10::str(parts, ": ", text));
      const bool ends_here = std::string(text) == "unscale" || std::string(text) == "step";
      if (parts == 1 && !ends_here) continue;  // there is no window that it could disturb
      for (int part = 1; part < parts; ++part) train(loss);
      if (parts == 1) scaler.scale(loss()).backward();
      mistake();
      const std::string told = texts_of([&] { train(loss); });
      EXPECT_THAT(told, testing::StartsWith("TrainingStep: "));
      EXPECT_THAT(told, testing::HasSubstr(text));
      for (const char* part : {"ccumulation", "discard()", "before_", "flush()"}) {
        EXPECT_THAT(told, testing::Not(testing::HasSubstr(part)));
      }
      const auto steps = train.steps();
      while (train.pending() > 0) train(loss);
      for (int part = 0; part < parts; ++part) train(loss);
      EXPECT_EQ(train.pending(), 0);
      EXPECT_GT(train.steps(), steps) << "the next window is whole";
    }
  }
}

TEST(TrainingStepMessages, NameATrainingStepForALossThatIsScaledAfterTheScaleWasRead) {
  for (const std::int64_t parts : {1, 2}) {
    Net net = make_net(at::kCPU);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    TrainingStep train(net, optimizer, scaled(parts));
    EXPECT_EQ(train.scaler().get_scale(), 64.);
    EXPECT_ERROR(train([&] { return train.scaler().scale(loss_of(net, batch_of(at::kCPU, 0))); }),
                 "TrainingStep: this tensor has been scaled already");
  }
}

// ---- Threads ------------------------------------------------------------------------------------

TEST(TrainingStepOfTwoThreads, ThrowsInTheSecondAndChangesNothing) {
  Net calm = make_net(at::kCPU), shared = make_net(at::kCPU);
  torchamp::FusedAdamW optimizer(calm->parameters()), other(shared->parameters());
  TrainingStep expected(calm, optimizer, scaled(2)), train(shared, other, scaled(2));
  constexpr const char* text = "another thread is in a call of this TrainingStep";
  for (int i = 0; i < 4; ++i) {
    expected([&] { return loss_of(calm, batch_of(at::kCPU, i)); });
    train([&] {
      std::thread([&] {
        const auto loss = [&] { return loss_of(shared, batch_of(at::kCPU, 9)); };
        EXPECT_ERROR(train(loss), text);
        EXPECT_ERROR(train({}, [&](const auto&) { return loss(); }), text);
        EXPECT_ERROR((void)train.finish(), text);
        EXPECT_ERROR(train.evaluate(loss), text);
        EXPECT_ERROR(train.save("no.pt"), text);
        EXPECT_ERROR((void)train.load("no.pt"), text);
      }).join();
      return loss_of(shared, batch_of(at::kCPU, i));
    });
  }
  expect_same_bits(shared, calm);
  std::thread([&] { train([&] { return loss_of(shared, batch_of(at::kCPU, 4)); }); }).join();
  EXPECT_EQ(train.pending(), 1) << "threads may take turns";
  (void)train.finish();
  (void)expected.finish();
}

TEST(TrainingStepWithinItsOwnFunction, ThrowsAndEvaluates) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, scaled());
  const auto loss = [&] { return loss_of(net, batch_of(at::kCPU, 0)); };
  EXPECT_TRUE(train([&] {
    EXPECT_ERROR(train(loss), "called by the function that this TrainingStep is running");
    EXPECT_ERROR((void)train.finish(), "called by the function");
    EXPECT_GT(train.evaluate([&] { return loss().item<double>(); }), 0.);
    return loss();
  }));
  EXPECT_THROW(train([]() -> Tensor { throw std::runtime_error("no batch"); }), std::runtime_error);
  EXPECT_TRUE(train(loss)) << "an exception ends its call";
}

// ---- Modes --------------------------------------------------------------------------------------

TEST(TrainingStepOfAModelInEvaluationMode, SaysSoOnce) {
  constexpr const char* text = "the model is trained in evaluation mode";
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, scaled());
  const auto told = [&](const auto& prepare) {
    const CollectedWarnings warnings;
    EXPECT_TRUE(train([&] {
      prepare();
      return loss_of(net, batch_of(at::kCPU, 0));
    }));
    return warnings.text().find(text) != std::string::npos;
  };
  const auto nothing = [] {};
  EXPECT_FALSE(told(nothing));
  net->norm->eval();
  EXPECT_FALSE(told(nothing)) << "one frozen layer";
  net->eval();
  EXPECT_FALSE(told([&] { net->train(); })) << "the function sets the mode";
  net->eval();
  net->last->train();
  EXPECT_FALSE(told(nothing)) << "one layer learns";
  net->eval();
  EXPECT_TRUE(told(nothing));
  EXPECT_FALSE(told(nothing)) << "once";
}

// ---- What is right ------------------------------------------------------------------------------

/// Ends without a warning, whatever the number of micro-batches.
class NoFalseAlarmOfATrainingStep : public ::testing::TestWithParam<std::int64_t> {
 protected:
  NoFalseAlarmOfATrainingStep() { torch::manual_seed(1); }
  void TearDown() override {
    if (train.pending() > 0) train.finish();
    EXPECT_EQ(warnings_.text(), "");
  }
  /// Iterations with `loss`.
  template <class Loss>
  void run(const Loss& loss) {
    for (int i = 0; i < 4; ++i) train(loss);
    EXPECT_EQ(train.steps(), 4 / GetParam());
  }

  torch::nn::Linear net{4, 4}, other{4, 4};
  torchamp::FusedSGD optimizer{net->parameters(), torch::optim::SGDOptions(1e-3)};
  torchamp::FusedSGD second{other->parameters(), torch::optim::SGDOptions(1e-3)};
  TrainingStep train{net, optimizer, scaled(GetParam())};
  const Tensor x = torch::randn({2, 4});

 private:
  CollectedWarnings warnings_;
};
INSTANTIATE_TEST_SUITE_P(MicroBatches, NoFalseAlarmOfATrainingStep, testing::Values(1, 2));

TEST_P(NoFalseAlarmOfATrainingStep, AGradientPenalty) {
  run([&] {
    const Tensor input = x.clone().requires_grad_();
    const Tensor y = net(input).pow(2).mean();
    return y + torch::autograd::grad({y}, {input}, {}, true, /*create_graph=*/true)[0].norm();
  });
}

TEST_P(NoFalseAlarmOfATrainingStep, APenaltyOnAllGradientsOfWeights) {
  run([&] {
    const Tensor y = net(x).pow(2).mean();
    return y + torch::autograd::grad({y}, net->parameters(), {}, true, true)[0].pow(2).sum();
  });
}

/// Only before a window's first micro-batch may gradients be cleared.
TEST(TrainingStepWithoutMicroBatches, TakesAnAttackWhoseGradientsOfWeightsAreCleared) {
  const CollectedWarnings warnings;
  torch::nn::Linear net(4, 4);
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  TrainingStep train(net, optimizer, scaled());
  for (const bool to_none : {true, false}) {
    EXPECT_TRUE(train([&] {
      const Tensor input = at::ones({2, 4}).requires_grad_();
      net(input).pow(2).mean().backward();
      optimizer.zero_grad(to_none);
      return net(input + 0.1 * input.grad().sign()).pow(2).mean();
    }));
  }
  EXPECT_EQ(warnings.text(), "");
}

TEST(TrainingStepWithoutMicroBatches, TakesLossesWhoseScaledGradientsAreAddedOneByOne) {
  const CollectedWarnings warnings;
  Net at_once = make_net(at::kCPU), apart = make_net(at::kCPU);
  torch::optim::SGD optimizer(at_once->parameters(), 0.1), other(apart->parameters(), 0.1);
  TrainingStep expected(at_once, optimizer, scaled()), train(apart, other, scaled());
  at_once->norm->eval();
  apart->norm->eval();
  const auto loss = [](Net& net, int part) { return loss_of(net, batch_of(at::kCPU, part)); };
  expected([&] { return loss(at_once, 0) + loss(at_once, 1); });
  train([&] {
    train.scaler().scale(loss(apart, 0)).backward();
    return loss(apart, 1);
  });
  for (std::size_t i = 0; i < apart->parameters().size(); ++i) {
    EXPECT_TRUE(at::allclose(apart->parameters()[i], at_once->parameters()[i]));
  }
  EXPECT_EQ(warnings.text(), "");
}

TEST_P(NoFalseAlarmOfATrainingStep, ALossThatIsScaledByHand) {
  run([&] {
    (net->weight.pow(2).sum() * train.scaler().get_scale()).backward();
    return net(x).pow(2).mean();
  });
}

TEST_P(NoFalseAlarmOfATrainingStep, AScaledBackwardOfAnotherLossInTheFunction) {
  const Tensor before = net->weight.detach().clone();
  run([&] {
    train.scaler().scale(net->weight.sum()).backward();
    return 0. * net(x).sum();
  });
  // Each of the four takes the rate times 1.
  EXPECT_TRUE(at::allclose(net->weight, before - 4e-3)) << net->weight << before;
}

TEST_P(NoFalseAlarmOfATrainingStep, AnotherModelsOwnStepInTheFunction) {
  run([&] {
    second.zero_grad();
    other(x).pow(2).mean().backward();
    second.step();
    return net(other(x).detach()).pow(2).mean();
  });
}

TEST_P(NoFalseAlarmOfATrainingStep, AGanWithOneScalerEach) {
  TrainingStep generate(other, second, scaled(GetParam()));
  for (int window = 0; window < 3; ++window) {
    for (int part = 0; part < GetParam(); ++part) {
      train([&] { return net(other(x).detach()).pow(2).mean() - net(x).mean(); });
    }
    for (int part = 0; part < GetParam(); ++part) {
      generate([&] { return net(other(x)).mean(); });  // gives net gradients, too
    }
  }
  EXPECT_EQ(generate.steps(), 3);
  EXPECT_EQ(train.steps(), 3);
}

TEST(TrainingStepWithoutMicroBatches, TakesAGanWithOneScaler) {
  const CollectedWarnings warnings;
  torch::nn::Linear net(4, 4), other(4, 4);
  torch::optim::SGD first(net->parameters(), 1e-3), second(other->parameters(), 1e-3);
  torchamp::GradScaler scaler({.init_scale = 64.});
  TrainingStep judge(net, first, {.dtype = at::kFloat, .scaler = scaler});
  TrainingStep generate(other, second, {.dtype = at::kFloat, .scaler = scaler});
  const Tensor x = at::ones({2, 4});
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(generate([&] { return net(other(x)).mean(); }));
    EXPECT_TRUE(judge([&] { return net(other(x).detach()).pow(2).mean(); }));
  }
  EXPECT_EQ(warnings.text(), "");
}

TEST_P(NoFalseAlarmOfATrainingStep, AnAverageATargetNetworkAndEvaluationBetween) {
  for (int i = 0; i < 4; ++i) {
    train([&] {
      const torch::NoGradGuard no_grad;
      const Tensor target = other(x);
      const at::AutoGradMode gradients(true);
      return (net(x) - target).pow(2).mean();
    });
    const torch::NoGradGuard no_grad;
    other->weight.lerp_(net->weight, 0.01);
    EXPECT_GE(train.evaluate([&] { return net(x).pow(2).mean().item<double>(); }), 0.);
  }
}

TEST_P(NoFalseAlarmOfATrainingStep, ReinforcementLearningWithTwoLossesAndAReadOfTheScale) {
  for (int i = 0; i < 4; ++i) {
    const auto result = train([&] {
      const Tensor y = net(x);
      return y.log_softmax(1).mean() + 0.5 * y.pow(2).mean();
    });
    if (result.ended_window()) {
      EXPECT_EQ(result.scale(), 64.);
    }
    EXPECT_EQ(train.scaler().get_scale(), 64.);
  }
}

TEST_P(NoFalseAlarmOfATrainingStep, ForcesOfAGraphNetByCreateGraph) {
  run([&] {
    const Tensor positions = torch::randn({3, 4}, at::requires_grad());
    const Tensor energy = net(positions).pow(2).sum();
    const Tensor force = torch::autograd::grad({energy}, {positions}, {}, true, true)[0];
    return force.pow(2).mean() + energy;
  });
}

TEST_P(NoFalseAlarmOfATrainingStep, ExceptionsAndARetainedGraph) {
  Tensor kept;
  for (int i = 0; i < 4; ++i) {
    EXPECT_THROW(train([&]() -> Tensor { throw std::runtime_error("a bad batch"); }),
                 std::runtime_error);
    train([&] { return kept = net(x).pow(2).mean(); });
  }
  EXPECT_TRUE(kept.requires_grad());
}

TEST(TrainingStepOfAPackedLstm, SaysNothing) {
  const CollectedWarnings warnings;
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 4).batch_first(true));
  torchamp::FusedSGD optimizer(lstm->parameters(), torch::optim::SGDOptions(1e-3));
  TrainingStepOptions options = scaled();
  options.max_grad_norm = 1e-3;
  TrainingStep train(lstm, optimizer, options);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(train([&] {
      const auto packed = torch::nn::utils::rnn::pack_padded_sequence(
          torch::randn({2, 3, 4}), torch::tensor({3, 2}), /*batch_first=*/true);
      return std::get<0>(lstm->forward_with_packed_input(packed)).data().pow(2).mean();
    }));
  }
  EXPECT_EQ(warnings.text(), "");
}

}  // namespace
