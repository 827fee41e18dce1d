// SPDX-License-Identifier: BSD-3-Clause
// How often the scaler reads the device, and how many ops it runs: neither grows with the number of
// parameters.
#include <torchamp/grad_scaler.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "support/call_counter.h"
#include "support/devices.h"
#include "support/on_device.h"
#include "support/optimizers.h"

using torchamp::GradScaler;
using torchamp::GradScalerOptions;

namespace {

/// Optimizers whose own work is nothing.
struct Idle : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure = nullptr) override { return {}; }
};
struct IdleScaled : Idle, torchamp::ScaledStep {
  using Idle::Idle;
  at::Tensor step_scaled(const at::Tensor&, const at::Tensor&) override { return {}; }
};

std::vector<torch::optim::OptimizerParamGroup> groups_of(int parameters, at::DeviceType device) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (int g = 0; g < 2; ++g) {
    std::vector<at::Tensor> group;
    for (int i = 0; i < parameters / 2; ++i) {
      group.push_back(parameter_with(torch::ones({3}, at::TensorOptions(device))));
    }
    groups.emplace_back(group);
  }
  return groups;
}

struct Costs {
  int reads;
  std::map<std::string, int> calls;
  bool operator==(const Costs&) const = default;
};

template <typename Call>
Costs costs_of(const Call& call) {
  const CallCounter counter;
  call();
  return {counter.reads(), counter.calls()};
}

class GradScalerCosts : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }

  /// A scaler in the middle of training.
  template <typename Optimizer>
  struct Training {
    Training(int parameters, at::DeviceType device, const GradScalerOptions& options = {})
        : scaler(options), optimizer(groups_of(parameters, device), torch::optim::SGDOptions(1.)) {
      scaler.scale(torch::ones({}, at::TensorOptions(device)));
      for (int i = 0; i < 3; ++i) {
        scaler.step(optimizer);
        scaler.update();
      }
    }
    GradScaler scaler;
    Optimizer optimizer;
  };
};

}  // namespace

TEST_P(GradScalerCosts, AnOrdinaryStepReadsOnceAndUpdateNever) {
  for (const int parameters : {2, 10, 1000}) {
    Training<Idle> training(parameters, GetParam());
    EXPECT_EQ(costs_of([&] { training.scaler.step(training.optimizer); }).reads, 1);
    const Costs update = costs_of([&] { training.scaler.update(); });
    EXPECT_EQ(update.reads, 0);
    EXPECT_TRUE(update.calls.empty()) << "the host knows all that it needs";
  }
}

TEST_P(GradScalerCosts, AFusedStepNeverReads) {
  for (const int parameters : {2, 10, 1000}) {
    Training<IdleScaled> training(parameters, GetParam());
    const Costs iteration = costs_of([&] {
      training.scaler.step(training.optimizer);
      training.scaler.update();
      training.scaler.unscale_(training.optimizer);
      training.scaler.step(training.optimizer);
      training.scaler.update();
    });
    EXPECT_EQ(iteration.reads, 0);
  }
}

TEST_P(GradScalerCosts, DoNotGrowWithTheNumberOfParameters) {
  const auto iteration = [&]<typename Optimizer>(int parameters, const GradScalerOptions& options) {
    Training<Optimizer> training(parameters, GetParam(), options);
    return costs_of([&] {
      training.scaler.unscale_(training.optimizer);
      training.scaler.step(training.optimizer);
      training.scaler.update();
    });
  };
  GradScalerOptions rechecked;
  rechecked.recheck = true;
  for (const GradScalerOptions& options : {GradScalerOptions{}, rechecked}) {
    EXPECT_EQ(iteration.operator()<Idle>(10, options), iteration.operator()<Idle>(1000, options));
    EXPECT_EQ(iteration.operator()<IdleScaled>(10, options),
              iteration.operator()<IdleScaled>(1000, options));
  }
}

TEST_P(GradScalerCosts, AreAHandfulOfOps) {
  Training<Idle> plain(100, GetParam());
  const Costs step = costs_of([&] { plain.scaler.step(plain.optimizer); });
  EXPECT_EQ(step.calls.at("aten::_amp_foreach_non_finite_check_and_unscale_"), 1);
  int total = 0;
  for (const auto& [name, count] : step.calls) total += count;
  EXPECT_LE(total, 10);

  Training<IdleScaled> fused(100, GetParam());
  move_to_device(fused.scaler);
  const CallCounter counter;
  fused.scaler.step(fused.optimizer);
  fused.scaler.update();
  EXPECT_EQ(counter.called("aten::_amp_foreach_non_finite_check_and_unscale_"), 1);
  EXPECT_EQ(counter.called("aten::_amp_update_scale_"), 1);
  EXPECT_LE(counter.called(), 12);
  EXPECT_EQ(counter.reads(), 0);
}

TEST_P(GradScalerCosts, TheUpdateOnTheDeviceNeverReads) {
  for (const GradScalerOptions& options :
       {GradScalerOptions::torch(), GradScalerOptions::megatron(), GradScalerOptions::deepspeed(),
        GradScalerOptions::skip_non_finite()}) {
    Training<IdleScaled> training(10, GetParam(), options);
    move_to_device(training.scaler);
    const Costs costs = costs_of([&] {
      for (int i = 0; i < 3; ++i) {
        training.scaler.scale(torch::ones({}, at::TensorOptions(GetParam())));
        training.scaler.unscale_(training.optimizer);
        const torchamp::StepResult result = training.scaler.step(training.optimizer);
        training.scaler.update();
      }
    });
    EXPECT_EQ(costs.reads, 0);
  }
}

TEST_P(GradScalerCosts, QuotientsAreCheckedOnADeviceIfMinScaleIsBelowOne) {
  for (const double min_scale : {0x1p-126, 0.5, 1., 4.}) {
    SCOPED_TRACE(min_scale);
    Training<IdleScaled> training(10, GetParam(), {.min_scale = min_scale});
    GradScaler& scaler = training.scaler;
    move_to_device(scaler);
    for (const double scale : {65536., 4.}) {
      scaler.update(scale);
      const CallCounter counter;
      scaler.step(training.optimizer);
      scaler.update();
      EXPECT_EQ(counter.reads(), 0);
      EXPECT_EQ(counter.called("aten::_foreach_div_"), min_scale < 1. ? 1 : 0);
      EXPECT_EQ(counter.called("aten::_foreach_norm"), GetParam() != at::kCPU || min_scale < 1.);
    }
  }
}

TEST_P(GradScalerCosts, AQueryOfAResultReadsAtMostOnceAndNoQueryReadsNothing) {
  Training<IdleScaled> training(10, GetParam());
  move_to_device(training.scaler);
  const torchamp::StepResult result = training.scaler.step(training.optimizer);
  training.scaler.update();
  EXPECT_EQ(costs_of([&] { EXPECT_TRUE(result.had_gradients()); }).reads, 0);
  EXPECT_EQ(costs_of([&] { EXPECT_TRUE(result); }).reads, 1);
  EXPECT_EQ(costs_of([&] { EXPECT_TRUE(result); }).reads, 0);
  EXPECT_EQ(costs_of([&] { result.skips_in_a_row(); }).reads, 0) << "it stepped: 0";
  EXPECT_EQ(costs_of([&] { result.scale(); }).reads, 1);
  const torchamp::StepResult copy = result;
  EXPECT_EQ(costs_of([&] { copy.scale(); }).reads, 0);
}

TEST_P(GradScalerCosts, AResultThatNobodyKeepsCostsNoOp) {
  Training<IdleScaled> training(10, GetParam());
  move_to_device(training.scaler);
  training.scaler.step(training.optimizer);
  const Costs dropped = costs_of([&] { training.scaler.update(); });
  EXPECT_EQ(dropped.calls.count("aten::clone"), 0U);
}

TEST_P(GradScalerCosts, GettersOfAScaleThatTheHostKnowsReadNothing) {
  Training<Idle> training(10, GetParam());
  EXPECT_EQ(costs_of([&] {
              training.scaler.get_scale();
              training.scaler.skips_in_a_row();
              training.scaler.state_dict();
              training.scaler.scale_tensor();
            }).reads,
            0);
}

INSTANTIATE_TEST_SUITE_P(Devices, GradScalerCosts, all_devices(), device_name);
