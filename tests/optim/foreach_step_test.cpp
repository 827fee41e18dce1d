// SPDX-License-Identifier: BSD-3-Clause
// Steps on a device without fused kernels: the simulated device with that setting.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>

#include <limits>
#include <string>
#include <vector>

#include "simulated_device/device.h"
#include "simulated_device/facts.h"
#include "support/devices.h"
#include "support/optimizer_kinds.h"
#include "support/seed.h"

namespace {

using simulated::sim0;

class ForeachStep : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(at::kPrivateUse1);
    seed_all(1);
  }

  static Params params(at::ScalarType dtype = at::kFloat) {
    const auto options = at::TensorOptions(sim0).dtype(dtype);
    const Tensor image = torch::randn({2, 3, 4, 4}, options).to(at::MemoryFormat::ChannelsLast);
    return {param({5}, options), image.requires_grad_(), param({}, options)};
  }

  const simulated::Facts facts_{{.type = at::kPrivateUse1, .fused = false}};
};

INSTANTIATE_TEST_SUITE_P(Kinds, ForeachStep, testing::ValuesIn(kinds()),
                         [](const auto& kind) { return kind.param.name; });

TEST_P(ForeachStep, DividesAndSkipsAsAFusedKernelDoes) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Pair pair(GetParam(), params(dtype), /*two_groups=*/true);
    for (int i = 0; i < 12; ++i) {
      pair.random_step();
      pair.expect_equal();
    }
  }
}

TEST_P(ForeachStep, LeavesParametersAndStatesUnchangedWhateverTheGradientsHold) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int good_before : {0, 2}) {
      Pair pair(GetParam(), params(dtype));
      for (int i = 0; i < good_before; ++i) {
        pair.new_gradients(1., 1000);
        as_fused(*pair.fused).step_scaled({}, number(0., sim0));
      }
      const Params before = copies(pair.fused_params);
      std::stringstream state_before, state_after;
      const auto bad = {std::numeric_limits<double>::infinity(), std::nan(""), 1e30};
      if (good_before > 0) torch::save(*pair.fused, state_before);
      for (const double value : bad) {
        for (const Tensor& p : pair.fused_params) p.mutable_grad() = torch::full_like(p, value);
        as_fused(*pair.fused).step_scaled(number(0.5, sim0), number(1., sim0));
      }
      for (std::size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(torch::equal(pair.fused_params[i].detach().cpu(), before[i].detach().cpu()));
      }
      if (good_before > 0) {
        torch::save(*pair.fused, state_after);
        EXPECT_EQ(state_before.str().size(), state_after.str().size());
      }
      // Compares the state after a step with an optimizer that has skipped no step.
      if (dtype != at::kFloat || good_before > 0) continue;
      pair.new_gradients(1., 1000);
      pair.plain->step();
      as_fused(*pair.fused).step_scaled({}, number(0., sim0));
      pair.expect_equal();
    }
  }
}

TEST_P(ForeachStep, StepsSixteenBitsInFp32) {
  Params narrow = params(at::kBFloat16);
  Params wide;
  for (const Tensor& p : narrow) wide.push_back(p.detach().to(at::kFloat).requires_grad_());
  const auto optimizer = GetParam().fused({OptimizerParamGroup(narrow)});
  const auto reference = GetParam().plain({OptimizerParamGroup(wide)});
  for (std::size_t i = 0; i < narrow.size(); ++i) {
    const Tensor gradient = torch::randn_like(narrow[i]);
    narrow[i].mutable_grad() = gradient;
    wide[i].mutable_grad() = gradient.to(at::kFloat);
  }
  optimizer->step();
  reference->step();
  for (std::size_t i = 0; i < narrow.size(); ++i) {
    EXPECT_TRUE(at::allclose(narrow[i].detach().to(at::kFloat).cpu(), wide[i].detach().cpu(),
                             /*rtol=*/1e-2, /*atol=*/1e-4));
  }
}

TEST_P(ForeachStep, ReadsNothingAndLaunchesTheSameForAnyNumberOfParameters) {
  std::vector<int64_t> kernels;
  for (const int count : {10, 100}) {
    Params all;
    for (int i = 0; i < count; ++i) {
      all.push_back(param({8}, sim0));
      all.back().mutable_grad() = torch::ones_like(all.back());
    }
    const auto optimizer = GetParam().fused({OptimizerParamGroup(all)});
    torchamp::GradScaler scaler({.init_scale = 4.});
    scaler.scale(torch::ones({}, sim0));
    for (int i = 0; i < 3; ++i) {
      const simulated::Counts counts;
      scaler.step(*optimizer);
      scaler.update();
      EXPECT_EQ(counts.now().waits, 0);
      EXPECT_EQ(counts.now().host_to_device, 0);
      if (i == 2) kernels.push_back(counts.now().kernels);
    }
  }
  EXPECT_EQ(kernels[0], kernels[1]);
  RecordProperty("kernels", static_cast<int>(kernels[0]));
  EXPECT_LE(kernels[0], 48) << "see Note [Steps without a fused kernel]";
}

}  // namespace
