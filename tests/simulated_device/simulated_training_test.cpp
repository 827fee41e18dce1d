// SPDX-License-Identifier: BSD-3-Clause
// Whole trainings on the simulated accelerator: that nothing in a step waits for the device,
// touches its memory or mixes devices up, on one device, on two, and as a capture would have it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/accumulate.h>
#include <torchamp/autocast.h>
#include <torchamp/clip_grad.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>
#include <torchamp/policy.h>
#include <torchamp/recompute.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "../examples/benchmark/models/yolo_loss.h"
#include "simulated_device/device.h"
#include "simulated_device/facts.h"
#include "simulated_device/pinned.h"
#include "support/devices.h"
#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/host_access_watch.h"
#include "support/non_finite.h"
#include "support/optimizer_kinds.h"
#include "support/seed.h"
#include "support/thread_state.h"
#include "torchamp/policy_text.h"

namespace {

using simulated::Counts;
using simulated::on;
using simulated::sim0;
using simulated::sim1;
using torchamp::AutocastGuard;
using torchamp::GradScaler;

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    second = register_module("second", torch::nn::Linear(8, 3));
  }
  Tensor forward(const Tensor& x) { return second(torch::relu(norm(first(x)))); }

  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

/// A net, its data and an optimizer on a device.
struct Training {
  Training(c10::Device device, const Kind& kind, bool fused) {
    seed_all(5);
    net = std::make_shared<Net>();
    x = torch::randn({4, 6}).to(device);
    y = torch::randn({4, 3}).to(device);
    to_device(net, device);
    const Groups groups{OptimizerParamGroup(net->parameters())};
    optimizer = fused ? kind.fused(groups) : kind.plain(groups);
  }

  Tensor loss() {
    const AutocastGuard autocast(x.device().type(), at::kBFloat16);
    return torch::mse_loss(net->forward(x), y);
  }
  void step(bool clip = false) {
    optimizer->zero_grad();
    scaler.scale(loss()).backward();
    if (clip) torchamp::clip_grad_norm_(scaler, *optimizer, 0.1);
    scaler.step(*optimizer);
    scaler.update();
  }
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> all;
    for (const Tensor& p : net->parameters()) all.push_back(p.detach().cpu());
    return all;
  }

  std::shared_ptr<Net> net;
  Tensor x, y;
  std::unique_ptr<Optimizer> optimizer;
  GradScaler scaler{{.init_scale = 1024.}};
};

class SimulatedTraining : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { SKIP_WITHOUT(at::kPrivateUse1); }
};
using SimulatedTrainingOf = SimulatedTraining;

INSTANTIATE_TEST_SUITE_P(Kinds, SimulatedTrainingOf, testing::ValuesIn(kinds()),
                         [](const auto& kind) { return kind.param.name; });

void expect_alike(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected,
                  double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], tolerance, tolerance)) << i;
  }
}

// ---- One device --------------------------------------------------------------------------------

TEST_P(SimulatedTrainingOf, AFusedStepNeverWaits) {
  for (const bool clip : {false, true}) {
    Training training(sim1, GetParam(), /*fused=*/true);
    for (int i = 0; i < 3; ++i) training.step(clip);
    const Counts counts;
    for (int i = 0; i < 5; ++i) training.step(clip);
    EXPECT_EQ(counts.now().waits, 0);
    EXPECT_EQ(counts.now().host_to_device, 0);
    EXPECT_LE(counts.now().device_to_host, 5);  // news for update(), that nobody waits for
  }
}

TEST_P(SimulatedTrainingOf, APlainStepWaitsOnceForTheFlag) {
  Training own(sim1, GetParam(), /*fused=*/false);  // LibTorch's own may read, too
  own.step();
  const Counts alone;
  own.optimizer->step();
  const int64_t reads = alone.now().waits;
  const Counts counts;
  own.step();
  EXPECT_EQ(counts.now().waits, reads + 1);
}

TEST_P(SimulatedTrainingOf, GivesTheCPUsNumbers) {
  for (const bool fused : {false, true}) {
    Training here(sim0, GetParam(), fused), there(at::kCPU, GetParam(), fused);
    for (int i = 0; i < 3; ++i) {
      here.step(/*clip=*/true);
      there.step(/*clip=*/true);
    }
    expect_alike(here.parameters(), there.parameters(), 3e-3);
  }
}

TEST_P(SimulatedTrainingOf, ASkippedStepChangesNothing) {
  for (const bool fused : {false, true}) {
    Training training(sim1, GetParam(), fused);
    training.step();
    const std::vector<Tensor> before = training.parameters();
    training.optimizer->zero_grad();
    training.scaler.scale(training.loss()).backward();
    training.net->first->bias.mutable_grad().fill_(kInf);
    training.scaler.step(*training.optimizer);
    training.scaler.update();
    expect_alike(training.parameters(), before, 0.);
    EXPECT_EQ(training.scaler.get_scale(), 512.);
  }
}

TEST_P(SimulatedTrainingOf, AWarmFusedStepFitsIntoACapture) {
  Training training(sim0, GetParam(), /*fused=*/true);
  for (int i = 0; i < 3; ++i) training.step(/*clip=*/true);
  training.optimizer->zero_grad();
  const simulated::Capturing capturing(
      c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(sim0));
  EXPECT_NO_THROW(training.step(/*clip=*/true));
}

TEST_P(SimulatedTrainingOf, KernelsDoNotGrowWithTheParameters) {
  const auto kernels = [](int parameters) {
    std::vector<Tensor> params;
    for (int i = 0; i < parameters; ++i) {
      params.push_back(torch::ones({3}, on(sim0)).requires_grad_());
      params.back().mutable_grad() = torch::ones({3}, on(sim0));
    }
    const auto optimizer = GetParam().fused({OptimizerParamGroup(params)});
    GradScaler scaler;
    scaler.scale(torch::ones({}, on(sim0)));
    const auto step = [&] {
      scaler.step(*optimizer);
      scaler.update();
    };
    for (int i = 0; i < 3; ++i) step();
    const Counts counts;
    step();
    return counts.now().kernels;
  };
  const int64_t few = kernels(10);
  EXPECT_EQ(kernels(200), few);
  RecordProperty("kernels", static_cast<int>(few));
}

// ---- Two devices -------------------------------------------------------------------------------

/// Steps parameters on two devices three times, the second time with an inf on the one `spoiled`,
/// and expects what comes of it where all are on one device.
void expect_steps_of_two_devices(const Kind& kind, c10::Device home,
                                 std::optional<c10::Device> spoiled, bool unscales) {
  std::vector<Tensor> params, single;
  for (const c10::Device device : {sim0, sim1}) {
    params.push_back(torch::ones({4}, on(device)).requires_grad_());
    single.push_back(torch::ones({4}).requires_grad_());
  }
  const auto optimizer = kind.fused({OptimizerParamGroup(params)});
  const auto reference = kind.fused({OptimizerParamGroup(single)});
  GradScaler scaler({.init_scale = 4.}), of_reference({.init_scale = 4.});
  for (int i = 0; i < 3; ++i) {
    const bool bad = spoiled && i == 1;
    const Counts counts;
    scaler.scale(torch::ones({}, on(home)));
    for (const Tensor& p : params) {
      p.mutable_grad() = torch::full_like(p, bad && p.device() == *spoiled ? kInf : 8.);
    }
    if (unscales) scaler.unscale_(*optimizer);
    scaler.step(*optimizer);
    scaler.update();
    EXPECT_EQ(counts.now().waits, 0);
    of_reference.scale(torch::ones({}));
    for (const Tensor& p : single) p.mutable_grad() = torch::full_like(p, bad ? kInf : 8.);
    of_reference.step(*reference);
    of_reference.update();
  }
  expect_alike({params[0].detach().cpu(), params[1].detach().cpu()},
               {single[0].detach(), single[1].detach()}, 1e-6);
  EXPECT_EQ(scaler.get_scale(), of_reference.get_scale());
}

TEST_P(SimulatedTrainingOf, OneScalerServesTwoDevices) {
  for (const c10::Device home : {sim0, sim1}) {
    for (const std::optional<c10::Device> spoiled :
         {std::optional<c10::Device>(), std::optional(sim0), std::optional(sim1)}) {
      for (const bool unscales : {false, true}) {
        SCOPED_TRACE(c10::str("home ", home, ", an inf on ", spoiled ? spoiled->str() : "none",
                              unscales ? ", unscaled" : ""));
        expect_steps_of_two_devices(GetParam(), home, spoiled, unscales);
      }
    }
  }
}

TEST_P(SimulatedTrainingOf, OneScalerServesTheHostAndADevice) {
  for (const c10::Device home : {c10::Device(at::kCPU), sim0}) {
    for (const c10::Device spoiled : {c10::Device(at::kCPU), sim0}) {
      const Params params{torch::ones({3}).requires_grad_(),
                          torch::ones({3}, on(sim0)).requires_grad_()};
      const Params single{torch::ones({3}).requires_grad_(), torch::ones({3}).requires_grad_()};
      const auto optimizer = GetParam().fused({OptimizerParamGroup(params)});
      const auto reference = GetParam().fused({OptimizerParamGroup(single)});
      GradScaler scaler({.init_scale = 4.});
      scaler.scale(torch::ones({}, on(home)));
      for (int i = 0; i < 3; ++i) {
        for (const Tensor& p : params) {
          p.mutable_grad() = torch::full_like(p, i == 1 && p.device() == spoiled ? kInf : 8.);
        }
        EXPECT_EQ(scaler.step(*optimizer).stepped(), i != 1);
        scaler.update();
        if (i == 1) continue;
        for (const Tensor& p : single) p.mutable_grad() = torch::full_like(p, i == 0 ? 2. : 4.);
        reference->step();
      }
      EXPECT_EQ(scaler.get_scale(), 2.);
      expect_alike({params[0].detach(), params[1].detach().cpu()},
                   {single[0].detach(), single[1].detach()}, 1e-6);
    }
  }
}

// ---- Devices of other kinds --------------------------------------------------------------------

TEST_F(SimulatedTraining, GoesTheSameWayWhateverKindOfDeviceItIs) {
  for (const at::DeviceType type :
       {at::kCUDA, at::kXPU, at::kMPS, at::kHPU, at::kMTIA, at::kMAIA, at::kPrivateUse1}) {
    SCOPED_TRACE(c10::str(type));
    const simulated::Facts facts(simulated::facts_like(type));
    for (const char* kind : {"adamw", "sgd_momentum"}) {
      for (const bool clips : {false, true}) {
        Training here(sim0, kind_named(kind), /*fused=*/true);
        Training there(at::kCPU, kind_named(kind), /*fused=*/true);
        for (int i = 0; i < 4; ++i) {
          const Counts counts;
          here.step(clips);
          EXPECT_EQ(counts.now().waits, 0);
          there.step(clips);
        }
        expect_alike(here.parameters(), there.parameters(), 2e-2);
        EXPECT_EQ(here.scaler.get_scale(), there.scaler.get_scale());
      }
    }
  }
}

TEST_F(SimulatedTraining, WatchesLimitsWithoutPinnedMemory) {
  const simulated::WithoutPinnedMemory without;
  const Tensor p = torch::ones({4}, on(sim0)).requires_grad_();
  torchamp::FusedSGD optimizer({p}, SGDOptions(1.));
  GradScaler scaler({.init_scale = 16., .max_skips_in_a_row = 2});
  scaler.scale(torch::ones({}, on(sim0)));
  const auto bad_iteration = [&] {
    p.mutable_grad() = torch::full_like(p, kInf);
    scaler.step(optimizer);
    scaler.update();
  };
  bad_iteration();
  bad_iteration();
  EXPECT_ERROR(bad_iteration(), "gradients held infs or NaNs in 2 consecutive iterations");
  EXPECT_EQ(scaler.get_scale(), 4.);
}

TEST_F(SimulatedTraining, PrintsAndLooksUpTheRulesOfADeviceThatIsThere) {
  std::ostringstream out;
  out << torchamp::Policy::standard();
  const std::string name = c10::DeviceTypeName(at::kPrivateUse1, /*lower_case=*/true);
  const std::size_t own = out.str().find("on " + name + '\n');
  ASSERT_NE(own, std::string::npos) << out.str();
  EXPECT_NE(out.str().find("  fp32\n", own), std::string::npos);
  for (const at::DeviceType device : autocast_devices) {
    EXPECT_EQ(torchamp::Policy::standard().lookup("sum", device), torchamp::Cast::fp32) << device;
    EXPECT_EQ(torchamp::Policy::torch().effect("relu", device), torchamp::Cast::unchanged);
  }
}

TEST_F(SimulatedTraining, ClippingSpansTwoDevices) {
  std::vector<Tensor> params;
  for (const c10::Device device : {sim0, sim1}) {
    params.push_back(torch::zeros({4}, on(device)).requires_grad_());
    params.back().mutable_grad() = torch::full({4}, 3., on(device));
  }
  const Counts counts;
  const Tensor norm = torchamp::clip_grad_norm_(params, 1.);
  EXPECT_EQ(counts.now().waits, 0);
  EXPECT_NEAR(norm.item<float>(), std::sqrt(72.), 1e-4);
  EXPECT_NEAR(params[1].grad()[0].item<float>(), 3. / std::sqrt(72.), 1e-4);
}

TEST_F(SimulatedTraining, LossesOfTwoDevicesAreScaledAlike) {
  GradScaler scaler({.init_scale = 8.});
  const auto scaled = scaler.scale({torch::ones({}, on(sim0)), torch::ones({}, on(sim1))});
  EXPECT_EQ(scaled[0].device(), sim0);
  EXPECT_EQ(scaled[1].device(), sim1);
  EXPECT_EQ(scaled[1].item<float>(), 8.F);
}

// ---- The rest of a training --------------------------------------------------------------------

TEST_F(SimulatedTraining, RecomputationDrawsTheSameNumbersAgain) {
  const auto gradient = [](bool recompute) {
    seed_all(9);
    const Tensor x = torch::ones({64}, on(sim1)).requires_grad_();
    const auto block = [](const Tensor& t) { return torch::dropout(t * t, 0.5, true); };
    const Tensor y = recompute ? torchamp::checkpoint(block, x) : block(x);
    torch::rand({3}, on(sim1));  // the generator goes on
    y.sum().backward();
    return x.grad().cpu();
  };
  EXPECT_TRUE(torch::equal(gradient(true), gradient(false)));
}

TEST_F(SimulatedTraining, RecomputationSaysWhyACaptureCannotKeepTheRandomState) {
  const Tensor x = torch::ones({4}, on(sim0)).requires_grad_();
  const auto twice = [](const Tensor& t) { return t * 2; };
  const simulated::Capturing capturing(
      c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(sim0));
  EXPECT_ERROR(torchamp::checkpoint(twice, x),
               "checkpoint: the random state cannot be read, for example because a CUDA graph is "
               "being captured. Pass {.preserve_rng_state = false}");
  EXPECT_NO_THROW(torchamp::checkpoint({.preserve_rng_state = false}, twice, x));
}

TEST_F(SimulatedTraining, RecomputationKeepsTheRegionInTheDevicesThread) {
  const Tensor x = torch::ones({4, 4}, on(sim1)).requires_grad_();
  std::vector<at::ScalarType> dtypes;
  Tensor y;
  {
    const AutocastGuard autocast(c10::kPrivateUse1, at::kBFloat16);
    y = torchamp::checkpoint(
        [&](const Tensor& t) {
          const Tensor product = t.mm(t);
          dtypes.push_back(product.scalar_type());
          return product;
        },
        x);
  }
  y.sum().backward();
  EXPECT_EQ(dtypes, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16}));
}

TEST_F(SimulatedTraining, DroppingAccumulationWaitsForNothingBeforeItsStep) {
  const Tensor w = torch::ones({4}, on(sim0)).requires_grad_();
  torchamp::FusedSGD optimizer({w}, torch::optim::SGDOptions(1.));
  GradScaler scaler({.init_scale = 4.});
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward((w * 2.).sum());
  const Counts counts;
  accumulation.backward((w * 4.).sum());
  accumulation.backward((w * kInf).sum());
  EXPECT_EQ(counts.now().waits, 0);
  accumulation.step();
  EXPECT_EQ(w[0].item<float>(), 1.F - 3.F);
}

TEST_F(SimulatedTraining, MasterWeightsTrainWithoutAWait) {
  seed_all(5);
  const auto net = std::make_shared<Net>();
  to_device(net, sim0);
  torchamp::MasterWeights masters(net, {.dtype = at::kHalf});
  torchamp::FusedAdam optimizer(masters.parameters(), torch::optim::AdamOptions(0.01));
  GradScaler scaler({.init_scale = 64.});
  const Tensor x = torch::randn({4, 6}, on(sim0));
  const auto step = [&] {
    optimizer.zero_grad();
    net->zero_grad();
    const AutocastGuard autocast(c10::kPrivateUse1, at::kHalf);
    const Tensor loss = net->forward(x).square().mean();
    scaler.scale(loss).backward();
    masters.take_gradients();
    scaler.step(optimizer);
    scaler.update();
    masters.copy_to_model();
    return loss.detach();
  };
  const Tensor first = step();
  const Counts counts;
  Tensor last;
  for (int i = 0; i < 10; ++i) last = step();
  EXPECT_EQ(counts.now().waits, 0);
  EXPECT_LT(last.item<float>(), first.item<float>());
}

TEST_F(SimulatedTraining, TheLossOfTheBenchmarksYoloMakesNobodyWait) {
  std::vector<Tensor> outputs, batch{torch::empty({2})};
  for (const int64_t side : {8, 4, 2}) {
    outputs.push_back(torch::randn({2, 3, side, side, 9}).to(sim0).requires_grad_());
    batch.push_back(torch::tensor({{0, 1}, {0, 2}, {1, 0}, {1, 1}}).to(sim0));
    batch.push_back(torch::rand({2, 4}).to(sim0));
  }
  batch.push_back(torch::zeros({2, 4}, on(sim0)));
  const auto loss = [&] {
    const AutocastGuard autocast(c10::kPrivateUse1);
    return yolo_loss(outputs, batch);
  };
  loss().backward();
  const Counts counts;
  const HostAccessWatch watch(c10::kPrivateUse1);
  loss().backward();
  EXPECT_EQ(counts.now().waits, 0);
  EXPECT_EQ(watch.first(), "");
  EXPECT_TRUE(outputs[0].grad().isfinite().all().item<bool>());
}

TEST_F(SimulatedTraining, TheWatchNamesAReadAndNoStep) {
  Training training(sim0, kind_named("adam"), /*fused=*/true);
  training.step();
  {
    const HostAccessWatch watch(c10::kPrivateUse1);
    training.step(/*clip=*/true);
    EXPECT_EQ(watch.first(), "");
  }
  const HostAccessWatch watch(c10::kPrivateUse1);
  training.scaler.get_scale();
  EXPECT_THAT(watch.first(), testing::HasSubstr("_local_scalar_dense"));
}

}  // namespace
