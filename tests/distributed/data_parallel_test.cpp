// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if !__has_include(<gloo/rendezvous/store.h>)

TEST(Distributed, TrainsOnSeveralProcesses) {
  GTEST_SKIP() << "no headers of Gloo (apt install libgloo-dev)";
}

#else

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/launch.h"
#include "support/optimizers.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/distributed/process_group.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/labs/weights_together.h"
#include "torchamp/weight_cache.h"
#if TORCHAMP_CUDA_GRAPHS && __has_include(<nccl.h>)  // a CUDA build, with CUDA's headers
#define TORCHAMP_TEST_NCCL
#include "torchamp/distributed/nccl.h"
#endif

namespace {

using at::Tensor;
using torchamp::DistributedDataParallel;
using torchamp::ProcessGroupPtr;

torch::nn::Sequential three_layers(std::uint64_t seed = 1) {
  at::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::Linear(8, 8),
                               torch::nn::Linear(8, 2));
}

/// Rows of a batch that are this process's.
Tensor part_of(const Tensor& batch, const ProcessGroupPtr& group) {
  return batch.chunk(group->getSize())[static_cast<std::size_t>(group->getRank())];
}

TEST(Distributed, TrainsAsOneProcessWithTheWholeBatch) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  auto alone = three_layers();
  auto model = three_layers();
  DistributedDataParallel net(model, group, {.bucket_bytes = 300});
  torch::optim::SGD optimizer(model->parameters(), 0.1), of_alone(alone->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    const Tensor batch = at::randn({6, 4});
    optimizer.zero_grad();
    of_alone.zero_grad();
    net.forward(part_of(batch, group)).pow(2).mean().backward();
    alone->forward(batch).pow(2).mean().backward();
    optimizer.step();
    of_alone.step();
  }
  for (std::size_t i = 0; i < 6; ++i) expect_close(model->parameters()[i], alone->parameters()[i]);
  expect_same_everywhere(group, model->parameters());
}

TEST(Distributed, TrainsTheSameIfWeightsAreCastTogether) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  std::vector<std::vector<Tensor> > gradients;
  for (const torchamp::WeightCache cache :
       {torchamp::WeightCache::libtorch, torchamp::weights_together()}) {
    auto model = three_layers();
    DistributedDataParallel net(model, group, {.bucket_bytes = 300});
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      Tensor output;
      {
        const torchamp::AutocastGuard guard(at::kCPU, {.dtype = at::kBFloat16, .cache = cache});
        output = net.forward(part_of(at::arange(24.).view({6, 4}).sin(), group));
      }
      optimizer.zero_grad();
      output.to(at::kFloat).pow(2).mean().backward();
      optimizer.step();
    }
    gradients.emplace_back();
    for (const Tensor& parameter : model->parameters()) {
      gradients.back().push_back(parameter.grad());
    }
    expect_same_everywhere(group, model->parameters());
  }
  for (std::size_t i = 0; i < 6; ++i) EXPECT_TRUE(gradients[1][i].equal(gradients[0][i])) << i;
}

TEST(Distributed, AddsUpWithoutTrafficBetweenMicroBatches) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  auto alone = three_layers();
  auto model = three_layers();
  DistributedDataParallel net(model, group);
  for (int step = 0; step < 2; ++step) {
    model->zero_grad();
    alone->zero_grad();
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const Tensor batch = at::randn({6, 4});
      const auto no_sync = net.no_sync(micro_batch < 2);
      net.forward(part_of(batch, group)).pow(2).mean().backward();
      alone->forward(batch).pow(2).mean().backward();
    }
    for (std::size_t i = 0; i < 6; ++i) {
      expect_close(model->parameters()[i].grad(), alone->parameters()[i].grad());
    }
  }
}

TEST(Distributed, ARegionWithoutTrafficHoldsUntilTheOutermostEnds) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  torch::nn::Linear model(1, 1);
  DistributedDataParallel net(model, group);
  const auto gradient = [&] {
    model->zero_grad();
    net.forward(at::full({1, 1}, group->getRank() + 1.)).sum().backward();
    return model->weight.grad().item<double>();
  };
  {
    const auto outer = net.no_sync();
    { const auto inner = net.no_sync(); }
    EXPECT_EQ(gradient(), group->getRank() + 1.);
    {
      const auto inner = net.no_sync(/*enabled=*/false);
      EXPECT_EQ(gradient(), group->getRank() + 1.);
    }
    EXPECT_EQ(gradient(), group->getRank() + 1.);
  }
  EXPECT_EQ(gradient(), 1.5);
}

TEST(Distributed, SendsGradientsAsTheHookOfTheOptionsSays) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const float input = 1.f + 0x1p-12f;  // no fp16 number
  const auto gradient = [&](const torchamp::DistributedDataParallelOptions& options) {
    torch::nn::Linear model(1, 1);
    DistributedDataParallel net(model, group, options);
    net.forward(at::full({1, 1}, input)).sum().backward();
    return model->weight.grad().item<float>();
  };
  EXPECT_EQ(gradient({}), input);
  EXPECT_EQ(gradient({.communication = c10d::BuiltinCommHookType::FP16_COMPRESS}), 1.f);
}

TEST(Distributed, LetsOneProcessRunAForwardWithoutGradients) {
  if (ran_in_processes(2)) return;
  const auto group = make_group(std::chrono::seconds(20));
  at::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8));
  DistributedDataParallel net(model, group, {.find_unused_parameters = true, .bucket_bytes = 100});
  for (int step = 0; step < 3; ++step) {
    model->zero_grad();
    net.forward(at::randn({3, 4}) + group->getRank()).sum().backward();
    expect_same_everywhere(group, model[0]->parameters());
    if (group->getRank() != 0) continue;
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(net.forward(at::randn({3, 4})).requires_grad());
  }
  for (const Tensor& parameter : model->parameters()) {
    expect_same_everywhere(group, {parameter.grad()});
  }
}

TEST(Distributed, SendsABucketWhileBackwardGoesOn) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  auto model = three_layers();
  DistributedDataParallel net(model, group, {.bucket_bytes = 300});
  static std::vector<std::string> ops;
  static std::mutex mutex;
  for (int step = 0; step < 3; ++step) {
    const Tensor loss = net.forward(at::randn({3, 4})).sum();
    ops.clear();
    const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
          const std::lock_guard lock(mutex);
          ops.emplace_back(op.name());
          return nullptr;
        }));
    loss.backward();
    at::removeCallback(handle);
    const auto sent = std::ranges::find(ops, "c10d::allreduce_");
    ASSERT_NE(sent, ops.end());
    EXPECT_NE(std::find(sent, ops.end(), "aten::mm"), ops.end()) << "step " << step;
  }
}

TEST(Distributed, StartsEveryProcessWithTheModelOfTheFirst) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  at::manual_seed(static_cast<std::uint64_t>(group->getRank()));
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8));
  model[1]->as<torch::nn::BatchNorm1d>()->running_mean.fill_(group->getRank() + 5.);
  const Tensor mask = at::full({1, 3}, group->getRank() + 9.).expand({2, 3});
  model->register_buffer("mask", mask);  // of which many elements are one
  DistributedDataParallel net(model, group);
  expect_same_everywhere(group, model->parameters());
  expect_same_everywhere(group, model->buffers());
  for (int step = 0; step < 2; ++step) {
    net.forward(at::randn({3, 4}) + group->getRank()).sum().backward();
  }
  const Tensor weight = model[0]->as<torch::nn::Linear>()->weight;
  const Tensor mean = model[1]->as<torch::nn::BatchNorm1d>()->running_mean;
  {
    const at::NoGradGuard no_grad;
    weight.fill_(group->getRank() + 5);
    mean.fill_(group->getRank() + 7);
    model->eval();
  }
  net.forward(at::randn({3, 4})).sum().backward();
  {
    const at::NoGradGuard no_grad;
    EXPECT_EQ(mean[0].item<int>(), group->getRank() + 7) << "in evaluation nothing is sent";
  }
  torchamp::broadcast_module(*model, group, /*root=*/1);
  EXPECT_EQ(weight[0][0].item<int>(), 6);
  EXPECT_EQ(mean[0].item<int>(), 8);
  EXPECT_EQ(mask[1][2].item<int>(), 9);
  expect_same_everywhere(group, model->buffers());
}

TEST(Distributed, RefusesModelsOfDifferentShapes) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  torch::nn::Linear model(4, 2 + group->getRank());
  EXPECT_ERROR(DistributedDataParallel(model, group), "DistributedDataParallel: ");
  torch::nn::Linear frozen(4, 2);
  for (const Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  EXPECT_ERROR(DistributedDataParallel(frozen, group),
               "DistributedDataParallel: no parameter of the model requires grad");
}

TEST(Distributed, RefusesModelsWithOtherNumbersOfParameters) {
  if (ran_in_processes(2)) return;
  const auto group = make_group(std::chrono::seconds(5));
  torch::nn::Sequential model(torch::nn::Linear(4, 4));
  if (group->getRank() == 1) model->push_back(torch::nn::Linear(4, 4));
  EXPECT_ERROR(DistributedDataParallel(model, group), "DistributedDataParallel: ");
}

TEST(Distributed, RefusesModelsWithOtherNumbersOfDimensions) {
  if (ran_in_processes(2)) return;
  const auto group = make_group(std::chrono::seconds(5));
  const bool is_first = group->getRank() == 0;
  torch::nn::Sequential model;
  is_first ? model->push_back(torch::nn::Linear(4, 4))
           : model->push_back(torch::nn::Conv2d(2, 2, 3));
  EXPECT_ERROR(DistributedDataParallel(model, group), "DistributedDataParallel: ");
}

TEST(Distributed, FindsParametersThatAForwardLeavesUnused) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  struct ChoiceImpl : torch::nn::Module {
    Tensor forward(const Tensor& x, bool first) { return first ? a->forward(x) : b->forward(x); }
    torch::nn::Linear a{register_module("a", torch::nn::Linear(4, 2))};
    torch::nn::Linear b{register_module("b", torch::nn::Linear(4, 2))};
  };
  const auto model = std::make_shared<ChoiceImpl>();
  DistributedDataParallel net(model, group, {.find_unused_parameters = true});
  for (int step = 0; step < 3; ++step) {
    model->zero_grad();
    net.forward(at::ones({1, 4}), (step + group->getRank()) % 2 == 0).sum().backward();
    EXPECT_TRUE(at::equal(model->a->bias.grad(), at::full({2}, 0.5f)));
    EXPECT_TRUE(at::equal(model->b->bias.grad(), at::full({2}, 0.5f)));
  }
}

TEST(Distributed, FindsUnusedParametersWhateverAForwardReturns) {
  if (ran_in_processes(2)) return;
  struct Outputs {
    Tensor y;
  };
  struct StructuredImpl : torch::nn::Module {
    Outputs forward(const Tensor& x) { return {used->forward(x)}; }
    torch::nn::Linear used{register_module("used", torch::nn::Linear(4, 2))};
    torch::nn::Linear spare{register_module("spare", torch::nn::Linear(4, 2))};
  };
  const auto group = make_group();
  const auto model = std::make_shared<StructuredImpl>();
  DistributedDataParallel looking(model, group, {.find_unused_parameters = true});
  looking.forward(at::ones({1, 4})).y.sum().backward();
  EXPECT_TRUE(at::equal(model->used->bias.grad(), at::ones({2})));
  EXPECT_FALSE(model->spare->bias.grad().defined());
}

TEST(Distributed, SaysWhichParameterIsUnusedUnlessAskedToLook) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  torch::nn::Linear model(4, 2);
  DistributedDataParallel net(model, group);
  const auto backward = [&](bool uses_weight) {
    const Tensor y = net.forward(at::ones({1, 4}));
    (uses_weight ? y : model->bias).sum().backward();
  };
  EXPECT_ERROR(backward(false), "backward has given the parameter 'weight' no gradient. Pass");
  model->zero_grad();
  backward(true);
  EXPECT_TRUE(at::equal(model->bias.grad(), at::ones({2})));
}

TEST(Distributed, SkipsTheStepEverywhereWhenOneProcessOverflows) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const bool fused : {false, true}) {
    auto model = three_layers();
    DistributedDataParallel net(model, group);
    const auto optimizer = plain_or_fused_sgd(model->parameters(), fused, 0.1);
    torchamp::GradScaler scaler({.init_scale = 8., .growth_interval = 2});
    for (int step = 0; step < 4; ++step) {
      optimizer->zero_grad();
      const Tensor loss = net.forward(at::randn({3, 4})).pow(2).mean();
      const bool overflows = step == 1 && group->getRank() == 1;
      scaler.scale(overflows ? loss * INFINITY : loss).backward();
      const Tensor before = model->parameters()[0].clone();
      EXPECT_EQ(scaler.step(*optimizer).stepped(), step != 1);
      EXPECT_EQ(at::equal(model->parameters()[0], before), step == 1);
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), 8.);  // down once, up once
    expect_same_everywhere(group, model->parameters());
  }
}

// Each process has its own parameter, as with a sharded optimizer.
TEST(Distributed, AgreesOnTheOverflowOfShards) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const bool agrees : {true, false}) {
    for (const bool fused : {false, true}) {
      const Tensor shard = at::ones({4}).set_requires_grad(true);
      const auto optimizer = plain_or_fused_sgd({shard}, fused, 0.1);
      torchamp::GradScalerOptions options{.init_scale = 8.};
      if (agrees) options.agree_found_inf = torchamp::found_inf_agreement(group);
      torchamp::GradScaler scaler(options);
      const bool overflows = group->getRank() == 1;
      scaler.scale((shard * (overflows ? INFINITY : 1.)).sum()).backward();
      const bool stepped = scaler.step(*optimizer).stepped();
      scaler.update();
      EXPECT_EQ(stepped, !agrees && !overflows);
      EXPECT_EQ(scaler.get_scale(), stepped ? 8. : 4.);
    }
  }
}

TEST(Distributed, AveragesOverNccl) {
  SKIP_WITHOUT(at::kCUDA);
#ifdef TORCHAMP_TEST_NCCL
  if (at::getNumGPUs() < 2) GTEST_SKIP() << "NCCL needs a CUDA device for each of two processes";
  if (ran_in_processes(2)) return;
  const auto environment = torchamp::ProcessEnvironment::read();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank));
  const c10::DeviceGuard on_device(device);
  const auto group = make_group();
  torchamp::add_nccl(*group);
  torch::nn::Linear model(4, 2);
  model->to(device);
  DistributedDataParallel net(model, group);
  const Tensor x = at::full({1, 4}, static_cast<double>(group->getRank()), device);
  net.forward(x).sum().backward();
  EXPECT_TRUE(at::equal(model->weight.grad(), at::full({2, 4}, 0.5, device)));
  Tensor found_inf = at::full({}, static_cast<double>(group->getRank()), device);
  torchamp::found_inf_agreement(group)(found_inf);
  EXPECT_EQ(found_inf.item<float>(), 1.f);
#else
  GTEST_SKIP() << "no nccl.h beside CUDA's headers";
#endif
}

}  // namespace

#endif
