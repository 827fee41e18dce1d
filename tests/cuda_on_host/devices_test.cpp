// SPDX-License-Identifier: BSD-3-Clause
// Two devices in one process: training over both equals training on one, whichever is current.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda_on_host/stand_in.h"
#include "support/expect_error.h"
#include "support/optimizer_kinds.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/master_weights.h"
#include "torchamp/recompute.h"
#include "torchamp/torchamp.h"
#include "torchamp/training_checkpoint.h"

namespace {

const at::Device gpu0(at::kCUDA, 0), gpu1(at::kCUDA, 1);

/// Two layers, on different devices or both on the same.
struct LayersImpl : torch::nn::Module {
  LayersImpl(at::Device a, at::Device b) : lower(4, 8), upper(8, 2), of_lower(a), of_upper(b) {
    torch::manual_seed(7);
    for (const Tensor& p : lower->parameters()) p.detach().uniform_(-0.5, 0.5);
    for (const Tensor& p : upper->parameters()) p.detach().uniform_(-0.5, 0.5);
    lower->to(a);
    upper->to(b);
    register_module("lower", lower);
    register_module("upper", upper);
  }
  Tensor forward(const Tensor& x) {
    const auto run = [this](const Tensor& in) {
      return upper->forward(at::relu(lower->forward(in)).to(of_upper));
    };
    const Tensor in = x.to(of_lower, lower->weight.scalar_type());
    return recomputes ? torchamp::checkpoint(run, in) : run(in);
  }
  torch::nn::Linear lower, upper;
  at::Device of_lower, of_upper;
  bool recomputes = false;
};
TORCH_MODULE(Layers);

struct Way {
  std::string name;
  bool masters = false, recomputes = false, clips = true, unscales = false;
  torchamp::MasterStorage storage = torchamp::MasterStorage::full;
};
std::ostream& operator<<(std::ostream& out, const Way& way) {
  return out << way.name;
}

/// The parameters after five iterations, the third of which overflows in the lower layer.
Params train(at::Device a, at::Device b, const Kind& kind, const Way& way) {
  Layers model(a, b);
  model->recomputes = way.recomputes;
  std::optional<torchamp::MasterWeights> masters;
  if (way.masters) {
    masters.emplace(model,
                    torchamp::MasterWeightsOptions{.dtype = at::kBFloat16, .storage = way.storage});
  }
  const auto optimizer =
      kind.fused({OptimizerParamGroup(masters ? masters->parameters() : model->parameters())});
  torchamp::GradScaler scaler({.init_scale = 256.});
  for (int i = 0; i < 5; ++i) {
    const Tensor x = at::arange(12, at::kFloat).view({3, 4}).mul(0.1 * (i + 1));
    masters ? masters->zero_grad() : optimizer->zero_grad();
    Tensor loss;
    {
      torchamp::AutocastGuard autocast(at::kCUDA, at::kBFloat16);
      loss = model->forward(x).to(at::kFloat).pow(2).mean();
    }
    scaler.scale(loss).backward();
    if (i == 2) model->lower->weight.mutable_grad().mul_(INFINITY);
    if (masters) masters->take_gradients();
    if (way.unscales) {
      scaler.unscale_(*optimizer);
      torchamp::clip_grad_norm_(optimizer->param_groups()[0].params(), 0.1);
    } else if (way.clips) {
      torchamp::clip_grad_norm_(scaler, *optimizer, 0.1);
    }
    EXPECT_EQ(scaler.step(*optimizer).stepped(), i != 2);
    scaler.update();
    if (masters) masters->copy_to_model();
  }
  EXPECT_EQ(scaler.get_scale(), 128.);
  Params all;
  for (const Tensor& p : masters ? masters->parameters() : model->parameters()) {
    all.push_back(p.detach().cpu());
  }
  return all;
}

class TwoDevices : public testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, TwoDevices,
                         testing::Values(Way{"Plain"},
                                         Way{.name = "WithoutClipping", .clips = false},
                                         Way{.name = "Masters", .masters = true},
                                         Way{.name = "SplitMasters",
                                             .masters = true,
                                             .storage = torchamp::MasterStorage::split},
                                         Way{.name = "Unscaled", .unscales = true},
                                         Way{.name = "Recomputed", .recomputes = true}),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(TwoDevices, TrainAsOneDoesWhicheverIsCurrent) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const Params on_one = train(gpu0, gpu0, kind, GetParam());
    for (const c10::DeviceIndex current : {0, 1}) {
      const c10::cuda::CUDAGuard guard(current);
      // A norm is a sum by devices: of other partial sums.
      expect_close(train(gpu0, gpu1, kind, GetParam()), on_one);
      EXPECT_EQ(c10::cuda::current_device(), current);
    }
  }
}

StandInCounts counts_now() {
  StandInCounts counts;
  stand_in_counts(&counts);
  return counts;
}

TEST_P(TwoDevices, AStepOverBothWaitsForNeither) {
  const auto wait_count = [] { return counts_now().waits + counts_now().pageable; };
  const Params params{at::ones({4}, gpu0).requires_grad_(), at::ones({4}, gpu1).requires_grad_()};
  torchamp::FusedAdamW optimizer(params, AdamWOptions(0.1));
  torchamp::GradScaler scaler({.init_scale = 2.});
  const auto step = [&] {
    for (const Tensor& p : params) p.mutable_grad() = at::ones_like(p);
    if (GetParam().clips) torchamp::clip_grad_norm_(scaler, optimizer, 1.);
    scaler.step(optimizer);
    scaler.update();
  };
  for (int i = 0; i < 8; ++i) {
    scaler.scale(at::ones({}, gpu0));
    step();
  }
  scaler.scale(at::ones({}, gpu0));
  c10::cuda::device_synchronize();
  const uint64_t before = wait_count();
  step();
  EXPECT_EQ(wait_count(), before);
  EXPECT_TRUE(at::equal(params[0].cpu(), params[1].cpu()));
}

// What the host computes with must have arrived.
TEST(TwoDevicesHost, AStepOverTheHostAndADeviceSkipsBothIfOneOverflows) {
  stand_in_late(true);
  for (const bool host_first : {false, true}) {
    for (const at::Device of_scale : {at::Device(at::kCPU), gpu0}) {
      Params params{at::ones({4}, gpu0).requires_grad_(), at::ones({4}).requires_grad_()};
      if (host_first) std::swap(params[0], params[1]);
      torchamp::FusedAdamW optimizer(params, AdamWOptions(0.1));
      torchamp::GradScaler scaler({.init_scale = 2.});
      for (const double factor : {1., std::numeric_limits<double>::infinity()}) {
        scaler.scale(at::ones({}, of_scale));
        for (const Tensor& p : params) {
          p.mutable_grad() = at::ones_like(p);
          if (p.is_cuda()) p.mutable_grad().mul_(factor);
        }
        torchamp::clip_grad_norm_(scaler, optimizer, 1.);
        EXPECT_EQ(scaler.step(optimizer).stepped(), factor == 1.);
        scaler.update();
      }
      EXPECT_EQ(scaler.get_scale(), 1.);
      EXPECT_TRUE(at::equal(params[0].cpu(), params[1].cpu())) << params[0] << params[1];
    }
  }
  stand_in_late(false);
}

TEST(TwoDevicesHost, AScaleOnTheHostHasAStepWaitOnceForTheFlag) {
  const Tensor weight = at::ones({4}, gpu0).requires_grad_();
  torchamp::FusedAdamW optimizer({weight}, AdamWOptions(0.1));
  torchamp::GradScaler scaler({.init_scale = 2.});
  for (int i = 0; i < 3; ++i) {
    scaler.scale(at::ones({}));
    weight.mutable_grad() = at::ones_like(weight);
    const uint64_t before = counts_now().waits;
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(counts_now().waits, before + 1) << i;
  }
}

// ---- What only the device knows -----------------------------------------------------------------

TEST(OneDevice, AResultKeepsWhatItsStepWasScaledBy) {
  const Tensor weight = at::ones({4}, gpu0).requires_grad_();
  torchamp::FusedAdamW optimizer({weight}, AdamWOptions(0.1));
  torchamp::GradScaler scaler({.init_scale = 4.});
  std::vector<torchamp::StepResult> results;
  for (const double gradient : {1., HUGE_VAL, HUGE_VAL, 1.}) {
    scaler.scale(at::ones({}, gpu0));
    weight.mutable_grad() = at::full_like(weight, gradient);
    results.push_back(scaler.step(optimizer));
    scaler.update();
  }
  const double scales[] = {4., 4., 2., 1.};
  const int64_t skips[] = {0, 1, 2, 0};
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].scale(), scales[i]);
    EXPECT_EQ(results[i].skips_in_a_row(), skips[i]);
  }
}

TEST(OneDevice, TheRegionAroundAStepCastsNoOpOfIt) {
  const auto train = [](bool in_a_region) {
    std::optional<torchamp::AutocastGuard> region;
    if (in_a_region) {
      region.emplace(at::kCUDA, torchamp::AutocastOptions{
                                    .dtype = at::kBFloat16,
                                    .policy = torchamp::Policy::standard().lower_precision(
                                        {"addcmul", "mul", "linalg_vector_norm"})});
    }
    const Tensor weight = at::ones({4}, gpu0).requires_grad_();
    torchamp::FusedAdamW optimizer({weight}, AdamWOptions(0.1));
    torchamp::GradScaler scaler({.init_scale = 4.});
    for (int i = 0; i < 3; ++i) {
      scaler.scale(at::ones({}, gpu0));
      weight.mutable_grad() = at::full_like(weight, 1.3 + i);
      torchamp::clip_grad_norm_(scaler, optimizer, 0.1);
      scaler.step(optimizer);
      scaler.update();
    }
    return weight.detach().cpu();
  };
  EXPECT_TRUE(at::equal(train(true), train(false)));
}

TEST(TwoDevicesGraph, ACaptureRunsOnTheParametersDeviceWhicheverIsCurrent) {
  std::vector<Tensor> weights;
  for (const bool captures : {false, true}) {
    const c10::cuda::CUDAGuard elsewhere(0);
    const Tensor weight = at::ones({4}, gpu1).requires_grad_();
    torchamp::FusedAdam optimizer({weight}, AdamOptions(0.1));
    torchamp::GradScaler scaler({.init_scale = 4.});
    torchamp::CudaGraph graph(optimizer,
                              [&](const Params& batch) {
                                optimizer.zero_grad();
                                const Tensor loss = (weight * batch[0]).pow(2).sum();
                                scaler.scale(loss).backward();
                                scaler.step(optimizer);
                                scaler.update();
                                return loss;
                              },
                              {.enabled = captures});
    for (int i = 0; i < 6; ++i) {
      graph({at::full({4}, 1. + i, captures ? at::Device(at::kCPU) : gpu1)});
    }
    EXPECT_EQ(graph.is_captured(), captures);
    EXPECT_EQ(c10::cuda::current_device(), 0);
    weights.push_back(weight.detach().cpu());
  }
  EXPECT_TRUE(at::equal(weights[0], weights[1]));
}

/// A model with its optimizer and scaler, kept in one file.
struct Kept {
  Kept(at::Device a, at::Device b)
      : model(a, b), optimizer(model->parameters(), AdamWOptions(0.1)) {}
  void train(int iterations) {
    for (int i = 0; i < iterations; ++i) {
      optimizer.zero_grad();
      scaler.scale(model->forward(at::ones({3, 4})).pow(2).mean()).backward();
      scaler.step(optimizer);
      scaler.update();
    }
  }
  torchamp::TrainingCheckpoint in(const TemporaryFolder& folder) {
    torchamp::TrainingCheckpoint file(folder / "kept.pt");
    file.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
    return file;
  }
  Params values() const {
    Params all;
    for (const Tensor& p : model->parameters()) all.push_back(p.detach().cpu());
    return all;
  }
  Layers model;
  torchamp::FusedAdamW optimizer;
  torchamp::GradScaler scaler{{.init_scale = 8., .growth_interval = 2}};
};

void expect_it_goes_on_from_the_file(at::Device a, at::Device b, const TemporaryFolder& folder) {
  Kept other(a, b);
  torchamp::TrainingCheckpoint file = other.in(folder);
  if (c10::cuda::device_count() == 1) {
    EXPECT_ERROR((void)file.load(), "random state of cuda:1");
    ASSERT_TRUE(file.load_shared());
  } else {
    ASSERT_TRUE(file.load());
  }
  EXPECT_EQ(other.scaler.get_scale(), 16.);
  other.train(2);
  EXPECT_EQ(other.model->lower->weight.device(), a);
  EXPECT_EQ(other.model->upper->weight.device(), b);
  Kept unbroken(gpu0, gpu0);
  unbroken.train(5);
  for (std::size_t i = 0; i < unbroken.values().size(); ++i) {
    EXPECT_TRUE(at::equal(other.values()[i], unbroken.values()[i]));
  }
}

TEST(TwoDevicesCheckpoint, GoesOnOnTheOtherDeviceOnBothOnOneOfOneAndOnTheHost) {
  const TemporaryFolder folder;
  if (child_role()) {  // the gpu1 device is not there
    ASSERT_EQ(c10::cuda::device_count(), 1);
    expect_it_goes_on_from_the_file(gpu0, gpu0, folder);
    expect_it_goes_on_from_the_file(at::kCPU, at::kCPU, folder);
    return;
  }
  Kept kept(gpu0, gpu1);
  kept.train(3);
  kept.in(folder).save();
  expect_it_goes_on_from_the_file(gpu1, gpu1, folder);
  expect_it_goes_on_from_the_file(gpu1, gpu0, folder);
  expect_it_goes_on_from_the_file(gpu0, gpu1, folder);
  auto environment = folder.environment();
  environment["CUDA_ON_HOST_DEVICES"] = "1";
  EXPECT_EQ(ChildProcess("one device", environment).wait(), 0);
}

}  // namespace
