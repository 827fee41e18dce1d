// SPDX-License-Identifier: BSD-3-Clause
// What torchamp's part of a training step launches on a device, counted on the simulated one. A
// launch is small if it takes no list of gradients or parameters, nor one of their numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>

#include <memory>
#include <string>
#include <vector>

#include "support/devices.h"
#include "support/optimizer_kinds.h"
#include "support/simulated/device.h"

namespace {

using simulated::Launch;
using simulated::sim0;
using torchamp::GradScaler;

constexpr int64_t size = 64;  // of each parameter

struct Cost {
  int64_t small = 0, large = 0;
  std::string names;  // of all launches, in order
  simulated::Totals totals;
};

/// Parameters with gradients, an optimizer and a scaler that have made a few steps.
struct Step {
  Step(const Kind& kind, int count, bool clips) : clip(clips) {
    for (int i = 0; i < count; ++i) {
      params.push_back(torch::ones({size}, at::device(sim0)).requires_grad_());
      params.back().mutable_grad() = torch::ones({size}, at::device(sim0));
    }
    const Groups groups{OptimizerParamGroup(params)};
    optimizer = kind.fused(groups);
    scaler.scale(torch::ones({}, at::device(sim0)));
    for (int i = 0; i < 3; ++i) once();
  }

  void once() {
    if (clip) torchamp::clip_grad_norm_(scaler, *optimizer, 0.1);
    scaler.step(*optimizer);
    scaler.update();
  }

  Cost cost() {
    simulated::LaunchLog log;
    const simulated::Counts counts;
    once();
    Cost cost;
    cost.totals = counts.now();
    for (const Launch& launch : log.take()) {
      const bool is_large = 2 * launch.elements >= size * static_cast<int64_t>(params.size());
      (is_large ? cost.large : cost.small) += launch.kernels;
      cost.names += ' ' + launch.op.substr(launch.op.find(':') == std::string::npos ? 0 : 6);
    }
    return cost;
  }

  bool clip;
  std::vector<Tensor> params;
  std::unique_ptr<Optimizer> optimizer;
  GradScaler scaler{{.init_scale = 1024.}};
};

class StepCosts : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { SKIP_WITHOUT(at::kPrivateUse1); }
};

INSTANTIATE_TEST_SUITE_P(Kinds, StepCosts, testing::ValuesIn(kinds()),
                         [](const auto& kind) { return kind.param.name; });

// Small are: the flag's zero, the look at the largest values, the flag in the form that kernels
// take, the update of the scale, and the count of skips; two for optimizers that count steps, and a
// few where SGD's first step may be still to come. A clip: the norm of norms, the scale taken from
// it, and what the step is to divide by.
TEST_P(StepCosts, AFusedStepMakesFewSmallLaunchesHoweverManyParameters) {
  const std::string kind = GetParam().name;
  const bool first_sgd = kind == "sgd_dampening";
  const int64_t counting = first_sgd ? 6 : kind.starts_with("ada") ? 2 : 0;
  for (const bool clip : {false, true}) {
    const Cost few = Step(GetParam(), 10, clip).cost();
    EXPECT_LE(few.small, (clip ? 11 : 5) + counting) << few.names;
    EXPECT_LE(few.large, (clip ? 4 : 2) + (first_sgd ? 1 : 0)) << few.names;
    EXPECT_EQ(few.totals.waits, 0);
    EXPECT_EQ(few.totals.host_to_device, 0);
    const Cost many = Step(GetParam(), 100, clip).cost();
    EXPECT_EQ(many.small, few.small) << many.names;
    EXPECT_EQ(many.large, few.large) << many.names;
  }
}

}  // namespace
