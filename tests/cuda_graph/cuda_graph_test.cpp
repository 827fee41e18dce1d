// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/cuda_graph.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/repeating_recorder.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"
#include "torchamp/optim.h"
#include "torchamp/recompute.h"
#include "torchamp/scaled_step.h"

namespace {

using torchamp::CudaGraph;
using torchamp::CudaGraphOptions;
using Tensors = CudaGraph::Tensors;

// ---- What is refused before anything is captured ------------------------------------------------

class OneParameter : public ::testing::Test {
 protected:
  at::Tensor parameter_ = torch::zeros({2}, torch::requires_grad());
  torchamp::FusedAdam fused_{{parameter_}};
  Repeater::Log log_;

  CudaGraph graph_of(std::function<Tensors(const Tensors&)> body, CudaGraphOptions options = {}) {
    return CudaGraph({fused_}, std::move(body), options, repeating(log_));
  }
  /// Any iteration that steps.
  Tensors step(const Tensors& batch) {
    parameter_.mutable_grad() = batch[0].clone();
    fused_.step();
    return {batch[0] * 2};
  }
  CudaGraph stepping_graph(CudaGraphOptions options = {}) {
    return graph_of([this](const Tensors& batch) { return step(batch); }, options);
  }
};

TEST_F(OneParameter, RefusesAnOrdinaryOptimizer) {
  torch::optim::Adam ordinary({parameter_});
  EXPECT_ERROR(CudaGraph(ordinary, [](const Tensors&) {}),
               "CudaGraph: an ordinary optimizer decides on the host");
  EXPECT_ERROR(CudaGraph({fused_, ordinary}, [](const Tensors&) {}), "Use torchamp's FusedAdam");
}

TEST_F(OneParameter, RefusesParametersOnACpu) {
  EXPECT_ERROR(
      CudaGraph(fused_, [](const Tensors&) {}),
      "CudaGraph: the optimizers' parameters are on cpu, for which LibTorch has no graphs. Move "
      "the model to a device that has them (CUDA, say)");
}

TEST_F(OneParameter, RefusesParametersOnSeveralDevices) {
  torchamp::FusedAdam elsewhere({torch::zeros({2}, torch::device(at::kMeta))});
  EXPECT_ERROR(CudaGraph({fused_, elsewhere}, [](const Tensors&) {}),
               "there are parameters on cpu and on meta, but a graph belongs to one device");
}

TEST_F(OneParameter, RefusesToCaptureNothing) {
  EXPECT_ERROR(CudaGraph(CudaGraph::Optimizers{}, [](const Tensors&) {}), "no optimizer");
}

TEST_F(OneParameter, RefusesToCaptureWithoutAWarmUp) {
  EXPECT_ERROR(stepping_graph({.warmup = 0}), "CudaGraph: warmup is 0. At least one");
}

TEST_F(OneParameter, RefusesInputsThatDoNotFitAndGoesOnAsBefore) {
  CudaGraph graph = stepping_graph({.warmup = 1});
  const at::Tensor fits = torch::ones({2});
  EXPECT_ERROR(graph({at::Tensor()}), "CudaGraph: input 0 is undefined");
  EXPECT_ERROR(graph({torch::ones({2}, torch::requires_grad())}), "input 0 requires grad");
  EXPECT_ERROR(graph({torch::ones({2}, torch::device(at::kMeta))}),
               "input 0 is on meta, but the optimizers' parameters are on cpu");
  graph({fits});
  graph({fits});
  const at::Tensor before = parameter_.detach().clone();
  EXPECT_ERROR(graph({fits, fits}), "2 inputs, but the first call had 1");
  EXPECT_ERROR(graph({torch::ones({3})}),
               "input 0 is Float[3], but in the first call it was Float[2]");
  EXPECT_ERROR(graph({torch::ones({2}, torch::kLong)}), "input 0 is Long[2]");
  EXPECT_TRUE(at::equal(before, parameter_));
  EXPECT_TRUE(graph.is_captured());
  graph({fits});
  EXPECT_FALSE(at::equal(before, parameter_));
}

TEST_F(OneParameter, NamesTheOpThatReadsTheDevice) {
  log_.watched = at::kCPU;  // as a GPU would be
  bool reads = true;
  torch::optim::SGDOptions plain(0.1);
  torchamp::FusedSGD optimizer({parameter_}, plain);
  CudaGraph graph(
      {optimizer},
      [&](const Tensors& batch) -> Tensors {
        if (reads && batch[0].sum().item<double>() < 0.) return {};
        return {batch[0] + 1};
      },
      {.warmup = 2}, repeating(log_));
  graph({torch::ones({2})});
  EXPECT_ERROR(graph({torch::ones({2})}),
               "CudaGraph: the iteration makes host and device wait for each other, which a graph "
               "cannot hold: aten::_local_scalar_dense (Tensor::item) on a tensor of shape []");
  EXPECT_FALSE(graph.is_captured());
  EXPECT_EQ(log_.records, 0);
  reads = false;  // and goes on when it is mended
  graph({torch::ones({2})});
  graph({torch::ones({2})});
  EXPECT_TRUE(graph.is_captured());
}

TEST_F(OneParameter, SaysWhyACaptureFailed) {
  log_.refuse = true;
  CudaGraph graph = stepping_graph({.warmup = 1});
  graph({torch::ones({2})});
  EXPECT_ERROR(graph({torch::ones({2})}),
               "CudaGraph: the iteration cannot be captured, though it ran eagerly 1 times");
  EXPECT_FALSE(graph.is_captured());
  log_.refuse = false;
  graph({torch::ones({2})});
  EXPECT_TRUE(graph.is_captured());
}

TEST_F(OneParameter, RefusesCheckpointsThatKeepTheRandomStateInTheFirstIteration) {
  bool preserve = true;
  torch::nn::Sequential layers(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  CudaGraph graph = graph_of([&](const Tensors& batch) {
    (void)torchamp::checkpoint_sequential(layers, parameter_, {.preserve_rng_state = preserve});
    (void)torchamp::checkpoint(
        {.preserve_rng_state = preserve}, [](const at::Tensor& x) { return x * 2; }, parameter_);
    return step(batch);
  });
  EXPECT_ERROR(graph({torch::ones({2})}),
               "checkpoint: the iteration of a CudaGraph cannot preserve the random state, which "
               "is on the host. Pass {.preserve_rng_state = false}");
  EXPECT_EQ(log_.records, 0);
  (void)torchamp::checkpoint([](const at::Tensor& x) { return x * 2; }, parameter_);  // outside
  preserve = false;
  for (int i = 0; i < 5; ++i) graph({torch::ones({2})});
  EXPECT_TRUE(graph.is_captured());
}

// ---- The order of things ------------------------------------------------------------------------

TEST_F(OneParameter, WarmsUpThenCapturesOnceAndReplays) {
  CudaGraph graph = stepping_graph({.warmup = 2});
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(graph.is_captured(), i > 2);
    graph({torch::ones({2})});
  }
  EXPECT_EQ(log_.runs, 2);
  EXPECT_EQ(log_.records, 1);
  EXPECT_EQ(log_.replays, 4);
}

TEST_F(OneParameter, HandsTheLatestInputsToTheBodyAtFixedAddresses) {
  std::vector<const void*> addresses;
  CudaGraph graph = graph_of(
      [&](const Tensors& batch) {
        addresses.push_back(batch[0].const_data_ptr());
        return step(batch);
      },
      {.warmup = 1});
  for (int i = 0; i < 4; ++i) {
    const Tensors& outputs = graph({torch::full({2}, i)});
    ASSERT_EQ(outputs.size(), 1);
    EXPECT_TRUE(at::equal(outputs[0], torch::full({2}, 2 * i)));
  }
  for (const void* address : addresses) EXPECT_EQ(address, addresses[0]);
}

TEST_F(OneParameter, ReturnsWhatTheBodyReturnsWithoutItsAutogradGraph) {
  CudaGraph nothing(fused_, [](const Tensors&) {}, {.enabled = false});
  EXPECT_TRUE(nothing({}).empty());
  CudaGraph one(fused_, [&](const Tensors&) { return parameter_ * 2; }, {.enabled = false});
  EXPECT_FALSE(one({})[0].requires_grad());
  CudaGraph several(fused_,
                    [&](const Tensors& batch) {
                      return Tensors{batch[0], at::Tensor()};
                    },
                    {.enabled = false});
  EXPECT_FALSE(several({parameter_})[1].defined());
}

TEST_F(OneParameter, RunsEagerlyOnAnyBatchWhenDisabled) {
  torch::optim::SGD ordinary({parameter_}, 0.1);
  int calls = 0;
  CudaGraph graph(ordinary,
                  [&](const Tensors& batch) {
                    ++calls;
                    return batch[0].sum();
                  },
                  {.enabled = false});
  EXPECT_EQ(graph({torch::ones({2})})[0].item<double>(), 2.);
  EXPECT_EQ(graph({torch::ones({3})})[0].item<double>(), 3.);
  EXPECT_EQ(calls, 2);
  EXPECT_FALSE(graph.is_captured());
}

TEST_F(OneParameter, TakesAnotherShapeAfterReset) {
  CudaGraph graph =
      graph_of([](const Tensors& batch) -> Tensors { return {batch[0].sum()}; }, {.warmup = 1});
  for (int i = 0; i < 3; ++i) graph({torch::ones({2})});
  graph.reset();
  EXPECT_FALSE(graph.is_captured());
  EXPECT_EQ(graph({torch::ones({3})})[0].item<double>(), 3.);
  EXPECT_EQ(graph({torch::ones({3})})[0].item<double>(), 3.);
  EXPECT_EQ(log_.records, 2);
  EXPECT_EQ(log_.runs, 2) << "it warms up again";
}

TEST_F(OneParameter, CopiesEveryInputInAgain) {
  CudaGraph graph = graph_of(
      [](const Tensors& batch) -> Tensors { return {batch[0] + 10 * batch[1]}; }, {.warmup = 1});
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(graph({torch::full({}, i), torch::full({}, i + 1)})[0].item<double>(), 11 * i + 10);
  }
}

TEST_F(OneParameter, AsksEveryOptimizerWhetherItHasChanged) {
  const at::Tensor other = torch::zeros({2}, torch::requires_grad());
  torchamp::FusedAdam last({other});
  CudaGraph graph(
      {fused_, last},
      [&](const Tensors& batch) {
        other.mutable_grad() = batch[0].clone();
        last.step();
        return step(batch);
      },
      {.warmup = 1}, repeating(log_));
  for (int i = 0; i < 3; ++i) graph({torch::ones({2})});
  EXPECT_EQ(log_.records, 1);
  static_cast<torch::optim::AdamOptions&>(fused_.param_groups()[0].options()).eps(1e-3);
  for (int i = 0; i < 3; ++i) graph({torch::ones({2})});
  EXPECT_EQ(log_.records, 2) << "the first of the two has changed";
}

TEST_F(OneParameter, DropsCastsThatWereMadeBeforeTheCaptureAndInIt) {
  const at::Tensor weight = torch::ones({2, 2}, torch::requires_grad());
  at::Tensor cast, inside, later;
  log_.at_record = [&] { inside = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU); };
  CudaGraph graph = graph_of([](const Tensors& batch) { return batch; }, {.warmup = 1});
  const torchamp::AutocastGuard outside(at::kCPU);
  graph({torch::ones({2})});
  cast = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
  EXPECT_TRUE(cast.is_same(at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU)));
  graph({torch::ones({2})});
  later = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
  EXPECT_FALSE(cast.is_same(inside)) << "made before the capture";
  EXPECT_FALSE(inside.is_same(later)) << "made in the capture";
}

/// A ScaledStep that knows nothing of captures.
class Plain : public torch::optim::SGD, public torchamp::ScaledStep {
 public:
  using SGD::SGD;
  at::Tensor step_scaled(const at::Tensor&, const at::Tensor&) override { return step(); }
};

/// A CapturedStep that counts its calls.
class Counting : public Plain, public torchamp::CapturedStep {
 public:
  using Plain::Plain;
  bool prepare_captured_step() override { return true; }
  bool may_be_captured() const override { return true; }
  void note_replayed_step() override { ++replayed; }
  int replayed = 0;
};

TEST_F(OneParameter, ReportsReplayedStepsToOptimizers) {
  Counting optimizer({parameter_}, 0.5);
  CudaGraph graph(
      {optimizer}, [](const Tensors& batch) { return batch; }, {.warmup = 2}, repeating(log_));
  const int told[] = {0, 0, 0, 1, 2};  // the capture calls the body, replays do not
  for (const int times : told) {
    graph({torch::ones({2})});
    EXPECT_EQ(optimizer.replayed, times);
  }
}

TEST_F(OneParameter, CapturesAnewWhenALearningRateChanged) {
  Plain optimizer({parameter_}, 0.5);
  CudaGraph graph(
      {optimizer},
      [&](const Tensors& batch) -> Tensors {
        parameter_.mutable_grad() = batch[0].clone();
        optimizer.step_scaled({}, {});
        return {};
      },
      {.warmup = 1}, repeating(log_));
  for (int i = 0; i < 3; ++i) graph({torch::ones({2})});
  EXPECT_EQ(log_.records, 1);
  static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).lr(2.);
  for (int i = 0; i < 3; ++i) graph({torch::ones({2})});
  EXPECT_EQ(log_.records, 2);
  EXPECT_EQ(log_.runs, 2);
  expect_close(parameter_, torch::full({2}, -3 * 0.5 - 3 * 2.));
}

}  // namespace
