// SPDX-License-Identifier: BSD-3-Clause
// Whole trainings through a CudaGraph: the same as eagerly, step by step.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/graph_training.h"

namespace {

// ---- The same as eagerly ------------------------------------------------------------------------

class OnDevice : public ::testing::TestWithParam<at::DeviceType> {};
INSTANTIATE_TEST_SUITE_P(CudaGraph, OnDevice, all_devices(), device_name);

TEST_P(OnDevice, AgreesWithTheEagerRunStepByStep) {
  SKIP_WITHOUT(GetParam());
  for (const char* kind : {"adam", "adamw", "sgd", "muon"}) {
    SCOPED_TRACE(kind);
    Training eager(GetParam(), kind), captured(GetParam(), kind);
    Repeater::Log log;
    const auto graph = graph_of_steps(captured, log);
    for (int i = 0; i < 24; ++i) {
      SCOPED_TRACE(i);
      const at::Tensor expected = eager.step(eager.batch(i));
      const at::Tensor actual = (*graph)(captured.batch(i))[0];
      expect_close(actual, expected);
      expect_equal_training(captured, eager);
    }
    EXPECT_TRUE(graph->is_captured());
    EXPECT_EQ(captured.calls, has_graphs(GetParam()) ? 4 : 24);
  }
}

TEST_P(OnDevice, FollowsAScaleSetByHand) {
  SKIP_WITHOUT(GetParam());
  Training eager(GetParam()), captured(GetParam());
  Repeater::Log log;
  const auto graph = graph_of_steps(captured, log);
  for (int i = 0; i < 12; ++i) {
    if (i == 6) {
      eager.scaler.update(64.);
      captured.scaler.update(64.);
    }
    step_both(eager, captured, *graph, i);
  }
}

TEST_P(OnDevice, DividesByTheScaleThatAnUpdateOutsideOfTheGraphHasSet) {
  SKIP_WITHOUT(GetParam());
  const at::Device here(GetParam(), GetParam() == at::kCPU ? -1 : 0);
  const at::Tensor w = at::ones({2}, here).requires_grad_();
  torchamp::FusedSGD sgd({w}, torch::optim::SGDOptions(0.5));
  torchamp::GradScaler scaler({.init_scale = 16., .growth_interval = 1});
  Repeater::Log log;
  const auto graph = make_graph(
      GetParam(), {sgd},
      [&](const Tensors& x) -> Tensors {
        sgd.zero_grad();
        scaler.scale((w * x[0]).sum()).backward();
        scaler.unscale_(sgd);
        return {w.grad().clone()};
      },
      log);
  for (int i = 0; i < 8; ++i) {
    const at::Tensor x = at::full({2}, 1. + i, here);
    EXPECT_TRUE(at::equal((*graph)({x})[0], x)) << "gradients of iteration " << i;
    scaler.update(std::exp2(5. + i));
  }
  if (!here.is_cpu()) c10::impl::VirtualGuardImpl(here.type()).synchronizeDevice(here.index());
}

TEST_P(OnDevice, FollowsALearningRateThatChangesAtEveryStep) {
  SKIP_WITHOUT(GetParam());
  for (const char* kind : {"adam", "sgd", "muon"}) {
    SCOPED_TRACE(kind);
    Training eager(GetParam(), kind), captured(GetParam(), kind);
    Repeater::Log log;
    const auto graph = graph_of_steps(captured, log);
    for (int i = 0; i < 12; ++i) {
      for (Training* training : {&eager, &captured}) {
        training->optimizer->param_groups()[0].options().set_lr(0.01 / (1 + i));
      }
      step_both(eager, captured, *graph, i);
    }
  }
}

TEST_P(OnDevice, GoesOnFromAnOptimizerStateThatWasLoaded) {
  SKIP_WITHOUT(GetParam());
  Training eager(GetParam()), captured(GetParam());
  Repeater::Log log;
  const auto graph = graph_of_steps(captured, log);
  std::stringstream saved;
  for (int i = 0; i < 16; ++i) {
    if (i == 5 || i == 10) {
      // What is saved in the middle of replays counts them.
      std::stringstream eager_saved, captured_saved;
      torch::save(*eager.optimizer, eager_saved);
      torch::save(*captured.optimizer, captured_saved);
      if (i == 5) saved << eager_saved.str();
      torchamp::FusedAdam read(captured.net->parameters());
      torch::load(read, captured_saved);
      const auto& expected = static_cast<const torch::optim::AdamParamState&>(
          *static_cast<torchamp::FusedAdam&>(*eager.optimizer).state().begin()->second);
      const auto& actual =
          static_cast<const torch::optim::AdamParamState&>(*read.state().begin()->second);
      EXPECT_EQ(actual.step(), expected.step());
    }
    if (i == 12) {
      for (Training* training : {&eager, &captured}) {
        std::stringstream again(saved.str());
        torch::load(*training->optimizer, again);
      }
    }
    step_both(eager, captured, *graph, i);
  }
}

TEST_P(OnDevice, TakesAStateFromTheHostForNoReadOfTheIteration) {
  SKIP_WITHOUT(GetParam());
  Training training(GetParam());
  Repeater::Log log;
  if (GetParam() != at::kCPU) log.watched = GetParam();
  const auto graph = graph_of_steps(training, log);
  std::stringstream saved;
  for (int i = 0; i < 4; ++i) (*graph)(training.batch(2));
  EXPECT_TRUE(graph->is_captured());
  torch::save(*training.optimizer, saved);
  torch::load(*training.optimizer, saved);
  auto& adam = static_cast<torchamp::FusedAdam&>(*training.optimizer);
  for (auto& [param, state] : adam.state()) {
    auto& moments = static_cast<torch::optim::AdamParamState&>(*state);
    moments.exp_avg(moments.exp_avg().cpu());
    moments.exp_avg_sq(moments.exp_avg_sq().cpu());
  }
  for (int i = 0; i < 3; ++i) (*graph)(training.batch(2));
  EXPECT_TRUE(graph->is_captured());
}

TEST_P(OnDevice, HoldsAWholeWindowOfAccumulation) {
  SKIP_WITHOUT(GetParam());
  Training eager(GetParam()), captured(GetParam());
  const auto window = [](Training& training, const Tensors& batches) {
    training.optimizer->zero_grad();
    at::Tensor sum;
    for (std::size_t i = 0; i < batches.size(); i += 2) {
      at::Tensor loss;
      {
        const torchamp::AutocastGuard autocast(training.device.type());
        loss = torch::mse_loss(training.net->forward(batches[i]), batches[i + 1]) / 2;
      }
      training.scaler.scale(loss).backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    training.scaler.step(*training.optimizer);
    training.scaler.update();
    return sum;
  };
  Repeater::Log log;
  const auto graph = make_graph(
      GetParam(), {*captured.optimizer},
      [&](const Tensors& batches) { return window(captured, batches); }, log);
  for (int i = 0; i < 8; ++i) {
    Tensors batches = eager.batch(i);
    for (const at::Tensor& tensor : eager.batch(i + 1)) batches.push_back(tensor);
    const at::Tensor expected = window(eager, batches);
    expect_close((*graph)(batches)[0], expected);
    expect_equal_training(captured, eager);
  }
}

TEST_P(OnDevice, HoldsSeveralOptimizers) {
  SKIP_WITHOUT(GetParam());
  Training eager(GetParam()), captured(GetParam());
  const auto split = [](Training& training) {
    const auto parameters = training.net->parameters();
    return std::pair(std::make_unique<torchamp::FusedSGD>(
                         std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 2),
                         torch::optim::SGDOptions(0.1)),
                     std::make_unique<torchamp::FusedAdam>(
                         std::vector<at::Tensor>(parameters.begin() + 2, parameters.end())));
  };
  const auto step = [](Training& training, auto& optimizers, const Tensors& batch) {
    at::Tensor loss;
    {
      const torchamp::AutocastGuard autocast(training.device.type());
      loss = torch::mse_loss(training.net->forward(batch[0]), batch[1]);
    }
    training.net->zero_grad();
    training.scaler.scale(loss).backward();
    training.scaler.step(*optimizers.first);
    training.scaler.step(*optimizers.second);
    training.scaler.update();
    return loss;
  };
  auto eager_optimizers = split(eager), captured_optimizers = split(captured);
  const auto body = [&](const Tensors& batch) -> Tensors {
    return {step(captured, captured_optimizers, batch)};
  };
  Repeater::Log log;
  const auto graph =
      make_graph(GetParam(), {*captured_optimizers.first, *captured_optimizers.second}, body, log);
  for (int i = 0; i < 10; ++i) {
    step(eager, eager_optimizers, eager.batch(i));
    (*graph)(captured.batch(i));
    expect_equal_training(captured, eager);
  }
}

// ---- Where there are graphs ---------------------------------------------------------------------

using WithGraphs = CapturedTraining;
INSTANTIATE_TEST_SUITE_P(CudaGraph, WithGraphs, ::testing::Values(at::kCUDA, at::kPrivateUse1),
                         device_name);

class CountedGraph : public WithGraphs {};

INSTANTIATE_TEST_SUITE_P(CudaGraph, CountedGraph, simulated_device(), device_name);

TEST_P(WithGraphs, TakesInputsFromTheHost) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured);
  for (int i = 0; i < 8; ++i) {
    const Tensors batch = eager.batch(i);
    eager.step(batch);
    (*graph)({batch[0].cpu().pin_memory(), batch[1].cpu()});
    expect_equal_training(captured, eager);
  }
}

TEST_P(WithGraphs, FindsReadsAndCopiesBeforeTheCapture) {
  Training training(GetParam());
  const auto expect_found = [&](auto access, const char* text) {
    const auto graph = graph_of(*training.optimizer,
                                [&](const Tensors& batch) {
                                  access(batch);
                                  return training.step(batch);
                                },
                                {.warmup = 1});
    EXPECT_ERROR((*graph)(training.batch(0)), text);
    EXPECT_FALSE(graph->is_captured());
  };
  expect_found([](const Tensors& batch) { batch[0].sum().item<float>(); }, "Tensor::item");
  expect_found([](const Tensors& batch) { batch[0].cpu(); }, "from the device to the host");
  expect_found([](const Tensors& batch) { torch::ones({2}).to(batch[0].device()); },
               "from the host to the device");
  expect_found([](const Tensors& batch) { batch[0].nonzero(); }, "aten::nonzero");
  expect_found([](const Tensors& batch) { batch[0].index({batch[0] > 0}); }, "aten::nonzero");
}

TEST_P(WithGraphs, RecoversFromAnExceptionInTheCapture) {
  Training eager(GetParam()), captured(GetParam());
  bool fails = true;
  const auto graph = graph_of(*captured.optimizer,
                              [&](const Tensors& batch) {
                                at::Tensor loss = captured.step(batch);
                                if (captured.calls == 3 && std::exchange(fails, false))
                                  throw std::runtime_error("mine");
                                return loss;
                              },
                              {.warmup = 2});
  for (int i = 0; i < 10; ++i) {
    if (i == 2) {
      EXPECT_THROW((*graph)(captured.batch(i)), std::runtime_error);
    }
    step_both(eager, captured, *graph, i);
  }
  EXPECT_TRUE(graph->is_captured());
}

TEST_P(WithGraphs, IsRightWithinAGuardThatStaysOpen) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured);
  for (int i = 0; i < 10; ++i) eager.step(eager.batch(i));
  const torchamp::AutocastGuard outside(GetParam(), {.enabled = false});
  for (int i = 0; i < 10; ++i) (*graph)(captured.batch(i));
  expect_equal_training(captured, eager);
}

TEST_P(WithGraphs, DrawsNewRandomNumbersInEachReplay) {
  Training training(GetParam());
  const auto graph = graph_of(*training.optimizer,
                              [&](const Tensors& batch) {
                                training.step(batch);
                                return torch::rand({4}, torch::device(GetParam()));
                              },
                              {.warmup = 1});
  (*graph)(training.batch(0));
  const at::Tensor first = (*graph)(training.batch(1))[0].clone();
  const at::Tensor second = (*graph)(training.batch(2))[0].clone();
  EXPECT_FALSE(at::equal(first, second));
}

TEST_P(WithGraphs, GivesItsMemoryBack) {
  Training training(GetParam());
  for (int i = 0; i < 3; ++i) {
    const auto graph = graph_of(training, {.warmup = 1});
    for (int step = 0; step < 4; ++step) (*graph)(training.batch(step));
  }
  Training eager(GetParam());  // the model is whole without its graph
  EXPECT_NO_THROW(training.step(training.batch(0)));
  EXPECT_TRUE(training.net->parameters()[0].isfinite().all().item<bool>());
}

TEST_P(WithGraphs, WarmsUpOnTheStreamThatItCapturesOn) {
  Training training(GetParam());
  const c10::Stream caller = backend().getStream(training.device);
  std::vector<c10::Stream> streams;
  const auto graph = graph_of(*training.optimizer, [&](const Tensors& batch) {
    streams.push_back(backend().getStream(training.device));
    return training.step(batch);
  });
  for (int i = 0; i < 5; ++i) (*graph)(training.batch(i));
  ASSERT_EQ(streams.size(), 4);
  for (const c10::Stream stream : streams) {
    EXPECT_EQ(stream, streams[0]);
    EXPECT_NE(stream, caller);
  }
}

TEST_P(WithGraphs, SkipsWhatOverflowsOnlyWhenDividedByAScaleThatReplaysHaveLowered) {
  const auto run = [&](double init_scale, int lowered, bool captures) {
    const at::Tensor weight = torch::ones({}, here()).requires_grad_();
    torchamp::FusedSGD optimizer({weight}, torch::optim::SGDOptions(0.125));
    torchamp::GradScaler scaler({.init_scale = init_scale});
    int calls = 0;
    const auto graph = graph_of(optimizer,
                                [&](const Tensors& batch) {
                                  ++calls;
                                  optimizer.zero_grad();
                                  const at::Tensor loss = (weight * batch[0]).sum();
                                  scaler.scale(loss).backward();
                                  scaler.step(optimizer);
                                  scaler.update();
                                  return loss;
                                },
                                {.warmup = 1, .enabled = captures});
    for (int i = 0; i < lowered + 4; ++i) {
      const bool lowers = i > 1 && i < lowered + 2;  // to 1/16
      const float value = lowers ? std::numeric_limits<float>::infinity() : i < 2 ? 1.F : 2e38F;
      (*graph)({torch::full({4}, value, here())});
    }
    if (captures) {
      EXPECT_EQ(calls, 2) << "a warm-up and one capture";
    }
    return std::pair(weight.item<float>(), scaler.get_scale());
  };
  for (const auto& [init_scale, lowered] : {std::pair(2., 5), std::pair(1024., 14)}) {
    const auto expected = run(init_scale, lowered, false);
    EXPECT_EQ(run(init_scale, lowered, true), expected);
    EXPECT_TRUE(std::isfinite(expected.first));
  }
}

TEST_P(WithGraphs, KeepsItsCaptureWhateverScaleIsSetByHand) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured, {.warmup = 1});
  for (int i = 0; i < 18; ++i) {
    for (Training* training : {&eager, &captured}) {
      if (i == 4) training->scaler.update(0x1p40);
      if (i == 8) training->scaler.update(0.25);
      if (i == 12) training->scaler.update(torch::full({}, 4096., here()));
    }
    eager.step(eager.batch(2));
    (*graph)(captured.batch(2));
    expect_equal_training(captured, eager);
  }
  EXPECT_EQ(captured.calls, 2) << "a warm-up and one capture";
}

TEST_P(WithGraphs, IsNotCapturedAnewThoughTheHostRunsAheadOfTheDevice) {
  const at::Tensor weight = torch::ones({}, here()).requires_grad_();
  torchamp::FusedSGD optimizer({weight}, torch::optim::SGDOptions(0.125));
  torchamp::GradScaler scaler({.growth_interval = 3, .max_scale = 0x1p18});
  int calls = 0;
  const auto graph = graph_of(optimizer,
                              [&](const Tensors&) -> Tensors {
                                ++calls;
                                optimizer.zero_grad();
                                scaler.scale(weight * 2).backward();
                                torchamp::clip_grad_norm_(scaler, optimizer, 0.5);
                                scaler.step(optimizer);
                                scaler.update();
                                return {};
                              },
                              {.warmup = 1});
  const simulated::Counts counts;
  for (int i = 0; i < 80; ++i) (*graph)({});
  EXPECT_EQ(calls, 2);
  if (GetParam() == at::kPrivateUse1) {
    EXPECT_LE(counts.now().waits, 1) << "of the capture";
  }
  EXPECT_EQ(scaler.get_scale(), 0x1p18);
  EXPECT_NEAR(weight.item<float>(), 1. - 80 * 0.0625, 1e-4);
}

TEST_P(CountedGraph, AReplayIsOneLaunchWithoutWaitsAndCopiesOverTheHost) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured);
  for (int i = 0; i < 4; ++i) {
    eager.step(eager.batch(2));
    (*graph)(captured.batch(2));
  }
  const Tensors batch = captured.batch(2);
  const simulated::Counts of_eager;
  eager.step(batch);
  const auto expected = of_eager.now();
  const simulated::Counts of_replay;
  (*graph)(batch);
  const auto counts = of_replay.now();
  EXPECT_EQ(counts.graph_launches, 1);
  EXPECT_EQ(counts.waits + counts.host_to_device + counts.device_to_host, 0);
  EXPECT_GE(counts.kernels, expected.kernels + 2) << "two inputs are copied in";
  EXPECT_LE(counts.kernels, expected.kernels + 3) << "and skips are counted at once";
}

TEST_P(CountedGraph, GivesItsMemoryBackAtReset) {
  Training training(GetParam());
  const auto graph = graph_of(training, {.warmup = 1});
  (*graph)(training.batch(0));
  training.optimizer->zero_grad();
  graph->reset();
  const std::size_t before = simulated::bytes_in_use(0);
  for (int i = 0; i < 2; ++i) (*graph)(training.batch(i));
  const Tensors& outputs = (*graph)(training.batch(2));
  EXPECT_GT(simulated::bytes_in_use(0), before);
  training.optimizer->zero_grad();
  graph->reset();
  EXPECT_TRUE(outputs.empty());
  EXPECT_EQ(simulated::bytes_in_use(0), before);
  for (int i = 0; i < 3; ++i) (*graph)(training.batch(i));
  EXPECT_TRUE(graph->is_captured());
}

}  // namespace
