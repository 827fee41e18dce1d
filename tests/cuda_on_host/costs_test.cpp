// SPDX-License-Identifier: BSD-3-Clause
// What torchamp's steps cost in LibTorch's real CUDA code: launches, waits, copies, allocations.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <memory>
#include <string>
#include <vector>

#include "cuda_on_host/stand_in.h"
#include "support/optimizer_kinds.h"
#include "torchamp/clip_grad.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/grad_scaler.h"

namespace {

/// Four parameters with gradients, trained until nothing is new.
struct CountedSteps {
  std::vector<Tensor> parameters;
  std::unique_ptr<Optimizer> optimizer;
  torchamp::GradScaler scaler;
  bool clips;

  CountedSteps(const Kind& kind, bool with_clip) : clips(with_clip) {
    for (int i = 0; i < 4; ++i) {
      parameters.push_back(at::ones({8, 8}, at::kCUDA).requires_grad_());
      parameters.back().mutable_grad() = at::ones({8, 8}, at::kCUDA);
    }
    optimizer = kind.fused({OptimizerParamGroup(parameters)});
    scaler.scale(at::ones({}, at::kCUDA));
    for (int i = 0; i < 8; ++i) step();
  }

  void step() {
    if (clips) torchamp::clip_grad_norm_(scaler, *optimizer, 1.);
    scaler.step(*optimizer);
    scaler.update();
  }
};

template <class F>
StandInCounts counts_of(const F& f) {
  torch::cuda::synchronize();
  StandInCounts before, after;
  stand_in_counts(&before);
  f();
  stand_in_counts(&after);
  after.kernels -= before.kernels;
  after.waits -= before.waits;
  after.pageable -= before.pageable;
  after.allocations -= before.allocations;
  after.host_allocations -= before.host_allocations;
  after.graph_launches -= before.graph_launches;
  return after;
}

/// LibTorch 2.11 fills what its norms of lists write to.
constexpr uint64_t more_for_norms = TORCH_VERSION_MINOR >= 15 ? 0 : 1;

class CostsOnHost : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, CostsOnHost, testing::ValuesIn(kinds()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(CostsOnHost, AFusedStepLaunchesFewKernelsAndNeverWaits) {
  for (const bool clips : {false, true}) {
    CountedSteps training(GetParam(), clips);
    const StandInCounts costs = counts_of([&] { training.step(); });
    EXPECT_LE(costs.kernels, (clips ? 11U : 6U) + more_for_norms);
    EXPECT_GT(costs.kernels, 0U);
    EXPECT_EQ(costs.waits, 0U);
    EXPECT_EQ(costs.pageable, 0U);
    EXPECT_EQ(costs.allocations + costs.host_allocations, 0U)
        << "of CUDA, not of LibTorch's caches";
  }
}

TEST(CostsOnHostGraph, AReplayIsOneLaunchWithoutWaitsAndAllocations) {
  const Tensor weight = at::ones({8, 8}, at::kCUDA).requires_grad_();
  torchamp::FusedAdam optimizer({weight}, AdamOptions(1e-3));
  torchamp::CudaGraph graph(optimizer, [&](const std::vector<Tensor>& batch) {
    optimizer.zero_grad();
    const Tensor loss = (weight * batch[0]).sum();
    loss.backward();
    optimizer.step();
    return loss;
  });
  const std::vector<Tensor> batch{at::ones({8, 8}, at::kCUDA)};
  for (int i = 0; i < 8; ++i) graph(batch);
  ASSERT_TRUE(graph.is_captured());
  const StandInCounts costs = counts_of([&] { graph(batch); });
  EXPECT_EQ(costs.graph_launches, 1U);
  EXPECT_EQ(costs.waits + costs.pageable + costs.allocations + costs.host_allocations, 0U);
}

}  // namespace
