// SPDX-License-Identifier: BSD-3-Clause
// A guard around a whole iteration: ops after a step compute with the new weights.
#include <torchamp/autocast.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/accumulate.h>
#include <torchamp/closure_step.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/labs/weights_together.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>
#include <torchamp/weight_cache.h>

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/dropping_accumulation.h"
#include "support/tolerances.h"

using torchamp::AutocastGuard;
using torchamp::GradScaler;
using torchamp::WeightCache;

namespace {

enum class Steps { scaler, scaler_with_fused, disabled_scaler, fused_alone };

std::string name(Steps steps) {
  switch (steps) {
    case Steps::scaler:
      return "scaler";
    case Steps::scaler_with_fused:
      return "scaler_with_fused";
    case Steps::disabled_scaler:
      return "disabled_scaler";
    case Steps::fused_alone:
      return "fused_alone";
  }
  return {};
}

/// A small DCGAN: in each iteration, the generator's loss is the discriminator's answer after its
/// own step.
struct Gan {
  explicit Gan(Steps how)
      : steps(how), scaler({.enabled = how == Steps::scaler || how == Steps::scaler_with_fused}) {
    torch::manual_seed(3);
    generator = torch::nn::Sequential(
        torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(4, 8, 4)), torch::nn::Tanh());
    discriminator = torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3)),
                                          torch::nn::LeakyReLU(), torch::nn::Flatten(),
                                          torch::nn::Linear(32, 1));
    of_generator = optimizer(generator->parameters());
    of_discriminator = optimizer(discriminator->parameters());
  }

  std::unique_ptr<torch::optim::Optimizer> optimizer(std::vector<at::Tensor> parameters) const {
    if (steps == Steps::scaler || steps == Steps::disabled_scaler) {
      return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.02));
    }
    return std::make_unique<torchamp::FusedAdam>(parameters, torch::optim::AdamOptions(0.02));
  }

  void step(torch::optim::Optimizer& optimizer) {
    if (steps == Steps::fused_alone) {
      optimizer.step();
    } else {
      scaler.step(optimizer);
    }
  }

  /// The generator's loss. `whole`: one guard for all, or one for each forward.
  float iteration(bool whole) {
    std::optional<AutocastGuard> around;
    if (whole) around.emplace(at::kCPU, at::kBFloat16);
    const auto forward = [&](auto&& compute) -> at::Tensor {
      const AutocastGuard autocast(at::kCPU, at::kBFloat16);
      return compute();
    };
    const at::Tensor real = torch::randn({6, 8, 4, 4}), noise = torch::randn({6, 4, 1, 1});
    of_discriminator->zero_grad();
    const at::Tensor fake = forward([&] { return generator->forward(noise); });
    const at::Tensor loss = forward([&] {
      return (discriminator->forward(fake.detach()).to(at::kFloat) -
              discriminator->forward(real).to(at::kFloat))
          .mean();
    });
    scaler.scale(loss).backward();
    step(*of_discriminator);
    of_generator->zero_grad();
    const at::Tensor answer =
        forward([&] { return -discriminator->forward(fake).to(at::kFloat).mean(); });
    scaler.scale(answer).backward();
    step(*of_generator);
    if (steps != Steps::fused_alone) scaler.update();
    const at::Tensor next =
        forward([&] { return generator->forward(noise).to(at::kFloat).mean(); });
    return answer.item<float>() + next.item<float>();
  }

  Steps steps;
  GradScaler scaler;
  torch::nn::Sequential generator, discriminator;
  std::unique_ptr<torch::optim::Optimizer> of_generator, of_discriminator;
};

class GuardAroundAll : public ::testing::TestWithParam<Steps> {};

at::Tensor ones() {
  return torch::ones({4, 4}).requires_grad_();
}

/// Within a region that has used `weight`, calls `write` and expects the next op to see it.
void expect_seen(const at::Tensor& weight, const std::function<void(const at::Tensor&)>& write) {
  const at::Tensor x = torch::ones({4, 4});
  const AutocastGuard autocast(at::kCPU, at::kBFloat16);
  const at::Tensor before = x.mm(weight);
  write(before.to(at::kFloat).sum());
  const at::Tensor after = x.mm(weight.detach().to(at::kBFloat16));
  ASSERT_FALSE(at::equal(before, after)) << "the weight was not written to";
  EXPECT_TRUE(at::equal(x.mm(weight), after));
}

}  // namespace

TEST_P(GuardAroundAll, TrainsAGanAsOneForEachForwardDoes) {
  Gan one(GetParam()), several(GetParam());
  for (int i = 0; i < 3; ++i) {
    torch::manual_seed(i);
    const float expected = several.iteration(false);
    torch::manual_seed(i);
    EXPECT_EQ(one.iteration(true), expected);
  }
  for (std::size_t i = 0; i < one.generator->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(one.generator->parameters()[i], several.generator->parameters()[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(, GuardAroundAll,
                         ::testing::Values(Steps::scaler, Steps::scaler_with_fused,
                                           Steps::disabled_scaler, Steps::fused_alone),
                         [](const auto& tested) { return name(tested.param); });

/// Trains a small network with an optimizer of LibTorch, and returns the last loss.
template <class Optimizer, class Options>
float loss_after_training(bool whole, const Options& options,
                          WeightCache cache = WeightCache::libtorch) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)), torch::nn::ReLU(),
                            torch::nn::Flatten(), torch::nn::Linear(8 * 36, 10));
  Optimizer optimizer(net->parameters(), options);
  const at::Tensor x = torch::randn({16, 3, 8, 8}), y = torch::randint(10, {16});
  std::optional<AutocastGuard> around;
  const torchamp::AutocastOptions region{.dtype = at::kBFloat16, .cache = cache};
  if (whole) around.emplace(at::kCPU, region);
  at::Tensor loss;
  for (int i = 0; i < 10; ++i) {
    optimizer.zero_grad();
    {
      const AutocastGuard autocast(at::kCPU, region);
      loss = at::cross_entropy_loss(net->forward(x), y);
    }
    loss.backward();
    optimizer.step();
  }
  return loss.item<float>();
}

TEST(StepInRegion, LibTorchsOptimizersTrainAsWithAGuardForEachForward) {
  using namespace torch::optim;
  const auto expect_equal = [](auto train) { EXPECT_EQ(train(true), train(false)); };
  expect_equal([](bool whole) { return loss_after_training<SGD>(whole, SGDOptions(0.05)); });
  expect_equal([](bool whole) {
    return loss_after_training<SGD>(whole, SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  });
  expect_equal([](bool whole) { return loss_after_training<Adam>(whole, AdamOptions(1e-3)); });
  expect_equal([](bool whole) { return loss_after_training<AdamW>(whole, AdamWOptions(1e-3)); });
  expect_equal(
      [](bool whole) { return loss_after_training<RMSprop>(whole, RMSpropOptions(1e-3)); });
  expect_equal(
      [](bool whole) { return loss_after_training<Adagrad>(whole, AdagradOptions(0.01)); });
}

TEST(StepInRegion, LibTorchsSgdTrainsWithEachCacheAsWithAGuardForEachForward) {
  const auto options = torch::optim::SGDOptions(0.05);
  const float expected = loss_after_training<torch::optim::SGD>(false, options);
  for (const WeightCache cache :
       {WeightCache::none, WeightCache::region, WeightCache(WeightCache::window),
        WeightCache(WeightCache::kept), torchamp::weights_together()}) {
    EXPECT_EQ(loss_after_training<torch::optim::SGD>(true, options, cache), expected);
  }
}

TEST(StepInRegion, WritesByHandAreSeen) {
  const std::vector<std::function<void(at::Tensor)>> writes{
      [](at::Tensor w) { w.sub_(w.grad(), 0.5); },
      [](at::Tensor w) { w.data().sub_(w.grad(), 0.5); },
      [](at::Tensor w) { w.copy_(torch::full_like(w, 3.)); },
      [](at::Tensor w) { w.mul_(2.); },
      [](at::Tensor w) { w.clamp_(-0.5, 0.5); },
      [](at::Tensor w) { w[1].fill_(5.); },
      [](at::Tensor w) { w.index_put_({torch::tensor({1})}, torch::tensor(4.F)); },
      [](at::Tensor w) { torch::nn::init::uniform_(w, 2., 3.); },
      [](at::Tensor w) { at::_foreach_add_({w}, 1.); },
      [](at::Tensor w) {
        at::_foreach_sub_(std::vector<at::Tensor>{w.data()}, std::vector<at::Tensor>{w.grad()},
                          0.5);
      },
  };
  for (std::size_t i = 0; i < writes.size(); ++i) {
    SCOPED_TRACE(i);
    const at::Tensor weight = ones();
    expect_seen(weight, [&](const at::Tensor& loss) {
      loss.backward();
      const at::NoGradGuard no_grad;
      writes[i](weight);
    });
  }
}

TEST(StepInRegion, GradientsOfMicroBatchesLeaveTheCasts) {
  const at::Tensor weight = ones();
  const AutocastGuard autocast(at::kCPU, at::kBFloat16);
  const auto cast = [&] { return at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU); };
  const at::Tensor first = cast();
  for (int i = 0; i < 2; ++i) torch::ones({4, 4}).mm(weight).to(at::kFloat).sum().backward();
  at::Tensor activation = torch::ones({4, 4}).mm(weight).to(at::kFloat);
  activation.add_(1.);
  EXPECT_TRUE(cast().is_same(first));
}

TEST(StepInRegion, EachEvaluationOfAClosureSeesTheWeightsOfTheLast) {
  for (const bool enabled : {false, true}) {
    const auto run = [enabled](bool whole) {
      const at::Tensor weight = ones();
      torch::optim::LBFGS optimizer({weight}, torch::optim::LBFGSOptions(0.1).max_iter(5));
      GradScaler scaler({.enabled = enabled});
      std::optional<AutocastGuard> around;
      if (whole) around.emplace(at::kCPU, at::kBFloat16);
      for (int i = 0; i < 2; ++i) {
        step(scaler, optimizer, [&] {
          const AutocastGuard autocast(at::kCPU, at::kBFloat16);
          return (torch::ones({4, 4}).mm(weight).to(at::kFloat) - 1).pow(2).sum();
        });
        scaler.update();
      }
      return weight.detach();
    };
    const at::Tensor expected = run(false);
    EXPECT_FALSE(at::equal(expected, torch::ones({4, 4})));
    EXPECT_TRUE(at::equal(run(true), expected));
  }
}

TEST(StepInRegion, AStepWithAClosureIsSeen) {
  const at::Tensor weight = ones();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  GradScaler scaler;
  expect_seen(weight, [&](const at::Tensor&) {
    step(scaler, optimizer, [&] { return torch::ones({4, 4}).mm(weight).to(at::kFloat).sum(); });
  });
}

TEST(StepInRegion, AStepThatFailsHalfWayIsSeen) {
  struct HalfWay : torch::optim::SGD {
    using SGD::SGD;
    at::Tensor step(LossClosure closure = nullptr) override {
      SGD::step(closure);
      throw std::runtime_error("half-way");
    }
  };
  const at::Tensor weight = ones();
  HalfWay optimizer({weight}, torch::optim::SGDOptions(0.5));
  GradScaler scaler;
  expect_seen(weight, [&](const at::Tensor& loss) {
    scaler.scale(loss).backward();
    EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  });
}

TEST(StepInRegion, AccumulatedStepsAreSeen) {
  for (const bool enabled : {false, true}) {
    const at::Tensor weight = ones();
    torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
    GradScaler scaler({.enabled = enabled});
    torchamp::Accumulation accumulation(scaler, optimizer, 1);
    expect_seen(weight, [&](const at::Tensor& loss) { accumulation.backward(loss); });
    DroppingAccumulation safe(scaler, optimizer);
    expect_seen(weight, [&](const at::Tensor& loss) {
      safe.backward(loss);
      safe.step();
    });
  }
}

TEST(StepInRegion, WeightsThatMasterWeightsLoadAreSeen) {
  torch::nn::Linear net(torch::nn::LinearOptions(4, 4).bias(false));
  torchamp::MasterWeights masters(net, {.dtype = at::kBFloat16, .keep_fp32 = {"weight"}});
  std::stringstream file;
  torch::save(masters, file);
  {
    const at::NoGradGuard no_grad;
    net->weight.add_(1);
  }
  expect_seen(net->weight, [&](const at::Tensor&) { torch::load(masters, file); });
}

TEST(StepInRegion, AReplayedStepIsSeen) {
  const at::Tensor weight = ones();
  torchamp::FusedAdam optimizer(std::vector<at::Tensor>{weight});
  optimizer.prepare_captured_step();
  weight.sum().backward();
  optimizer.step();
  expect_seen(weight, [&](const at::Tensor&) {
    {
      const at::NoGradGuard no_grad;
      weight.add_(1);  // as the graph does
    }
    optimizer.note_replayed_step();
  });
}

/// LibTorch's own step, as examples/guide/guards.md says.
TEST(StepInRegion, APlainStepIsSeenAfterClearingTheCache) {
  const at::Tensor weight = ones();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  expect_seen(weight, [&](const at::Tensor& loss) {
    loss.backward();
    optimizer.step();
    torchamp::clear_weight_cache();
  });
}
