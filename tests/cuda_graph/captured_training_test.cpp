// SPDX-License-Identifier: BSD-3-Clause
// The promises about captured training, on devices with graphs: on the simulated device bit for
// bit.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/graph_training.h"
#include "support/optimizer_kinds.h"
#include "support/seed.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/labs/weights_together.h"
#include "torchamp/master_weights.h"
#include "torchamp/recompute.h"
#include "torchamp/weight_cache.h"

namespace {

INSTANTIATE_TEST_SUITE_P(CudaGraph, CapturedTraining,
                         ::testing::Values(at::kCUDA, at::kPrivateUse1), device_name);

// ---- The same as eagerly ------------------------------------------------------------------------

TEST_P(CapturedTraining, GivesTheWeightsAndTheScaleOfEagerIterations) {
  for (const char* kind : {"adam", "adamw", "sgd"}) {
    SCOPED_TRACE(kind);
    Training eager(GetParam(), kind), captured(GetParam(), kind);
    const auto graph = graph_of(captured);
    for (int i = 0; i < 14; ++i) {
      SCOPED_TRACE(i);
      const at::Tensor expected = eager.step(eager.batch(i));
      expect_same((*graph)(captured.batch(i))[0], expected);
      expect_same(captured, eager);
    }
    EXPECT_EQ(captured.calls, 4) << "replays do not run the body";
  }
}

TEST_P(CapturedTraining, CastsWeightsTogether) {
  Training eager(GetParam()), captured(GetParam());
  captured.cache = torchamp::weights_together();
  const auto graph = graph_of(captured);
  for (int i = 0; i < 9; ++i) {
    SCOPED_TRACE(i);
    const at::Tensor expected = eager.step(eager.batch(i));
    expect_same(i == 6 ? captured.step(captured.batch(i)) : (*graph)(captured.batch(i))[0],
                expected);
    expect_same(captured, eager);
  }
  EXPECT_EQ(captured.calls, 5) << "three warm-ups, a capture and an eager step";
}

TEST_P(CapturedTraining, IsCapturedAgainAfterTrainAndEvalOfAModelThatItKnows) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured, {.warmup = 1, .models = {captured.net}});
  for (int i = 0; i < 9; ++i) {
    SCOPED_TRACE(i);
    if (i == 3 || i == 6) {
      for (Training* training : {&eager, &captured}) training->net->train(i == 6);
    }
    eager.step(eager.batch(0));
    (*graph)(captured.batch(0));
    expect_same(captured, eager);
  }
  EXPECT_EQ(captured.calls, 2 + 2 + 2);
}

TEST_P(CapturedTraining, RefusesAModelThatIsNull) {
  Training training(GetParam());
  EXPECT_ERROR(graph_of(training, {.models = {std::shared_ptr<torch::nn::Module>()}}),
               "a pointer in .models is null");
}

TEST_P(CapturedTraining, MakesItsProductsInFp8AsEagerIterationsDo) {
  Training eager(GetParam()), captured(GetParam()), in_16_bits(GetParam());
  eager.policy =
      torchamp::fp8(torchamp::Policy::standard(), torchamp::ops::dense, {.strict = true});
  captured.policy = eager.policy;
  const auto graph = graph_of(captured);
  for (int i = 0; i < 9; ++i) {
    SCOPED_TRACE(i);
    const at::Tensor expected = eager.step(eager.batch(i));
    expect_same((*graph)(captured.batch(i))[0], expected);
    expect_same(captured, eager);
    in_16_bits.step(in_16_bits.batch(i));
  }
  EXPECT_EQ(captured.calls, 4) << "replays do not run the body";
  EXPECT_FALSE(at::equal(eager.net->parameters()[0].cpu(), in_16_bits.net->parameters()[0].cpu()));
}

TEST_P(CapturedTraining, StepsEveryKindOfFusedOptimizer) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    // Its kernel takes no learning rate on the device there, so a captured one has other roundings.
    if (TORCH_VERSION_MINOR < 8 && std::string_view(kind.name).starts_with("adagrad")) continue;
    const auto run = [&](bool captures) {
      seed_all(5);
      const Params params{param({4}, here()), param({2, 3}, here())};
      const auto optimizer = kind.fused({OptimizerParamGroup(params)});
      optimizer->param_groups()[0].options().set_lr(Training::lr);
      torchamp::GradScaler scaler({.init_scale = 4., .growth_interval = 2});
      const auto step = [&](const Tensors& batch) -> Tensors {
        optimizer->zero_grad();
        scaler.scale((params[0] * batch[0]).sum() + (params[1] * params[1]).sum()).backward();
        torchamp::clip_grad_norm_(scaler, *optimizer, 0.7);
        scaler.step(*optimizer);
        scaler.update();
        return {};
      };
      const auto graph = graph_of(*optimizer, step, {.warmup = 1, .enabled = captures});
      for (int i = 0; i < 9; ++i) {
        const float skipped = i == 0 || i == 4 ? std::numeric_limits<float>::infinity() : 0.F;
        const Tensors batch{torch::full({4}, 0.5F * static_cast<float>(i) + skipped, here())};
        if (i < 7) {
          (*graph)(batch);
        } else {
          step(batch);  // with the moments and the step counts that replays have left
        }
      }
      EXPECT_EQ(graph->is_captured(), captures);
      backend().synchronizeDevice(0);
      return params;
    };
    expect_same(run(true), run(false));
  }
}

TEST_P(CapturedTraining, GoesOnWithTheRandomNumbersOfEagerIterations) {
  const auto run = [&](bool captures) {
    seed_all(23);
    const at::Tensor weight = torch::ones({64}, here()).requires_grad_();
    torchamp::FusedSGD optimizer({weight}, SGDOptions(0.125));
    Tensors masks;
    const auto graph = graph_of(optimizer,
                                [&](const Tensors&) -> Tensors {
                                  optimizer.zero_grad();
                                  const at::Tensor out =
                                      torch::dropout(weight, 0.5, /*train=*/true);
                                  out.sum().backward();
                                  optimizer.step();
                                  return {out, torch::rand({3}, here())};
                                },
                                {.warmup = 2, .enabled = captures});
    for (int i = 0; i < 6; ++i) {
      const Tensors& outputs = (*graph)({});
      masks.push_back(outputs[0].ne(0).clone());
      masks.push_back(outputs[1].clone());
      if (i == 3) masks.push_back(torch::rand({3}, here()));  // between two replays
    }
    masks.push_back(weight.detach());
    return masks;
  };
  const Tensors captured = run(true);
  expect_same(captured, run(false));
  for (std::size_t i = 0; i + 4 < captured.size(); i += 2) {
    if (captured[i].sizes() != captured[i + 2].sizes()) break;
    EXPECT_FALSE(at::equal(captured[i].cpu(), captured[i + 2].cpu())) << i;
  }
}

TEST_P(CapturedTraining, ClipsDividedGradientsAndReturnsTheirNorm) {
  const auto run = [&](bool captures) {
    Training training(GetParam());
    const auto parameters = training.net->parameters();
    std::vector<at::Tensor> norms;
    const auto graph = graph_of(
        *training.optimizer,
        [&](const Tensors& batch) {
          training.optimizer->zero_grad();
          const at::Tensor loss = torch::mse_loss(training.net->forward(batch[0]), batch[1]);
          training.scaler.scale(loss).backward();
          training.scaler.unscale_(*training.optimizer);
          const at::Tensor norm = torchamp::clip_grad_norm_(parameters, 0.3);
          torchamp::clip_grad_value_(parameters, 0.1);
          training.scaler.step(*training.optimizer);
          training.scaler.update();
          return norm;
        },
        {.enabled = captures});
    for (int i = 0; i < 7; ++i) norms.push_back((*graph)(training.batch(i))[0].clone());
    norms.erase(norms.begin() + 3);  // an overflow's
    for (const at::Tensor& p : parameters) norms.push_back(p.detach());
    return norms;
  };
  expect_same(run(true), run(false));
}

TEST_P(CapturedTraining, StepsMasterWeights) {
  using torchamp::MasterStorage;
  const auto run = [&](const torchamp::MasterWeightsOptions& how, bool captures) {
    seed_all(3);
    torch::nn::Linear model(6, 2);
    to_device(model, c10::Device(GetParam(), 0));
    torchamp::MasterWeights masters(model, how);
    torchamp::FusedAdam optimizer(masters.parameters(), AdamOptions(Training::lr));
    torchamp::GradScaler scaler({.init_scale = 64., .growth_interval = 2});
    const auto graph = graph_of(optimizer,
                                [&](const Tensors& batch) {
                                  const at::Tensor loss =
                                      model->forward(batch[0]).to(at::kFloat).square().mean();
                                  scaler.scale(loss).backward();
                                  if (!how.main_gradients) masters.take_gradients();
                                  scaler.step(optimizer);
                                  scaler.update();
                                  masters.copy_to_model();
                                  optimizer.zero_grad();
                                  return loss;
                                },
                                {.enabled = captures});
    std::vector<at::Tensor> results;
    for (int i = 0; i < 8; ++i) {
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(40 + i);
      const at::Tensor x = at::randn({3, 6}, generator).to(how.dtype).to(GetParam());
      results.push_back((*graph)({x})[0].clone());
    }
    EXPECT_EQ(graph->is_captured(), captures);
    for (const at::Tensor& p : model->parameters()) results.push_back(p.detach());
    for (const at::Tensor& p : masters.parameters()) results.push_back(p.detach());
    return results;
  };
  for (const bool main_gradients : {false, true}) {
    for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
      const bool splits = storage == MasterStorage::split;
      const torchamp::MasterWeightsOptions how{.dtype = splits ? at::kBFloat16 : at::kHalf,
                                               .storage = storage,
                                               .main_gradients = main_gradients};
      expect_same(run(how, true), run(how, false));
    }
  }
}

TEST_P(CapturedTraining, RecomputesActivationsWithoutTheRandomState) {
  const auto run = [&](bool captures) {
    Training training(GetParam());
    const auto graph =
        graph_of(*training.optimizer,
                 [&](const Tensors& batch) {
                   training.optimizer->zero_grad();
                   at::Tensor loss;
                   {
                     const torchamp::AutocastGuard autocast(GetParam());
                     const at::Tensor out = torchamp::checkpoint(
                         {.preserve_rng_state = false},
                         [&](const at::Tensor& x) {
                           return training.net[0]->as<torch::nn::Linear>()->forward(x).tanh();
                         },
                         batch[0]);
                     loss = out.to(at::kFloat).square().mean();
                   }
                   training.scaler.scale(loss).backward();
                   training.scaler.step(*training.optimizer);
                   training.scaler.update();
                   return loss;
                 },
                 {.enabled = captures});
    std::vector<at::Tensor> results;
    for (int i = 0; i < 7; ++i) results.push_back((*graph)(training.batch(i))[0].clone());
    for (const at::Tensor& p : training.net->parameters()) results.push_back(p.detach());
    return results;
  };
  expect_same(run(true), run(false));
}

TEST_P(CapturedTraining, RefusesCheckpointsThatKeepTheRandomState) {
  Training training(GetParam());
  const auto graph = graph_of(*training.optimizer, [&](const Tensors& batch) {
    (void)torchamp::checkpoint([](const at::Tensor& x) { return x * 2; }, batch[0]);
    return training.step(batch);
  });
  EXPECT_ERROR((*graph)(training.batch(0)),
               "checkpoint: the iteration of a CudaGraph cannot preserve the random state");
}

// ---- What the host changes ----------------------------------------------------------------------

TEST_P(CapturedTraining, FollowsLearningRatesWithoutAnotherCaptureAndOtherOptionsWithOne) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured, {.warmup = 1});
  for (int i = 0; i < 12; ++i) {
    for (Training* training : {&eager, &captured}) {
      auto& options = static_cast<AdamOptions&>(training->optimizer->param_groups()[0].options());
      options.lr(std::ldexp(1., -6 - i % 3));
      if (i == 6) options.betas(Betas(0.5, 0.6));
    }
    eager.step(eager.batch(i));
    (*graph)(captured.batch(i));
    expect_same(captured, eager);
    EXPECT_EQ(captured.calls, i < 6 ? std::min(i + 1, 2) : std::min(i - 3, 4)) << i;
  }
}

TEST_P(CapturedTraining, TakesAScaleSetByHandButNotAScalersOptions) {
  Training eager(GetParam()), captured(GetParam());
  const auto graph = graph_of(captured, {.warmup = 1});
  for (int i = 0; i < 12; ++i) {
    if (i == 4) {
      for (Training* training : {&eager, &captured}) training->scaler.update(32.);
    }
    if (i == 5) captured.scaler.set_growth_factor(1.5);  // as documented: not seen by replays
    eager.step(eager.batch(i));
    (*graph)(captured.batch(i));
    EXPECT_EQ(captured.scaler.get_scale(), eager.scaler.get_scale()) << i;
  }
}

// ---- Its memory ---------------------------------------------------------------------------------

TEST_P(CapturedTraining, KeepsItsMemoryFromOthersAndOverwritesItsOutputs) {
  Training training(GetParam());
  const auto graph = graph_of(training, {.warmup = 1});
  for (int i = 0; i < 2; ++i) (*graph)(training.batch(i));
  const at::Tensor output = (*graph)(training.batch(2))[0];
  const at::Tensor kept = output.clone();
  std::vector<at::Tensor> others;
  for (int64_t size = 1; size < 200; size += 3) others.push_back(torch::ones({size}, here()));
  const at::Tensor again = (*graph)(training.batch(4))[0];
  EXPECT_EQ(again.const_data_ptr(), output.const_data_ptr());
  EXPECT_FALSE(at::equal(output.cpu(), kept.cpu()));
  for (const at::Tensor& other : others) EXPECT_TRUE(other.cpu().eq(1).all().item<bool>());
}

TEST_P(CapturedTraining, TwoGraphsTakeTurnsAndDieInEitherOrder) {
  for (const bool first_dies_first : {false, true}) {
    Training eager[] = {Training(GetParam()), Training(GetParam(), "sgd")};
    Training captured[] = {Training(GetParam()), Training(GetParam(), "sgd")};
    std::unique_ptr<CudaGraph> graphs[] = {graph_of(captured[0]), graph_of(captured[1])};
    const auto step = [&](std::size_t which, int i) {
      eager[which].step(eager[which].batch(i));
      (*graphs[which])(captured[which].batch(i));
      expect_same(captured[which], eager[which]);
    };
    for (int i = 0; i < 7; ++i) {
      step(0, i);
      step(1, i + 1);
    }
    graphs[first_dies_first ? 0 : 1] = nullptr;
    for (int i = 7; i < 10; ++i) step(first_dies_first ? 1 : 0, i);
  }
}

TEST_P(CapturedTraining, LeavesAModelThatGoesOnWithoutItsGraph) {
  Training eager(GetParam()), captured(GetParam());
  for (int round = 0; round < 2; ++round) {
    auto graph = graph_of(captured, {.warmup = 1});
    for (int i = 0; i < 4; ++i) {
      eager.step(eager.batch(i));
      (*graph)(captured.batch(i));
    }
    graph = nullptr;
    eager.step(eager.batch(4));
    captured.step(captured.batch(4));
    expect_same(captured, eager);
  }
}

// ---- Devices, streams and threads ---------------------------------------------------------------

TEST_P(CapturedTraining, CapturesOnTheParametersDeviceWhateverTheCurrentOne) {
  if (backend().deviceCount() < 2) GTEST_SKIP() << "there is one device only";
  const c10::Device devices[] = {{GetParam(), 0}, {GetParam(), 1}};
  Training eager[] = {Training(devices[0]), Training(devices[1])};
  Training captured[] = {Training(devices[0]), Training(devices[1])};
  std::unique_ptr<CudaGraph> graphs[] = {graph_of(captured[0]), graph_of(captured[1])};
  for (int i = 0; i < 7; ++i) {
    for (const std::size_t which : {0U, 1U}) {
      const c10::DeviceGuard elsewhere(devices[i % 2]);
      eager[which].step(eager[which].batch(i));
      (*graphs[which])(captured[which].batch(i));
      EXPECT_EQ(backend().getDevice(), devices[i % 2]);
      expect_same(captured[which], eager[which]);
    }
  }
}

TEST_P(CapturedTraining, RunsOnTheCallersStreamAndGivesItBack) {
  const c10::Device device(GetParam(), 0);
  const c10::Stream own = backend().getNewStream(device);
  backend().synchronizeDevice(0);
  const c10::StreamGuard on_own(own);
  Training eager(device), captured(device);
  const auto graph = graph_of(captured, {.warmup = 2});
  for (int i = 0; i < 7; ++i) {
    eager.step(eager.batch(i));
    (*graph)(captured.batch(i));
    EXPECT_EQ(backend().getStream(device), own);
    expect_same(captured, eager);
  }
}

TEST_P(CapturedTraining, LetsAnotherStreamOfAnotherThreadWorkDuringTheCapture) {
  const c10::Device device(GetParam(), 0);
  Training eager(device), captured(device);
  std::optional<double> seen;
  const auto graph =
      graph_of(*captured.optimizer,
               [&](const Tensors& batch) {
                 if (captured.calls == 2) {  // the capture
                   std::async(std::launch::async, [&] {
                     const c10::StreamGuard elsewhere(backend().getNewStream(device));
                     const at::Tensor ones = torch::ones({16}, here());
                     seen = (ones + ones).sum().item<double>();  // may wait, too
                   }).get();
                 }
                 return captured.step(batch);
               },
               {.warmup = 2});
  for (int i = 0; i < 6; ++i) {
    eager.step(eager.batch(i));
    (*graph)(captured.batch(i));
    expect_same(captured, eager);
  }
  EXPECT_EQ(seen, 32.);
}

}  // namespace
