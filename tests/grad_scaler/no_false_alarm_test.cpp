// SPDX-License-Identifier: BSD-3-Clause
// Programs that are right, in whatever order they call: no warning and no error.
#include <torchamp/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/accumulate.h>
#include <torchamp/autocast.h>
#include <torchamp/clip_grad.h>
#include <torchamp/closure_step.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/dropping_accumulation.h"
#include "support/leaf.h"
#include "support/optimizers.h"
#include "support/warnings.h"

namespace {

using torchamp::GradScaler;

/// With LibTorch's SGD, and with torchamp's. Ends with no warning.
class NoFalseAlarm : public testing::TestWithParam<bool> {
 protected:
  static constexpr int iterations = 3;

  NoFalseAlarm() { torch::manual_seed(1); }
  void TearDown() override { EXPECT_EQ(warnings_.text(), ""); }

  static std::unique_ptr<torch::optim::Optimizer> sgd_of(std::vector<at::Tensor> parameters) {
    return plain_or_fused_sgd(std::move(parameters), GetParam(), 1e-3);
  }
  void finish(torch::optim::Optimizer& stepped) {
    scaler.step(stepped);
    scaler.update();
  }

  torch::nn::Linear net{4, 4}, other{4, 4};
  std::unique_ptr<torch::optim::Optimizer> optimizer = sgd_of(net->parameters());
  std::unique_ptr<torch::optim::Optimizer> second = sgd_of(other->parameters());
  const at::Tensor x = torch::randn({2, 4});
  GradScaler scaler{{.init_scale = 64.}};

 private:
  CollectedWarnings warnings_;
};
INSTANTIATE_TEST_SUITE_P(Sgd, NoFalseAlarm, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Fused" : "LibTorchs");
});

TEST_P(NoFalseAlarm, AnIterationWithAClip) {
  for (int i = 0; i < 2 * iterations; ++i) {
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    if (i % 2 == 0) {
      torchamp::clip_grad_norm_(scaler, *optimizer, 1e-3);
    } else {
      scaler.unscale_(*optimizer);
      torchamp::clip_grad_norm_(net->parameters(), 1e-3);
      torchamp::clip_grad_norm_(*optimizer, 1e-3);
    }
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, AClipByLibTorchsFunctions) {
  for (int i = 0; i < 2 * iterations; ++i) {
    optimizer->zero_grad();
    second->zero_grad();
    torch::nn::utils::clip_grad_norm_(other->parameters(), 1.);  // of another model
    scaler.scale(net(x).pow(2).mean()).backward();
    if (i % 2 == 0) {
      scaler.unscale_(*optimizer);
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);
    } else {
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3 * scaler.get_scale());
    }
    other(x).pow(2).mean().backward();
    torch::nn::utils::clip_grad_value_(other->parameters(), 1e-3);
    second->step();
    finish(*optimizer);
  }
}

/// A clip with a limit of infinity changes no gradient.
TEST_P(NoFalseAlarm, AskingForTheNormOfScaledGradients) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    torchamp::clip_grad_norm_(net->parameters(), HUGE_VAL);
    scaler.scale(net(x).pow(2).mean()).backward();
    EXPECT_GT(torchamp::clip_grad_norm_(net->parameters(), HUGE_VAL).item<double>(), 0.);
    EXPECT_GT(torchamp::clip_grad_norm_(*optimizer, HUGE_VAL).item<double>(), 0.);
    EXPECT_GT(torch::nn::utils::clip_grad_norm_(net->parameters(), HUGE_VAL), 0.);
    finish(*optimizer);
  }
}

/// Gradients from a backward pass without scale() that have the scale nevertheless: gradients of a
/// model's first half, in a pipeline by hand, and gradients of outputs that were scaled.
TEST_P(NoFalseAlarm, AScaledGradientThatAnotherBackwardGoesOnWith) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    second->zero_grad();
    const at::Tensor y = net(x);
    const at::Tensor cut = y.detach().requires_grad_();
    scaler.scale(other(cut).pow(2).mean()).backward();
    y.backward(cut.grad());
    const at::Tensor again = net(x);
    again.backward(scaler.scale(torch::ones_like(again)));
    scaler.step(*second);
    finish(*optimizer);
  }
}

/// The gradients of the weights are dropped between two scaled passes, as in an accumulation that
/// clears them by mistake.
TEST_P(NoFalseAlarm, AdversarialTraining) {
  for (int i = 0; i < iterations; ++i) {
    const at::Tensor input = x.clone().requires_grad_();
    for (int attack = 0; attack < 2; ++attack) {
      optimizer->zero_grad();
      scaler.scale(net(input).pow(2).mean()).backward();
      input.data().add_(input.grad().sign(), 1e-2);
      input.mutable_grad().reset();
    }
    optimizer->zero_grad();
    scaler.scale(net(input.detach()).pow(2).mean()).backward();
    torchamp::clip_grad_norm_(scaler, *optimizer, 1e-3);
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, SharpnessAwareMinimisation) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    std::vector<at::Tensor> before, moves;
    for (const at::Tensor& parameter : net->parameters()) {
      before.push_back(parameter.detach().clone());
      const torch::NoGradGuard no_grad;
      parameter.add_(parameter.grad() / parameter.grad().norm(), 1e-2);
    }
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    const torch::NoGradGuard no_grad;
    for (std::size_t p = 0; p < before.size(); ++p) net->parameters()[p].copy_(before[p]);
    const torch::AutoGradMode with_gradients(true);
    finish(*optimizer);
  }
}

/// What is linear in the gradients is right while they are scaled.
TEST_P(NoFalseAlarm, ScaledGradientsThatAreAveragedMaskedAndAddedByHand) {
  torch::nn::Linear replica{4, 4};
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    replica->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    scaler.scale(replica(x).pow(2).mean()).backward();
    for (std::size_t p = 0; p < 2; ++p) {
      at::Tensor gradient = net->parameters()[p].grad();
      gradient.add_(replica->parameters()[p].grad()).div_(2);  // as an all-reduce does
      gradient[0].zero_();
    }
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, ABadBatchThatIsPassedOver) {
  for (int i = 0; i < 2 * iterations; ++i) {
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    if (i % 2 == 1) continue;
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, AGradientPenalty) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    const at::Tensor input = torch::randn({2, 4}, at::requires_grad());
    const at::Tensor loss = net(input).pow(2).mean();
    const auto scaled =
        torch::autograd::grad({scaler.scale(loss)}, {input}, {}, true, /*create_graph=*/true);
    const at::Tensor gradient = scaled[0] / scaler.get_scale();
    scaler.scale(loss + (gradient.norm() - 1.).pow(2)).backward();
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, AGradientPenaltyAfterUnscaleOfAnotherOptimizer) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    second->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    scaler.unscale_(*optimizer);
    const at::Tensor input = net(x).detach().requires_grad_();
    const at::Tensor loss = other(input).pow(2).mean();
    const auto gradients = torch::autograd::grad({loss}, {input}, {}, true, true);
    scaler.scale(loss + gradients[0].pow(2).sum()).backward();
    scaler.step(*optimizer);
    finish(*second);
  }
}

TEST_P(NoFalseAlarm, SeveralScalers) {
  GradScaler another({.init_scale = 8.});
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    second->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    another.scale(other(x).pow(2).mean()).backward();
    another.unscale_(*second);
    torchamp::clip_grad_norm_(*second, 1e-3);
    scaler.step(*optimizer);
    another.step(*second);
    another.update();
    scaler.update();
  }
}

TEST_P(NoFalseAlarm, SeveralOptimizersAndLosses) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    second->zero_grad();
    const at::Tensor y = net(x);
    scaler.scale(y.pow(2).mean()).backward({}, /*retain_graph=*/true);
    scaler.scale(other(y).pow(2).mean()).backward();
    scaler.unscale_(*optimizer);
    torchamp::clip_grad_norm_(*optimizer, 1e-3);
    scaler.step(*optimizer);
    if (i % 2 == 0) torchamp::clip_grad_norm_(scaler, *second, 1e-3);
    finish(*second);
  }
}

TEST_P(NoFalseAlarm, TwoOptimizersOfTheSameParametersInTurn) {
  const auto of_the_same = sgd_of(net->parameters());
  for (int i = 0; i < 2 * iterations; ++i) {
    for (torch::optim::Optimizer* const one : {optimizer.get(), of_the_same.get()}) {
      one->zero_grad(/*set_to_none=*/i % 2 == 0);
      scaler.scale(net(x).pow(2).mean()).backward();
      scaler.unscale_(*one);
      scaler.step(*one);
    }
    scaler.update();
  }
}

TEST_P(NoFalseAlarm, AnExponentialAverageAndATargetNetwork) {
  torch::nn::Linear target{4, 4};
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    at::Tensor wanted;
    {
      const torch::NoGradGuard no_grad;
      wanted = target(x);
    }
    scaler.scale((net(x) - wanted).pow(2).mean()).backward();
    finish(*optimizer);
    const torch::NoGradGuard no_grad;
    for (std::size_t p = 0; p < 2; ++p) {
      target->parameters()[p].lerp_(net->parameters()[p], 0.1);
    }
  }
}

TEST_P(NoFalseAlarm, ScalingByHand) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    if (i == 0) {
      scaler.scale(net(x).pow(2).mean()).backward();
    } else {
      (net(x).pow(2).mean() * scaler.get_scale()).backward();
    }
    torchamp::clip_grad_norm_(net->parameters(), 1e-3 * scaler.get_scale());
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, ScalingByHandWithAScaleAskedForOnce) {
  scaler.scale(net(x).pow(2).mean()).backward();
  const at::Tensor scale = scaler.scale_tensor();
  finish(*optimizer);
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    (net(x).pow(2).mean() * scale).backward();
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, ScalingByHandWithAScaleFromScalingOne) {
  for (int i = 0; i < 2 * iterations; ++i) {
    optimizer->zero_grad();
    if (i % 2 == 0) scaler.scale(net(x).pow(2).mean()).backward();
    const double scale = scaler.scale(torch::ones({})).item<double>();
    if (i % 2 == 1) (net(x).pow(2).mean() * scale).backward();
    torchamp::clip_grad_norm_(net->parameters(), 1e-3 * scale);
    finish(*optimizer);
  }
}

/// Gradients that were made with create_graph, and are scaled as a loss would be.
TEST_P(NoFalseAlarm, AScaledGradientThatHasAGraph) {
  for (int i = 0; i < 2 * iterations; ++i) {
    optimizer->zero_grad();
    if (i % 2 == 0) {
      const at::Tensor y = net(x), cut = y.detach().requires_grad_();
      const auto gradient =
          torch::autograd::grad({other(cut).pow(2).mean()}, {cut}, {}, true, true).front();
      y.backward(scaler.scale(gradient));
    } else {
      const auto gradients =
          torch::autograd::grad({net(x).pow(2).mean()}, net->parameters(), {}, true, true);
      for (std::size_t p = 0; p < 2; ++p) {
        net->parameters()[p].mutable_grad() = scaler.scale(gradients[p]).detach();
      }
    }
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, AStepWithTheZerosOfABatchThatIsPassedOver) {
  for (int i = 0; i < 2 * iterations; ++i) {
    optimizer->zero_grad(/*set_to_none=*/false);
    if (i % 2 == 0) scaler.scale(net(x).pow(2).mean()).backward();
    finish(*optimizer);
  }
}

/// The second module has no gradients when it is clipped, and zeros afterwards.
TEST_P(NoFalseAlarm, AClipOfEachModuleIfOneIsNotUsed) {
  auto parameters = net->parameters();
  for (const at::Tensor& parameter : other->parameters()) parameters.push_back(parameter);
  const auto both = sgd_of(parameters);
  for (int i = 0; i < iterations; ++i) {
    both->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    scaler.unscale_(*both);
    for (const auto& module : {net, other}) {
      torchamp::clip_grad_norm_(module->parameters(), 1e-3);
      for (at::Tensor& parameter : module->parameters()) {
        if (!parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
      }
    }
    finish(*both);
  }
}

TEST_P(NoFalseAlarm, AScaleThatTheProgramHasSetOrSaved) {
  for (int form = 0; form < 4; ++form) {
    SCOPED_TRACE(form);
    GradScaler own(form == 0 ? torchamp::GradScalerOptions::fixed(64.)
                             : torchamp::GradScalerOptions{.init_scale = 64.});
    for (int i = 0; i < iterations; ++i) {
      if (form == 1) own.load_state_dict({.scale = 64.});
      optimizer->zero_grad();
      const at::Tensor loss = net(x).pow(2).mean();
      (i == 0 || form > 0 ? own.scale(loss) : loss * 64.).backward();
      const double scale = form == 2 ? own.state_dict().scale : 64.;
      if (i > 0) torchamp::clip_grad_norm_(net->parameters(), 1e-3 * scale);
      own.step(*optimizer);
      form == 3 ? own.update(64.) : own.update();
    }
  }
}

TEST_P(NoFalseAlarm, GradientsDividedByHandAfterUnscale) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    scaler.unscale_(*optimizer);
    std::vector<at::Tensor> kept;
    for (at::Tensor& parameter : net->parameters()) kept.push_back(parameter.grad().clone());
    optimizer->zero_grad();
    scaler.scale(net(x).abs().mean()).backward();
    for (std::size_t p = 0; p < kept.size(); ++p) {
      net->parameters()[p].mutable_grad().div_(scaler.get_scale()).add_(kept[p]);
    }
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, GradientsThatAreSetAsideForADiagnosis) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    scaler.unscale_(*optimizer);
    std::vector<at::Tensor> aside;
    for (at::Tensor& parameter : net->parameters()) {
      aside.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
    scaler.scale(net(x).abs().mean()).backward();
    for (std::size_t p = 0; p < aside.size(); ++p) {
      net->parameters()[p].mutable_grad() = aside[p];
    }
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, AnUnscaledPenaltyAddedAfterUnscale) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    scaler.unscale_(*optimizer);
    (1e-3 * net->weight.pow(2).sum()).backward();
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, EvaluationBetweenMicroBatches) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    for (int m = 0; m < 2; ++m) {
      scaler.scale(net(x).pow(2).mean() / 2).backward();
      const torch::NoGradGuard no_grad;
      const torchamp::AutocastGuard autocast(torch::kCPU);
      EXPECT_EQ(net(x).dim(), 2);
    }
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, ARetainedGraphWithTwoBackwardPasses) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    const at::Tensor scaled = scaler.scale(net(x).pow(2).mean());
    scaled.backward({}, /*retain_graph=*/true);
    scaled.backward();
    scaler.unscale_(*optimizer);
    torchamp::clip_grad_value_(net->parameters(), 1e-3);
    finish(*optimizer);
  }
}

/// Discriminator: optimizer; generator: second. In the order of calls that `together` says.
TEST_P(NoFalseAlarm, AGanInBothOrders) {
  for (const bool together : {false, true}) {
    for (int i = 0; i < iterations; ++i) {
      optimizer->zero_grad();
      scaler.scale(net(other(x).detach()).pow(2).mean()).backward();
      scaler.unscale_(*optimizer);
      torchamp::clip_grad_norm_(*optimizer, 1e-3);
      if (!together) scaler.step(*optimizer);
      for (at::Tensor& p : net->parameters()) p.requires_grad_(!together);
      second->zero_grad();
      scaler.scale(net(other(x)).mean()).backward();
      for (at::Tensor& p : net->parameters()) p.requires_grad_(true);
      if (together) scaler.step(*optimizer);
      scaler.unscale_(*second);
      torchamp::clip_grad_norm_(other->parameters(), 1e-3);
      finish(*second);
    }
  }
}

TEST_P(NoFalseAlarm, AnExceptionAndTheNextIteration) {
  for (int i = 0; i < iterations; ++i) {
    try {
      scaler.scale(net(x).pow(2).mean()).backward();
      if (i == 1) throw std::runtime_error("a bad batch");
      torchamp::clip_grad_norm_(scaler, *optimizer, 1e-3);
      finish(*optimizer);
    } catch (const std::runtime_error&) {
      scaler.discard(*optimizer);
    }
    optimizer->zero_grad();
  }
}

TEST_P(NoFalseAlarm, AnExceptionAfterUnscale) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    scaler.unscale_(*optimizer);
    if (i == 1) {
      scaler.discard(*optimizer);
      optimizer->zero_grad();
      scaler.scale(net(x).pow(2).mean()).backward();
      scaler.unscale_(*optimizer);
    }
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, ReinforcementLearningWithTwoLosses) {
  const auto both = sgd_of([&] {
    auto parameters = net->parameters();
    for (const at::Tensor& p : other->parameters()) parameters.push_back(p);
    return parameters;
  }());
  for (int i = 0; i < iterations; ++i) {
    both->zero_grad();
    const at::Tensor y = net(x);
    (scaler.scale(y.log_softmax(1).mean()) + scaler.scale(other(y).pow(2).mean())).backward();
    torchamp::clip_grad_norm_(scaler, *both, 0.5);
    finish(*both);
  }
}

TEST_P(NoFalseAlarm, ACriticInFp32WithAScaledActor) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    second->zero_grad();
    const at::Tensor scaled = scaler.scale(net(x).pow(2).mean());
    other(x).pow(2).mean().backward();
    torchamp::clip_grad_norm_(*second, 1e-3);
    second->step();
    scaled.backward();
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, StyleTransferByLbfgs) {
  at::Tensor image = leaf({1, 3});
  torch::optim::LBFGS lbfgs({image}, torch::optim::LBFGSOptions(0.1).max_iter(3));
  for (int i = 0; i < iterations; ++i) {
    step(scaler, lbfgs, [&] { return image.pow(2).sum() + (image - 1.).pow(2).mean(); });
    scaler.update();
  }
}

TEST_P(NoFalseAlarm, ANetworkThatAClosureTrains) {
  for (int i = 0; i < iterations; ++i) {
    step(scaler, *optimizer, [&] { return net(x).pow(2).mean(); });
    scaler.update();
  }
}

TEST_P(NoFalseAlarm, APackedLstm) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 4).batch_first(true));
  const auto own = sgd_of(lstm->parameters());
  for (int i = 0; i < iterations; ++i) {
    own->zero_grad();
    const auto packed = torch::nn::utils::rnn::pack_padded_sequence(
        torch::randn({2, 3, 4}), torch::tensor({3, 2}), /*batch_first=*/true);
    const at::Tensor y = std::get<0>(lstm->forward_with_packed_input(packed)).data();
    scaler.scale(y.pow(2).mean()).backward();
    torchamp::clip_grad_norm_(scaler, *own, 1e-3);
    finish(*own);
  }
}

TEST_P(NoFalseAlarm, ForcesOfAGraphNetByCreateGraph) {
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    const at::Tensor positions = torch::randn({3, 4}, at::requires_grad());
    const at::Tensor energy = net(positions).pow(2).sum();
    const at::Tensor forces =
        -torch::autograd::grad({energy}, {positions}, {}, true, /*create_graph=*/true)[0];
    scaler.scale(forces.pow(2).mean() + energy).backward();
    finish(*optimizer);
  }
}

TEST_P(NoFalseAlarm, AnInferenceThreadDuringTraining) {
  std::atomic<bool> ends = false;
  std::string said;
  std::thread inference([&] {
    const CollectedWarnings own;
    const torch::NoGradGuard no_grad;
    while (!ends) {
      const torchamp::AutocastGuard autocast(torch::kCPU);
      other(x);
    }
    said = own.text();
  });
  for (int i = 0; i < iterations; ++i) {
    optimizer->zero_grad();
    scaler.scale(net(x).pow(2).mean()).backward();
    torchamp::clip_grad_norm_(scaler, *optimizer, 1e-3);
    finish(*optimizer);
  }
  ends = true;
  inference.join();
  EXPECT_EQ(said, "");
}

TEST_P(NoFalseAlarm, AScaleThatIsFixedAtOneAndADisabledScaler) {
  for (const bool enabled : {false, true}) {
    auto options = torchamp::GradScalerOptions::skip_non_finite();
    options.enabled = enabled;
    GradScaler own(options);
    for (int i = 0; i < iterations; ++i) {
      optimizer->zero_grad();
      const at::Tensor loss = net(x).pow(2).mean();
      (i == 0 ? own.scale(loss) : loss).backward();
      torchamp::clip_grad_norm_(*optimizer, 1e-3);
      own.step(*optimizer);
      own.update();
    }
  }
}

TEST_P(NoFalseAlarm, AnAccumulationWithAClip) {
  torchamp::Accumulation window(scaler, *optimizer, 2);
  window.before_step([&] { torchamp::clip_grad_norm_(*optimizer, 1e-3); });
  for (int i = 0; i < 2 * iterations; ++i) window.backward(net(x).pow(2).mean());
}

TEST_P(NoFalseAlarm, ADroppingAccumulationWithAClip) {
  DroppingAccumulation window(scaler, *optimizer);
  for (int i = 0; i < 2 * iterations; ++i) {
    window.backward(net(x).pow(2).mean());
    if (i % 2 == 1) window.step([&] { torchamp::clip_grad_norm_(*optimizer, 1e-3); });
  }
}

TEST_P(NoFalseAlarm, MastersWithAClip) {
  torchamp::MasterWeights masters(net, {.dtype = torch::kBFloat16});
  const auto own = sgd_of(masters.parameters());
  for (int i = 0; i < iterations; ++i) {
    masters.zero_grad();
    scaler.scale(net(x.to(torch::kBFloat16)).pow(2).mean()).backward();
    masters.take_gradients();
    scaler.unscale_(*own);
    torchamp::clip_grad_norm_(masters.parameters(), 1e-3);
    finish(*own);
    masters.copy_to_model();
  }
}

}  // namespace
