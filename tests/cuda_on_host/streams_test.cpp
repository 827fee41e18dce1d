// SPDX-License-Identifier: BSD-3-Clause
// Streams of a CudaGraph: what is not ordered by events has other values with late work.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <optional>
#include <utility>

#include "cuda_on_host/stand_in.h"
#include "support/optimizer_kinds.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/torchamp.h"
#include "torchamp/weight_cache.h"

namespace {

/// An iteration for the body of a graph, which runs on a separate stream.
struct LateIteration {
  Tensor step(const Params& batch) {
    stream = c10::cuda::getCurrentCUDAStream();
    optimizer->zero_grad();
    const Tensor loss = (weight * batch[0]).pow(2).sum();
    scaler.scale(loss).backward();
    scaler.step(*optimizer);
    scaler.update();
    return loss;
  }
  torchamp::CudaGraph graph(int64_t warmup) {
    return torchamp::CudaGraph(*optimizer, [this](const Params& batch) { return step(batch); },
                               {.warmup = warmup});
  }

  Tensor weight = at::ones({4}, at::kCUDA).requires_grad_();
  std::optional<torchamp::FusedAdam> optimizer{std::in_place, Params{weight}, AdamOptions(0.1)};
  torchamp::GradScaler scaler{};
  std::optional<c10::cuda::CUDAStream> stream{};
};

/// A product with a weight whose cast is kept.
double product_with(const Tensor& weight) {
  const torchamp::AutocastGuard guard(
      at::kCUDA, {.dtype = at::kBFloat16, .cache = torchamp::WeightCache::kept});
  const at::NoGradGuard no_grad;
  return at::mm(at::ones({1, 4}, at::kCUDA), weight.view({4, 1})).item<double>();
}

class LateGraph : public testing::Test {
 protected:
  void SetUp() override { stand_in_late(true); }
  void TearDown() override { stand_in_late(false); }
  LateIteration in_;
};

TEST_F(LateGraph, TheBodyWaitsForWhatTheCallersStreamHasBeenGiven) {
  torchamp::CudaGraph graph(*in_.optimizer, [this](const Params& batch) {
    const Tensor loss = in_.step(batch);
    in_.stream->synchronize();  // before the caller's stream is waited for
    return loss;
  });
  const Tensor batch = at::full({4}, 2., at::kCUDA);
  EXPECT_EQ(graph({batch})[0].item<double>(), 16.);
}

TEST_F(LateGraph, TheCallersStreamWaitsForTheBody) {
  torchamp::CudaGraph graph = in_.graph(3);
  graph({at::ones({4}, at::kCUDA)});
  EXPECT_NEAR(in_.weight[0].item<double>(), 0.9, 1e-6);
}

TEST_F(LateGraph, MemoryThatAReplayUsesIsNotFreeBeforeItIsOver) {
  torchamp::CudaGraph graph = in_.graph(1);
  for (int i = 0; i < 3; ++i) graph({at::ones({4}, at::kCUDA)});
  in_.optimizer.reset();  // its state is memory of the body's stream
  in_.stream->synchronize();
  EXPECT_NEAR(in_.weight[0].item<double>(), 0.7, 0.05);
}

TEST_F(LateGraph, FlagsOfEagerStepsAreKeptUntilTheBodyHasCountedThem) {
  const Tensor bad = at::full({4}, std::numeric_limits<double>::infinity(), at::kCUDA);
  for (int i = 0; i < 3; ++i) in_.step({bad});
  torchamp::CudaGraph graph = in_.graph(3);
  graph({bad});
  EXPECT_EQ(in_.scaler.skips_in_a_row(), 4);
}

TEST_F(LateGraph, ACastThatIsKeptIsMadeAgainAfterAReplay) {
  torchamp::CudaGraph graph = in_.graph(1);
  for (int i = 0; i < 2; ++i) graph({at::ones({4}, at::kCUDA)});
  const double before = product_with(in_.weight);
  graph({at::ones({4}, at::kCUDA)});
  EXPECT_LT(product_with(in_.weight), before - 0.1);
}

TEST_F(LateGraph, ACastThatIsKeptIsUsedOnTheStreamThatMadeIt) {
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool();
  const torchamp::AutocastGuard guard(
      at::kCUDA, {.dtype = at::kBFloat16, .cache = torchamp::WeightCache::kept});
  const at::NoGradGuard no_grad;
  const Tensor weight = at::ones({4, 4}, at::kCUDA).requires_grad_();
  c10::cuda::device_synchronize();
  const Tensor here = at::mm(weight, weight);
  const c10::cuda::CUDAStreamGuard on_side(side);
  EXPECT_EQ(at::mm(weight, weight).sum().item<double>(), 64.);
}

TEST_F(LateGraph, ABatchOfTheHostIsCopiedWithoutAWait) {
  torchamp::CudaGraph graph = in_.graph(1);
  const Tensor batch = at::ones({4}).pin_memory();
  for (int i = 0; i < 4; ++i) graph({batch});
  StandInCounts before, after;
  stand_in_counts(&before);
  graph({batch});
  stand_in_counts(&after);
  EXPECT_EQ(after.waits, before.waits);
  EXPECT_EQ(after.to_device, before.to_device + 1);
}

}  // namespace
