// SPDX-License-Identifier: BSD-3-Clause
// Loss scalers as programs write them, each with one fault, next to torchamp's. The guide's page
// hand-written.md has a row for each test of this folder.
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/autocast.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/expect_error.h"

namespace {

using at::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;
using torchamp::GradScaler;
using torchamp::GradScalerOptions;

/// torch.amp's rule on the host, without a fault.
struct HostScale {
  double scale = 65536.;
  int interval = 2000, good_steps = 0;

  void update(bool found_inf) {
    good_steps = found_inf ? 0 : good_steps + 1;
    if (found_inf) scale *= 0.5;
    if (good_steps < interval) return;
    scale *= 2.;
    good_steps = 0;
  }
};

bool all_finite(const Tensor& tensor) {
  return torch::isfinite(tensor).all().item<bool>();
}

/// Ten weights of a device, with scaled gradients.
std::vector<Tensor> weights_on(at::Device device, double scale) {
  std::vector<Tensor> weights;
  for (int i = 0; i < 10; ++i) {
    weights.push_back(torch::ones({4}, device).requires_grad_());
    weights.back().mutable_grad() = torch::full({4}, scale, device);
  }
  return weights;
}

/// How often the host waits for the device in a step.
std::int64_t waits_in(const std::function<void()>& step) {
  const simulated::Counts counts;
  step();
  return counts.now().waits;
}

TEST(HandWrittenScaler, WaitsForTheDeviceInEachStepOrForEachParameter) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const std::vector<Tensor> weights = weights_on(simulated::sim0, 1024.);
  torch::optim::SGD optimizer(weights, SGDOptions(0.1));
  HostScale scale{.scale = 1024.};
  const auto for_each_parameter = [&] {
    bool found_inf = false;
    for (const Tensor& weight : weights) {
      weight.mutable_grad().div_(scale.scale);
      found_inf |= !torch::isfinite(weight.grad()).all().item<bool>();
    }
    if (!found_inf) optimizer.step();
    scale.update(found_inf);
  };
  EXPECT_EQ(waits_in(for_each_parameter), 10);
  const auto once = [&] {
    Tensor sum = torch::zeros({}, simulated::on(simulated::sim0));
    for (const Tensor& weight : weights) {
      weight.mutable_grad().div_(scale.scale);
      sum += weight.grad().sum();
    }
    const bool found_inf = !std::isfinite(sum.item<float>());
    if (!found_inf) optimizer.step();
    scale.update(found_inf);
  };
  EXPECT_EQ(waits_in(once), 1);

  const std::vector<Tensor> others = weights_on(simulated::sim0, 1024.);
  torchamp::FusedSGD fused(others, SGDOptions(0.1));
  GradScaler scaler({.init_scale = 1024.});
  scaler.scale(torch::ones({}, simulated::on(simulated::sim0)));
  EXPECT_EQ(waits_in([&] {
              scaler.step(fused);
              scaler.update();
            }),
            0);
  EXPECT_NEAR(others.back()[0].item<double>(), 0.9, 1e-6);
}

/// A weight of 1 with a gradient of 1 in each of two groups, after a step at a rate of 0.001.
std::vector<double> weights_of_two_groups(
    const std::function<void(Optimizer&, const Tensor& loss)>& step) {
  const Tensor body = torch::ones({}, torch::requires_grad());
  const Tensor head = torch::ones({}, torch::requires_grad());
  torch::optim::SGD optimizer({OptimizerParamGroup(std::vector<Tensor>{body}),
                               OptimizerParamGroup(std::vector<Tensor>{head})},
                              SGDOptions(1e-3));
  step(optimizer, body + head);
  return {body.item<double>(), head.item<double>()};
}

TEST(HandWrittenScaler, ThatUnscalesTheFirstGroupStepsTheOthersByScaledGradients) {
  const auto by_hand = weights_of_two_groups([](Optimizer& optimizer, const Tensor& loss) {
    (loss * 65536.).backward();
    for (const Tensor& weight : optimizer.parameters()) weight.mutable_grad().div_(65536.);
    optimizer.step();
  });
  EXPECT_NEAR(by_hand[0], 0.999, 1e-6);
  EXPECT_NEAR(by_hand[1], 1. - 65.536, 1e-3);
  const auto weights = weights_of_two_groups([](Optimizer& optimizer, const Tensor& loss) {
    GradScaler scaler;
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
  });
  EXPECT_NEAR(weights[0], 0.999, 1e-6);
  EXPECT_NEAR(weights[1], 0.999, 1e-6);
}

/// The loss of a weight in an fp16 region: 1, whose gradient in fp16 is the scale.
Tensor loss_in_fp16(const Tensor& weight) {
  const torchamp::AutocastGuard guard(at::kCPU, at::kHalf);
  return torch::mm(torch::ones({1, 1}), weight).to(at::kFloat).sum();
}

TEST(HandWrittenScaler, ThatLooksForInfsInTheLossFindsNoneInTheGradients) {
  const Tensor by_hand = torch::ones({1, 1}, torch::requires_grad());
  torch::optim::SGD sgd({by_hand}, SGDOptions(1e-3));
  HostScale scale;
  const Tensor scaled = loss_in_fp16(by_hand) * scale.scale;
  scaled.backward();
  by_hand.mutable_grad().div_(scale.scale);
  const bool found_inf = !all_finite(scaled);
  if (!found_inf) sgd.step();
  scale.update(found_inf);
  EXPECT_EQ(by_hand.item<double>(), -HUGE_VAL) << "65536 in fp16 is inf";
  EXPECT_EQ(scale.scale, 65536.);

  const Tensor weight = torch::ones({1, 1}, torch::requires_grad());
  torch::optim::SGD other({weight}, SGDOptions(1e-3));
  GradScaler scaler;
  for (int step = 0; step < 2; ++step) {
    other.zero_grad();
    scaler.scale(loss_in_fp16(weight)).backward();
    EXPECT_EQ(scaler.step(other).stepped(), step == 1);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32768.);
  }
  EXPECT_NEAR(weight.item<double>(), 0.999, 1e-6);
}

TEST(HandWrittenScaler, OfABf16RunGrowsUntilItSkipsEverySecondStep) {
  const Tensor weight = torch::ones({1, 1}, torch::requires_grad());
  const auto loss = [&] {
    const torchamp::AutocastGuard guard(at::kCPU, at::kBFloat16);
    return torch::mm(torch::ones({1, 1}), weight).sum();
  };
  torch::optim::SGD optimizer({weight}, SGDOptions(0.));
  HostScale scale{.interval = 1};
  int skipped = 0, skipped_of_ours = 0;
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    (loss() * scale.scale).backward();
    const bool found_inf = !all_finite(weight.grad());
    skipped += found_inf ? 1 : 0;
    scale.update(found_inf);
  }
  EXPECT_EQ(skipped, 44) << "of the 88 steps after the scale has reached 2^127";
  GradScaler scaler(GradScalerOptions::skip_non_finite());
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    scaler.scale(loss()).backward();
    skipped_of_ours += scaler.step(optimizer) ? 0 : 1;
    scaler.update();
  }
  EXPECT_EQ(skipped_of_ours, 0);
  EXPECT_EQ(scaler.get_scale(), 1.);
}

TEST(HandWrittenScaler, WithItsFlagOnTheHostFailsForGradientsOfADevice) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const std::vector<Tensor> weights = weights_on(simulated::sim0, 1024.);
  std::vector<Tensor> gradients;
  for (const Tensor& weight : weights) gradients.push_back(weight.grad());
  Tensor found_inf = torch::zeros({});
  EXPECT_ERROR(at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf,
                                                              torch::full({}, 1. / 1024.)),
               "on the device");
  torch::optim::SGD optimizer(weights, SGDOptions(0.1));
  GradScaler scaler({.init_scale = 1024.});
  scaler.scale(torch::ones({}, simulated::on(simulated::sim0)));
  scaler.step(optimizer);
  scaler.update();
  EXPECT_NEAR(weights.front()[0].item<double>(), 0.9, 1e-6);
}

}  // namespace
