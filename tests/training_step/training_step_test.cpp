// SPDX-License-Identifier: BSD-3-Clause
// A TrainingStep does what its parts do, bit for bit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/optimizers.h"
#include "support/training_steps.h"
#include "support/warnings.h"
#include "torchamp/torchamp.h"
#include "torchamp/training_step.h"
#include "torchamp/weight_cache.h"

namespace {

using at::Tensor;
using torchamp::AutocastGuard;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;
using torchamp::TrainingStep;
using training_steps::batch_of;
using training_steps::expect_same_bits;
using training_steps::expect_same_weights;
using training_steps::kinds;
using training_steps::loss_of;
using training_steps::make_net;
using training_steps::Net;

// ---- The same as by hand ------------------------------------------------------------------------

struct Way {
  at::ScalarType dtype;
  std::optional<double> clip;
  std::int64_t parts;
  bool scales;

  GradScalerOptions scaler() const {
    return {.init_scale = 1024., .growth_interval = 3, .enabled = scales};
  }
};

std::vector<Way> ways() {
  std::vector<Way> all;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const std::optional<double> clip : {std::optional<double>(), {0.05}}) {
      for (const std::int64_t parts : {1, 3}) {
        for (const bool scales : {true, false}) all.push_back({dtype, clip, parts, scales});
      }
    }
  }
  return all;
}

class OnDevice : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(TrainingStep, OnDevice, all_devices(), device_name);

class Counted : public OnDevice {};

INSTANTIATE_TEST_SUITE_P(TrainingStep, Counted, simulated_device(), device_name);

TEST_P(OnDevice, TrainsAsTheIterationWrittenByHandBitForBit) {
  for (const auto& [name, make] : kinds()) {
    for (const Way& way : ways()) {
      SCOPED_TRACE(c10::str(name, ' ', way.dtype, " clip ", way.clip.value_or(-1.), " parts ",
                            way.parts, " scales ", way.scales));
      Net by_hand = make_net(GetParam()), stepped = make_net(GetParam());
      const auto optimizer = make(by_hand->parameters()), other = make(stepped->parameters());
      GradScaler scaler(way.scaler());
      TrainingStep train(stepped, *other,
                         {.dtype = way.dtype,
                          .scaler = way.scaler(),
                          .max_grad_norm = way.clip,
                          .micro_batches = way.parts});
      const bool overflows = way.scales;  // in one window, which is skipped
      for (int window = 0; window < 5; ++window) {
        optimizer->zero_grad();
        Tensor norm;
        const double scale = scaler.get_scale();
        for (std::int64_t part = 0; part < way.parts; ++part) {
          const auto batch =
              batch_of(GetParam(), window * 10 + static_cast<int>(part), overflows && window == 3);
          Tensor loss;
          {
            const AutocastGuard autocast(
                GetParam(),
                {.dtype = way.dtype == at::kFloat ? std::nullopt : std::optional(way.dtype),
                 .enabled = way.dtype != at::kFloat});
            loss = loss_of(by_hand, batch);
          }
          scaler.scale(way.parts == 1 ? loss : loss / way.parts).backward();
          const auto result = train([&] { return loss_of(stepped, batch); });
          EXPECT_TRUE(at::equal(result.loss_tensor().cpu(), loss.detach().cpu()));
          EXPECT_EQ(result.ended_window(), part + 1 == way.parts);
          if (!result.ended_window()) {
            EXPECT_FALSE(result.stepped());
            continue;
          }
          if (way.clip) norm = torchamp::clip_grad_norm_(scaler, *optimizer, *way.clip);
          const auto step = scaler.step(*optimizer);
          scaler.update();
          EXPECT_EQ(result.stepped(), step.stepped());
          EXPECT_EQ(result.stepped(), !overflows || window != 3);
          EXPECT_EQ(result.scale(), scale);
          if (way.clip && result.stepped()) {
            EXPECT_EQ(result.norm(), norm.item<double>());
          }
        }
        EXPECT_EQ(train.scaler().get_scale(), scaler.get_scale());
        expect_same_bits(stepped, by_hand);
      }
      EXPECT_EQ(train.steps(), 5);
    }
  }
}

TEST_P(Counted, ReadsNothingWithAFusedOptimizerWithoutAQuery) {
  Net net = make_net(GetParam());
  torchamp::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  TrainingStep train(net, optimizer, {.dtype = at::kHalf, .max_grad_norm = 1.});
  const auto batch = batch_of(GetParam(), 0);
  for (int i = 0; i < 3; ++i) train([&] { return loss_of(net, batch); });
  const simulated::Counts counts;
  const auto result = train([&] { return loss_of(net, batch); });
  EXPECT_EQ(counts.now().waits, 0);
  EXPECT_TRUE(result.stepped());
  EXPECT_GT(counts.now().waits, 0);
}

TEST_P(OnDevice, LaunchesAndReadsNoMoreThanItsParts) {
  if (GetParam() != at::kPrivateUse1)
    GTEST_SKIP() << "launches are counted on the simulated device";
  for (const auto& [name, make] : kinds()) {
    Net net = make_net(GetParam());
    const auto optimizer = make(net->parameters());
    GradScaler scaler({.init_scale = 64.});
    TrainingStep train(net, *optimizer,
                       {.dtype = at::kHalf, .scaler = scaler, .max_grad_norm = 1.});
    const auto batch = batch_of(GetParam(), 0);
    const auto by_hand = [&] {
      optimizer->zero_grad();
      Tensor loss;
      {
        const AutocastGuard autocast(GetParam(), at::kHalf);
        loss = loss_of(net, batch);
      }
      scaler.scale(loss).backward();
      torchamp::clip_grad_norm_(scaler, *optimizer, 1.);
      const auto result = scaler.step(*optimizer);  // that still tells the scale after update()
      scaler.update();
    };
    const auto by_step = [&] { train([&] { return loss_of(net, batch); }); };
    const auto costs_of = [](const auto& iteration) {
      for (int i = 0; i < 4; ++i) iteration();  // the scaler checks the order of the first ones
      const simulated::Counts counts;
      iteration();
      return std::pair(counts.now().kernels, counts.now().waits);
    };
    EXPECT_EQ(costs_of(by_step), costs_of(by_hand)) << name;
  }
}

TEST(TrainingStep, UsesThePolicyAndTheCacheThatItIsGiven) {
  Net by_hand = make_net(at::kCPU), stepped = make_net(at::kCPU);
  torch::optim::SGD optimizer(by_hand->parameters(), 0.1), other(stepped->parameters(), 0.1);
  const auto policy = torchamp::Policy::standard().fp32({"linear", "addmm", "mm"});
  TrainingStep train(stepped, other,
                     {.dtype = at::kBFloat16,
                      .policy = policy,
                      .micro_batches = 2,
                      .cache = torchamp::WeightCache::window});
  GradScaler scaler(GradScalerOptions::skip_non_finite());
  for (int i = 0; i < 4; ++i) {
    const auto batch = batch_of(at::kCPU, i);
    if (i % 2 == 0) optimizer.zero_grad();
    Tensor loss;
    {
      const AutocastGuard autocast(at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
      loss = loss_of(by_hand, batch);
    }
    scaler.scale(loss / 2).backward();
    train([&] { return loss_of(stepped, batch); });
    if (i % 2 == 0) continue;
    scaler.step(optimizer);
    scaler.update();
  }
  expect_same_bits(stepped, by_hand);
}

TEST(TrainingStep, ChoosesTheScalerByTheDtype) {
  for (const auto& [dtype, scale] :
       {std::pair(at::kHalf, 65536.), {at::kBFloat16, 1.}, {at::kFloat, 1.}}) {
    Net net = make_net(at::kCPU);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    TrainingStep train(net, optimizer, {.dtype = dtype});
    EXPECT_EQ(train.scaler().get_scale(), scale) << dtype;
    EXPECT_EQ(train.scaler().options().dynamic, dtype == at::kHalf);
    const auto before = net->parameters()[0].detach().clone();
    const auto bad = batch_of(at::kCPU, 0, /*overflows=*/true);
    EXPECT_FALSE(train([&] { return loss_of(net, bad); })) << "a bad batch ruins nothing";
    EXPECT_TRUE(at::equal(net->parameters()[0], before));
  }
}

// ---- Windows ------------------------------------------------------------------------------------

TEST(TrainingStep, SaysThatAModelInFp64IsNotCast) {
  constexpr const char* text = "the parameters are fp64, which autocast never casts";
  for (const bool is_wide : {false, true}) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      Net net = make_net(at::kCPU);
      if (is_wide) net->to(at::kDouble);
      torchamp::FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
      const CollectedWarnings warnings;
      const TrainingStep train(net, optimizer, {.dtype = dtype});
      EXPECT_EQ(warnings.text().find(text) != std::string::npos, is_wide && dtype != at::kFloat);
    }
  }
}

TEST(TrainingStep, FinishesAnIncompleteWindowAsAnAccumulationDoes) {
  Net by_hand = make_net(at::kCPU), stepped = make_net(at::kCPU);
  torch::optim::SGD optimizer(by_hand->parameters(), 0.1), other(stepped->parameters(), 0.1);
  GradScaler scaler({.init_scale = 8.});
  torchamp::Accumulation accumulation(scaler, optimizer, 3);
  TrainingStep train(
      stepped, other,
      {.dtype = at::kFloat, .scaler = GradScalerOptions{.init_scale = 8.}, .micro_batches = 3});
  EXPECT_FALSE(train.finish().has_value());
  for (int i = 0; i < 5; ++i) {
    (void)accumulation.backward(loss_of(by_hand, batch_of(at::kCPU, i)));
    train([&] { return loss_of(stepped, batch_of(at::kCPU, i)); });
  }
  EXPECT_EQ(train.pending(), 2);
  (void)accumulation.flush();
  const auto result = train.finish();
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->stepped());
  EXPECT_ERROR((void)result->loss(), "finish() computes no loss");
  EXPECT_EQ(train.pending(), 0);
  EXPECT_EQ(train.steps(), 2);
  expect_same_bits(stepped, by_hand);
}

TEST(TrainingStep, SaysThatAWindowWasLeftOpen) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  CollectedWarnings warnings;
  {
    TrainingStep train(net, optimizer, {.dtype = at::kFloat, .micro_batches = 2});
    train([&] { return loss_of(net, batch_of(at::kCPU, 0)); });
  }
  EXPECT_THAT(warnings.text(), testing::StartsWith("TrainingStep: destroyed with 1 of 2"));
  EXPECT_THAT(warnings.text(), testing::Not(testing::HasSubstr("Accumulation")));
}

TEST(TrainingStep, BeginsAWindowWithoutPresentGradients) {
  for (const std::int64_t parts : {1, 2}) {
    Net clean = make_net(at::kCPU), dirty = make_net(at::kCPU);
    torch::optim::SGD optimizer(clean->parameters(), 0.1), other(dirty->parameters(), 0.1);
    TrainingStep expected(clean, optimizer, {.dtype = at::kFloat, .micro_batches = parts});
    TrainingStep train(dirty, other, {.dtype = at::kFloat, .micro_batches = parts});
    for (int i = 0; i < 4; ++i) {
      if (i % parts == 0) loss_of(dirty, batch_of(at::kCPU, 99)).backward();
      expected([&] { return loss_of(clean, batch_of(at::kCPU, i)); });
      train([&] { return loss_of(dirty, batch_of(at::kCPU, i)); });
    }
    expect_same_weights(dirty, clean);
  }
}

// ---- Exceptions ---------------------------------------------------------------------------------

TEST(TrainingStep, GoesOnAfterAnExceptionOfTheFunctionAsIfItHadNotBeenCalled) {
  for (const std::int64_t parts : {1, 3}) {
    Net calm = make_net(at::kCPU), shaken = make_net(at::kCPU);
    torchamp::FusedAdamW optimizer(calm->parameters()), other(shaken->parameters());
    const auto options = [&] {
      return torchamp::TrainingStepOptions{
          .dtype = at::kBFloat16, .max_grad_norm = 0.1, .micro_batches = parts};
    };
    TrainingStep expected(calm, optimizer, options()), train(shaken, other, options());
    for (int i = 0; i < 6; ++i) {
      expected([&] { return loss_of(calm, batch_of(at::kCPU, i)); });
      EXPECT_THROW(train([&]() -> Tensor {
                     loss_of(shaken, batch_of(at::kCPU, 50 + i));
                     throw std::runtime_error("no batch");
                   }),
                   std::runtime_error);
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      EXPECT_ERROR(train([&] { return at::ones({2}); }),
                   "must return the loss: a scalar computed from the parameters, with grad mode "
                   "on. It returned a tensor of shape [2]: return its mean() or sum().");
      train([&] { return loss_of(shaken, batch_of(at::kCPU, i)); });
    }
    expect_same_weights(shaken, calm);
    EXPECT_EQ(train.steps(), 6 / parts);
  }
}

/// Fails in backward, as often as requested.
struct Failing : torch::autograd::Function<Failing> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("backward has failed");
  }
};

TEST(TrainingStep, DropsTheWindowWhoseBackwardFails) {
  for (const std::int64_t parts : {1, 2}) {
    Net calm = make_net(at::kCPU), shaken = make_net(at::kCPU);
    torchamp::FusedAdamW optimizer(calm->parameters()), other(shaken->parameters());
    TrainingStep expected(calm, optimizer, {.dtype = at::kFloat, .micro_batches = parts});
    TrainingStep train(shaken, other, {.dtype = at::kFloat, .micro_batches = parts});
    for (int i = 0; i < 4; ++i) {
      expected([&] { return loss_of(calm, batch_of(at::kCPU, i)); });
      if (i % parts == 0) {
        if (parts == 2) train([&] { return loss_of(shaken, batch_of(at::kCPU, 70)); });
        EXPECT_THROW(train([&] {
                       return loss_of(shaken, batch_of(at::kCPU, 71)) +
                              Failing::apply(loss_of(shaken, batch_of(at::kCPU, 72)));
                     }),
                     std::exception);
        EXPECT_EQ(train.pending(), 0);
        for (const Tensor& parameter : shaken->parameters()) {
          EXPECT_FALSE(parameter.grad().defined());
        }
      }
      train([&] { return loss_of(shaken, batch_of(at::kCPU, i)); });
    }
    expect_same_weights(shaken, calm);
  }
}

TEST(TrainingStep, DropsTheWindowIfTheFunctionFailsAfterItsOwnBackward) {
  for (const std::int64_t parts : {1, 2}) {
    Net calm = make_net(at::kCPU), shaken = make_net(at::kCPU);
    torchamp::FusedAdamW optimizer(calm->parameters()), other(shaken->parameters());
    TrainingStep expected(calm, optimizer, {.dtype = at::kFloat, .micro_batches = parts});
    TrainingStep train(shaken, other, {.dtype = at::kFloat, .micro_batches = parts});
    for (int i = 0; i < 4; ++i) {
      expected([&] { return loss_of(calm, batch_of(at::kCPU, i)); });
      if (i % parts == 0) {
        if (parts == 2) train([&] { return loss_of(shaken, batch_of(at::kCPU, 70)); });
        const auto backward_of_a_part = [&] {
          train.scaler().scale(loss_of(shaken, batch_of(at::kCPU, 71))).backward();
        };
        EXPECT_THROW(train([&]() -> Tensor {
                       backward_of_a_part();
                       throw std::runtime_error("no second part");
                     }),
                     std::runtime_error);
        EXPECT_EQ(train.pending(), 0);
        if (parts == 2) train([&] { return loss_of(shaken, batch_of(at::kCPU, 70)); });
        EXPECT_ERROR(train([&] {
                       backward_of_a_part();
                       return at::ones({2});
                     }),
                     "a tensor of shape [2]");
        EXPECT_EQ(train.pending(), 0) << "and what it returned was no loss";
      }
      train([&] { return loss_of(shaken, batch_of(at::kCPU, i)); });
    }
    expect_same_weights(shaken, calm);
  }
}

TEST(TrainingStep, HasNoNormOfAWindowThatFailed) {
  Net net = make_net(at::kCPU);
  FailingSgd optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  TrainingStep train(net, optimizer,
                     {.dtype = at::kFloat, .max_grad_norm = 1., .micro_batches = 2});
  const auto part = [&] { return train([&] { return loss_of(net, batch_of(at::kCPU, 0)); }); };
  part();
  EXPECT_THROW(part(), std::runtime_error);
  optimizer.fails = false;
  EXPECT_FALSE(part().norm_tensor().defined());
  EXPECT_GT(part().norm(), 0.);
}

TEST(TrainingStep, GoesOnAfterALimitOfTheScaler) {
  for (const std::int64_t parts : {1, 2}) {
    Net net = make_net(at::kCPU);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    TrainingStep train(net, optimizer,
                       {.dtype = at::kFloat,
                        .scaler = GradScalerOptions{.max_skips_in_a_row = 1},
                        .micro_batches = parts});
    const auto iteration = [&](bool bad) {
      for (std::int64_t part = 1; part < parts; ++part) {
        train([&] { return loss_of(net, batch_of(at::kCPU, 0, bad)); });
      }
      return train([&] { return loss_of(net, batch_of(at::kCPU, 0, bad)); }).stepped();
    };
    EXPECT_TRUE(iteration(false));
    EXPECT_ERROR(iteration(true), "max_skips_in_a_row");
    EXPECT_EQ(train.pending(), 0);
    EXPECT_TRUE(iteration(false));
  }
}

// ---- Evaluation ---------------------------------------------------------------------------------

TEST(TrainingStep, EvaluatesUnderTheGuardWithoutGradientsAndRestoresEveryMode) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, {.dtype = at::kBFloat16, .micro_batches = 2});
  net->last->eval();  // frozen by the program
  const auto look = [&] {
    EXPECT_FALSE(at::GradMode::is_enabled());
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_FALSE(net->is_training());
    EXPECT_FALSE(net->norm->is_training());
    return loss_of(net, batch_of(at::kCPU, 1)).item<double>();
  };
  const double value = train.evaluate(look);
  EXPECT_GT(value, 0.);
  EXPECT_TRUE(net->is_training());
  EXPECT_TRUE(net->norm->is_training());
  EXPECT_FALSE(net->last->is_training());
  EXPECT_TRUE(at::GradMode::is_enabled());

  train([&] { return loss_of(net, batch_of(at::kCPU, 0)); });
  EXPECT_GT(train.evaluate(look), 0.) << "between micro-batches as well";
  EXPECT_THROW(train.evaluate([]() -> int { throw std::runtime_error("no data"); }),
               std::runtime_error);
  EXPECT_TRUE(net->is_training());
  EXPECT_FALSE(net->last->is_training());
  int calls = 0;
  train.evaluate([&] { ++calls; });
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(train.finish()->stepped());
}

// ---- Several side by side -----------------------------------------------------------------------

TEST(TrainingStep, SharesAScalerOrHasItsOwn) {
  Net one = make_net(at::kCPU), two = make_net(at::kCPU);
  torch::optim::SGD first(one->parameters(), 0.1), second(two->parameters(), 0.1);
  GradScaler shared({.init_scale = 64.});
  TrainingStep train_one(one, first, {.dtype = at::kFloat, .scaler = shared});
  TrainingStep train_two(two, second, {.dtype = at::kFloat, .scaler = shared});
  EXPECT_EQ(&train_one.scaler(), &shared);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(train_one([&] { return loss_of(one, batch_of(at::kCPU, i)); }));
    EXPECT_TRUE(train_two([&] {  // its backward goes through the other's model
      return loss_of(two, {loss_of(one, batch_of(at::kCPU, i)) * batch_of(at::kCPU, i)[0],
                           batch_of(at::kCPU, i)[1]});
    }));
  }
  EXPECT_FALSE(train_one([&] { return loss_of(one, batch_of(at::kCPU, 0, true)); }));
  EXPECT_EQ(train_two.scaler().get_scale(), 32.);

  TrainingStep alone(one, first, {.dtype = at::kFloat, .scaler = GradScalerOptions{}});
  alone([&] { return loss_of(one, batch_of(at::kCPU, 0)); });
  EXPECT_EQ(alone.scaler().get_scale(), 65536.);
  EXPECT_EQ(shared.get_scale(), 32.);
}

// ---- What it is made of -------------------------------------------------------------------------

struct OnTheStack : torch::nn::Module {
  torch::nn::Linear layer{register_module("layer", torch::nn::Linear(2, 1))};
};

TEST(TrainingStep, TakesAHolderAPointerAndAModule) {
  Net holder = make_net(at::kCPU);
  const auto pointer = std::make_shared<OnTheStack>();
  OnTheStack plain;
  const auto x = at::ones({3, 2});
  torch::optim::SGD of_pointer(pointer->parameters(), 0.1), of_plain(plain.parameters(), 0.1);
  TrainingStep one(pointer, of_pointer, {.dtype = at::kFloat});
  TrainingStep two(plain, of_plain, {.dtype = at::kFloat});
  EXPECT_TRUE(one([&] { return pointer->layer(x).sum(); }));
  EXPECT_TRUE(two([&] { return plain.layer(x).sum(); }));
  EXPECT_EQ(two.evaluate([&] { return plain.is_training(); }), false);
  EXPECT_TRUE(plain.layer->is_training());
}

TEST(TrainingStep, HasAFactoryMakeTheOptimizer) {
  Net by_hand = make_net(at::kCPU), plain = make_net(at::kCPU), named = make_net(at::kCPU);
  torchamp::FusedAdamW optimizer(by_hand->parameters(), torch::optim::AdamWOptions(0.02));
  TrainingStep expected(by_hand, optimizer, {.dtype = at::kFloat});
  TrainingStep of_parameters(plain,
                             [](auto parameters) {
                               return std::make_unique<torchamp::FusedAdamW>(
                                   parameters, torch::optim::AdamWOptions(0.02));
                             },
                             {.dtype = at::kFloat});
  std::vector<std::string> names;
  TrainingStep of_names(named,
                        [&](const TrainingStep::NamedParameters& parameters) {
                          std::vector<Tensor> all;
                          for (const auto& [name, parameter] : parameters) {
                            names.push_back(name);
                            all.push_back(parameter);
                          }
                          return std::make_shared<torchamp::FusedAdamW>(
                              all, torch::optim::AdamWOptions(0.02));
                        },
                        {.dtype = at::kFloat});
  EXPECT_EQ(names, named->named_parameters().keys());
  for (int i = 0; i < 3; ++i) {
    const auto batch = batch_of(at::kCPU, i);
    expected([&] { return loss_of(by_hand, batch); });
    of_parameters([&] { return loss_of(plain, batch); });
    of_names([&] { return loss_of(named, batch); });
  }
  expect_same_bits(plain, by_hand);
  expect_same_bits(named, by_hand);
  EXPECT_NE(dynamic_cast<torchamp::FusedAdamW*>(&of_names.optimizer()), nullptr);
}

TEST(TrainingStep, TakesInputsEvenIfNothingIsCaptured) {
  Net one = make_net(at::kCPU), two = make_net(at::kCPU);
  torch::optim::SGD first(one->parameters(), 0.1), second(two->parameters(), 0.1);
  TrainingStep train_one(one, first, {.dtype = at::kFloat});
  TrainingStep train_two(two, second, {.dtype = at::kFloat});
  for (int i = 0; i < 3; ++i) {
    const auto batch = batch_of(at::kCPU, i);
    train_one([&] { return loss_of(one, batch); });
    train_two({batch[0], batch[1]}, [&](const auto& inputs) { return loss_of(two, inputs); });
  }
  expect_same_bits(one, two);
}

// ---- What cannot be -----------------------------------------------------------------------------

TEST(TrainingStep, RefusesInvalidOptionsAtConstruction) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_ERROR(TrainingStep(net, lbfgs), "closure_step.h");
  EXPECT_ERROR(TrainingStep(net, sgd, {.micro_batches = 0}), "micro_batches is 0");
  EXPECT_ERROR(TrainingStep(net, sgd, {.max_grad_norm = -1.}), "max_grad_norm is -1");
  EXPECT_ERROR(TrainingStep(net, sgd, {.max_grad_norm = std::numeric_limits<double>::quiet_NaN()}),
               "max_grad_norm is nan");
  EXPECT_ERROR(TrainingStep(net, sgd, {.dtype = at::kDouble}), "dtype is Double");
  EXPECT_ERROR(TrainingStep(net, sgd, {.device = at::kCUDA}), "Move the model there");
  EXPECT_ERROR(TrainingStep(net, sgd, {.scaler = GradScalerOptions{.init_scale = -1.}}),
               "the scale is -1");
  EXPECT_ERROR(TrainingStep(torch::nn::Sequential(torch::nn::ReLU()), sgd), "has no parameters");
  EXPECT_ERROR(TrainingStep(std::shared_ptr<torch::nn::Module>(), sgd), "there is no model");
  EXPECT_ERROR(TrainingStep(net, [](auto) { return std::unique_ptr<torch::optim::Optimizer>(); }),
               "has made no optimizer");
  Net half = make_net(at::kCPU);
  half->to(at::kHalf);
  torch::optim::SGD of_half(half->parameters(), 0.1);
  EXPECT_ERROR(TrainingStep(half, of_half), "fp16 parameters");
}

TEST(TrainingStep, SaysThatBf16ParametersLoseSmallUpdates) {
  constexpr const char* text = "the optimizer has bf16 parameters";
  for (const bool is_narrow : {false, true}) {
    for (const bool learns : {false, true}) {
      Net net = make_net(at::kCPU);
      if (is_narrow) net->to(at::kBFloat16);
      net->parameters().front().set_requires_grad(learns);
      torchamp::FusedSGD optimizer({net->parameters().front()}, torch::optim::SGDOptions(0.1));
      const CollectedWarnings warnings;
      const TrainingStep train(net, optimizer);
      EXPECT_EQ(warnings.text().find(text) != std::string::npos, is_narrow && learns);
    }
  }
}

TEST(TrainingStep, ReturnsTheLossWithoutItsGraphAndKeepsTheProgramsLoss) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, {.dtype = at::kFloat});
  const auto batch = batch_of(at::kCPU, 0);
  Tensor own;
  const auto kept = train([&] { return own = loss_of(net, batch); });
  EXPECT_TRUE(own.requires_grad() && own.grad_fn());
  EXPECT_EQ(kept.loss(), own.item<double>());
  const auto viewed = train([&] { return loss_of(net, batch).view({1}); });
  const auto given = train([&] { return loss_of(net, batch); });
  for (const auto* result : {&kept, &viewed, &given}) {
    EXPECT_FALSE(result->loss_tensor().requires_grad());
    EXPECT_FALSE(result->loss_tensor().grad_fn());
  }
}

TEST(TrainingStep, ComputesTheNormWithoutClippingForAnInfiniteBound) {
  Net plain = make_net(at::kCPU), measured = make_net(at::kCPU);
  torchamp::FusedSGD optimizer(plain->parameters(), torch::optim::SGDOptions(0.1));
  torchamp::FusedSGD other(measured->parameters(), torch::optim::SGDOptions(0.1));
  TrainingStep expected(plain, optimizer, {.dtype = at::kFloat});
  TrainingStep train(
      measured, other,
      {.dtype = at::kFloat, .max_grad_norm = std::numeric_limits<double>::infinity()});
  for (int i = 0; i < 3; ++i) {
    const auto batch = batch_of(at::kCPU, i);
    const auto without = expected([&] { return loss_of(plain, batch); });
    EXPECT_ERROR((void)without.norm(), "no norm was computed. Set .max_grad_norm; with infinity");
    std::vector<Tensor> norms;
    const auto result = train([&] { return loss_of(measured, batch); });
    for (const Tensor& parameter : plain->parameters()) norms.push_back(parameter.grad().norm());
    EXPECT_FLOAT_EQ(static_cast<float>(result.norm()), at::stack(norms).norm().item<float>());
  }
  expect_same_bits(measured, plain);
}

TEST(TrainingStep, TakesStepsWithAnInfiniteBoundWhoseNormFp32CannotHold) {
  torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
  torch::optim::SGD optimizer(net->parameters(), 0x1p-66);
  TrainingStep train(
      net, optimizer,
      {.dtype = at::kFloat, .max_grad_norm = std::numeric_limits<double>::infinity()});
  const Tensor before = net->weight.detach().clone();
  EXPECT_TRUE(train([&] { return (net->weight * 0x1p66).sum(); }).stepped());
  EXPECT_TRUE(at::equal(net->weight, before - 1.)) << net->weight;
}

TEST(TrainingStep, NamesWhatAResultDoesNotHave) {
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingStep train(net, optimizer, {.dtype = at::kFloat, .micro_batches = 2});
  const auto result = train([&] { return loss_of(net, batch_of(at::kCPU, 0)); });
  EXPECT_ERROR((void)result.norm(), "norm: the window has not ended");
  EXPECT_ERROR((void)result.scale(), "the window has not ended");
  EXPECT_FALSE(result.loss_tensor().requires_grad());
  EXPECT_ERROR((void)train.masters<torchamp::GradScaler>(), "Set .masters");
  (void)train.finish();
}

}  // namespace
