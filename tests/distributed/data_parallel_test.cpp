// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if !__has_include(<gloo/rendezvous/store.h>)

TEST(Distributed, TrainsOnSeveralProcesses) {
  GTEST_SKIP() << "no headers of Gloo (apt install libgloo-dev)";
}

#else

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/launch.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"
#include "torchamp/distributed/checkpoint.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/distributed/process_group.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#include "torchamp/recompute.h"
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

std::unique_ptr<torch::optim::Optimizer> make_sgd(std::vector<Tensor> parameters, bool fused) {
  if (fused) {
    return std::make_unique<torchamp::FusedSGD>(std::move(parameters),
                                                torch::optim::SGDOptions(0.1));
  }
  return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.1);
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

TEST(Distributed, IsRefusedInTheIterationOfAGraph) {
  if (ran_in_processes(1)) return;
  auto model = three_layers();
  DistributedDataParallel net(model, make_group());
  {
    const torchamp::detail::GraphBody body;
    EXPECT_ERROR(net.forward(at::randn({6, 4})),
                 "DistributedDataParallel: its gradients are averaged on streams of its own, which "
                 "the iteration of a CudaGraph cannot hold. Run that iteration eagerly");
    const auto no_sync = net.no_sync();
    EXPECT_NO_THROW(net.forward(at::randn({6, 4})));
  }
  EXPECT_NO_THROW(net.forward(at::randn({6, 4})).sum().backward());
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
               "DistributedDataParallel: no parameter of the model needs a gradient");
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

TEST(Distributed, RefusesToLookForUnusedParametersInAStruct) {
  if (ran_in_processes(2)) return;
  struct Outputs {
    Tensor y;
  };
  struct StructuredImpl : torch::nn::Module {
    Outputs forward(const Tensor& x) { return {linear->forward(x)}; }
    torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 2))};
  };
  const auto group = make_group();
  const auto model = std::make_shared<StructuredImpl>();
  DistributedDataParallel looking(model, group, {.find_unused_parameters = true});
  EXPECT_ERROR(looking.forward(at::ones({1, 4})),
               "DistributedDataParallel: find_unused_parameters starts from the tensors that");
  DistributedDataParallel net(model, group);
  net.forward(at::ones({1, 4})).y.sum().backward();
  EXPECT_TRUE(at::equal(model->linear->bias.grad(), at::ones({2})));
}

TEST(Distributed, SkipsTheStepEverywhereWhenOneProcessOverflows) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const bool fused : {false, true}) {
    auto model = three_layers();
    DistributedDataParallel net(model, group);
    const auto optimizer = make_sgd(model->parameters(), fused);
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

// Each process has a parameter of its own, as with a sharded optimizer.
TEST(Distributed, AgreesOnTheOverflowOfShards) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const bool agrees : {true, false}) {
    for (const bool fused : {false, true}) {
      const Tensor shard = at::ones({4}).set_requires_grad(true);
      const auto optimizer = make_sgd({shard}, fused);
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

/// Everything at once: guard, scaler, masters, recomputation, fused optimizer, accumulation.
struct Training {
  Training(const ProcessGroupPtr& group, const std::filesystem::path& file) : checkpoint(file) {
    torchamp::broadcast_module(*net, group);
    masters.emplace(net, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16});
    parallel.emplace(net, group);
    optimizer.emplace(masters->parameters(), torch::optim::AdamWOptions(0.05));
    checkpoint.add("model", *masters).add("optimizer", *optimizer).add("scaler", scaler);
    checkpoint.add("step", step).add_local("losses", losses);
    at::manual_seed(100 + static_cast<std::uint64_t>(group->getRank()));
  }

  void train(std::int64_t until) {
    for (; step < until; ++step) {
      optimizer->zero_grad();
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        const auto no_sync = parallel->no_sync(micro_batch == 0);
        Tensor loss;
        {
          const torchamp::AutocastGuard autocast(at::kCPU);
          loss = parallel->forward(at::randn({6, 4})).to(at::kFloat).pow(2).mean();
        }
        losses += loss.item<double>();
        scaler.scale(loss).backward();
      }
      masters->take_gradients();
      scaler.step(*optimizer);
      scaler.update();
      masters->copy_to_model();
    }
  }

  std::vector<Tensor> state() {
    std::vector<Tensor> tensors = masters->parameters();
    for (const Tensor& buffer : net->buffers()) tensors.push_back(buffer);
    return tensors;
  }

  struct NetImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      return head->forward(torchamp::checkpoint(body, torchamp::checkpoint(first, x)));
    }
    torch::nn::Linear first{register_module("first", torch::nn::Linear(4, 8))};
    torch::nn::Sequential body{register_module(
        "body", torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8),
                                      torch::nn::Dropout(0.5)))};
    torch::nn::Linear head{register_module("head", torch::nn::Linear(8, 2))};
  };

  std::shared_ptr<NetImpl> net = (at::manual_seed(1), std::make_shared<NetImpl>());
  std::optional<torchamp::MasterWeights> masters;
  std::optional<DistributedDataParallel<std::shared_ptr<NetImpl> > > parallel;
  std::optional<torchamp::FusedAdamW> optimizer;
  torchamp::GradScaler scaler{{.init_scale = 64., .growth_interval = 3}};
  std::int64_t step = 0;
  double losses = 0.;
  torchamp::TrainingCheckpoint checkpoint;
};

TEST(Distributed, GoesOnBitForBitFromACheckpoint) {
  const TemporaryFolder folder;
  if (!child_role()) {
    for (const auto& [stage, processes] :
         {std::pair{"straight", 2}, {"first half", 2}, {"second half", 2}, {"alone", 1}}) {
      auto environment = folder.environment();
      environment["TORCHAMP_TEST_STAGE"] = stage;
      Launch(processes, environment).expect_success();
    }
    return;
  }
  const std::string stage = std::getenv("TORCHAMP_TEST_STAGE");
  const auto group = make_group();
  const std::string result = folder / std::to_string(group->getRank());
  Training run(group, folder / "run.pt");
  if (stage == "straight") {
    run.train(6);
    torch::save(run.state(), result);
  } else if (stage == "first half") {
    EXPECT_FALSE(torchamp::load_together(run.checkpoint, group));
    run.train(3);
    torchamp::save_together(run.checkpoint, group);
    run.train(4);  // comes to nothing
  } else if (stage == "second half") {
    EXPECT_TRUE(torchamp::load_together(run.checkpoint, group));
    EXPECT_EQ(run.step, 3);
    run.train(6);
    std::vector<Tensor> expected;
    torch::load(expected, result);
    const auto state = run.state();
    for (std::size_t i = 0; i < state.size(); ++i) EXPECT_TRUE(at::equal(state[i], expected[i]));
  } else {
    EXPECT_ERROR(torchamp::load_together(run.checkpoint, group),
                 "was saved by 2 process(es), and this run has 1");
    EXPECT_TRUE(run.checkpoint.load_shared());
    run.train(4);
  }
}

/// Runs two processes of which the second is to end with `status`, or to be killed by this one.
void expect_survivor(const TemporaryFolder& folder, std::optional<int> status) {
  Launch launch(2, folder.environment());
  if (status) {
    EXPECT_EQ(launch.rank(1).wait(), *status);
  }
  EXPECT_EQ(launch.rank(0).wait(), 0) << "the survivor";
}

TEST(Distributed, GivesAnErrorWhenAnotherProcessDies) {
  const TemporaryFolder folder;
  if (!child_role()) return expect_survivor(folder, -SIGKILL);
  const auto group = make_group();
  Training run(group, folder / "run.pt");
  run.train(2);
  torchamp::save_together(run.checkpoint, group);
  if (group->getRank() == 1) {
    const torchamp::AutocastGuard autocast(at::kCPU);
    run.parallel->forward(at::randn({6, 4}));
    raise(SIGKILL);
  }
  EXPECT_THROW(run.train(4), std::exception);
  EXPECT_ERROR(torchamp::save_together(run.checkpoint, group), "save_together: ");
  EXPECT_TRUE(run.checkpoint.load(0, 2));
  EXPECT_EQ(run.step, 2);
}

TEST(Distributed, NamesTheCallWhenAnotherProcessHasDied) {
  const TemporaryFolder folder;
  if (!child_role()) return expect_survivor(folder, -SIGKILL);
  const auto group = make_group();
  auto model = three_layers();
  at::Tensor flag = at::zeros({});
  torchamp::found_inf_agreement(group)(flag);
  if (group->getRank() == 1) raise(SIGKILL);
  EXPECT_ERROR(DistributedDataParallel(model, group), "DistributedDataParallel: ");
  EXPECT_ERROR(torchamp::broadcast_module(*model, group), "broadcast_module: ");
  EXPECT_ERROR(torchamp::found_inf_agreement(group)(flag), "found_inf_agreement: ");
}

TEST(Distributed, GivesAnErrorWhenAnotherProcessStalls) {
  const TemporaryFolder folder;
  if (!child_role()) return expect_survivor(folder, std::nullopt);
  const auto group = make_group(std::chrono::seconds(3));
  Training run(group, folder / "run.pt");
  run.train(2);
  torchamp::save_together(run.checkpoint, group);
  if (group->getRank() == 1) raise(SIGSTOP);  // until this test's end kills it
  EXPECT_THROW(run.train(4), std::exception);
  EXPECT_ERROR(torchamp::save_together(run.checkpoint, group), "save_together: ");
  EXPECT_TRUE(run.checkpoint.load(0, 2));
  EXPECT_EQ(run.step, 2);
}

TEST(Distributed, GivesAnErrorWhenAnotherProcessNeverComes) {
  if (!child_role()) return Launch(2).expect_success();
  const auto environment = torchamp::ProcessEnvironment::read();
  if (environment.rank == 1) return;
  EXPECT_ERROR(make_group(std::chrono::seconds(2)), "make_process_group: ");
}

TEST(Distributed, LeavesTheOldCheckpointWhenTheWriterIsKilled) {
  const TemporaryFolder folder;
  if (!child_role()) {
    Launch launch(2, folder.environment());
    EXPECT_EQ(launch.rank(0).wait(), -SIGXFSZ);
    EXPECT_EQ(launch.rank(1).wait(), 0) << "the survivor";
    return;
  }
  const auto group = make_group();
  Training run(group, folder / "run.pt");
  torchamp::save_together(run.checkpoint, group);
  run.train(1);
  if (group->getRank() == 0) {
    const rlimit no_core{0, 0}, limit{1000, 1000};
    setrlimit(RLIMIT_CORE, &no_core);
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  EXPECT_THROW(torchamp::save_together(run.checkpoint, group), std::exception);
  EXPECT_TRUE(run.checkpoint.load(1, 2));
  EXPECT_EQ(run.step, 0);
}

TEST(Distributed, SavesForAllOrNone) {
  const TemporaryFolder folder;
  if (!child_role()) return Launch(2, folder.environment()).expect_success();
  const auto group = make_group();
  struct Fails {
    void save(torch::serialize::OutputArchive&) const { TORCH_CHECK(!now, "cannot be saved"); }
    void load(torch::serialize::InputArchive&) {}
    bool now = false;
  } fails;
  int step = 1;
  torchamp::TrainingCheckpoint checkpoint(folder / "run.pt");
  checkpoint.add("step", step).add_local("fails", fails);
  torchamp::save_together(checkpoint, group);
  step = 2;
  fails.now = group->getRank() == 1;
  EXPECT_ERROR(torchamp::save_together(checkpoint, group),
               fails.now ? "cannot be saved" : "save_together: process 1 has failed");
  fails.now = false;
  EXPECT_TRUE(torchamp::load_together(checkpoint, group));
  EXPECT_EQ(step, 1);

  const bool other = group->getRank() == 1;
  torchamp::TrainingCheckpoint elsewhere(folder / (other ? "elsewhere.pt" : "run.pt"));
  elsewhere.add("step", step).add_local("fails", fails);
  EXPECT_ERROR(torchamp::load_together(elsewhere, group), "Put it where all can read it");
  if (other) elsewhere.save({elsewhere.local_part(), elsewhere.local_part()});
  EXPECT_ERROR(torchamp::load_together(elsewhere, group), "is another file on some processes");
}

TEST(Distributed, MeetsWithoutTorchrunAndOnLoopbackAlone) {
  if (!child_role()) {
    const int probe = torchamp::detail::loopback_socket(0);  // for a port that is free
    sockaddr_in address{};
    socklen_t size = sizeof address;
    getsockname(probe, reinterpret_cast<sockaddr*>(&address), &size);
    close(probe);
    std::map<std::string, std::string> environment{
        {"MASTER_ADDR", "localhost"},
        {"MASTER_PORT", std::to_string(ntohs(address.sin_port))},
        {"WORLD_SIZE", "2"},
        {"RANK", "0"}};
    ChildProcess first("rank", environment);
    environment["RANK"] = "1";
    ChildProcess second("rank", environment);
    EXPECT_EQ(second.wait(), 0);
    EXPECT_EQ(first.wait(), 0);
    return;
  }
  const auto group = make_group();
  EXPECT_EQ(torchamp::detail::gather_numbers("test", group, group->getRank()),
            (std::vector<std::int64_t>{0, 1}));
  // What this process listens on, from the kernel's table: hexadecimal, 0A is LISTEN.
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::set<std::string> own;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      own.insert(std::filesystem::read_symlink(entry, gone).string());
    }
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state, rest, inode;
      words >> number >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) words >> rest;
      words >> inode;
      if (state != "0A" || !own.contains("socket:[" + inode + "]")) continue;
      EXPECT_TRUE(local.starts_with("0100007F:")) << table << ": " << local;
    }
  }
}

TEST(ProcessGroup, TakesOnlyAddressesForTheLoopbackNetwork) {
  using torchamp::detail::is_loopback;
  for (const char* host : {"localhost", "127.0.0.1", "127.5.6.7"}) EXPECT_TRUE(is_loopback(host));
  for (const char* host : {"127.example.invalid", "127.", "127.0.0.1.example.invalid", "128.0.0.1",
                           "10.0.0.127", ""}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

TEST(ProcessEnvironment, IsAGroupOfOneWithoutVariables) {
  const auto environment = torchamp::ProcessEnvironment::read();
  EXPECT_EQ(environment.rank, 0);
  EXPECT_EQ(environment.world_size, 1);
  const auto group = torchamp::make_process_group();
  torch::nn::Linear model(2, 2);
  DistributedDataParallel net(model, group);
  net.forward(at::ones({1, 2})).sum().backward();
  EXPECT_TRUE(at::equal(model->weight.grad(), at::ones({2, 2})));
}

TEST(ProcessEnvironment, SaysWhatIsMissingOrWrong) {
  const auto read_with = [](const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    std::string text;
    try {
      torchamp::ProcessEnvironment::read();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    for (const auto& [name, value] : variables) unsetenv(name.c_str());
    return text;
  };
  using testing::HasSubstr;
  EXPECT_THAT(read_with({{"RANK", "0"}}), HasSubstr("variable WORLD_SIZE is not set"));
  EXPECT_THAT(read_with({{"WORLD_SIZE", "2"}}), HasSubstr("variable RANK is not set"));
  EXPECT_THAT(read_with({{"RANK", "two"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is 'two'"));
  EXPECT_THAT(read_with({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("Ranks count from 0"));
  EXPECT_THAT(read_with({{"RANK", "1"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_PORT is not set"));
  EXPECT_EQ(read_with({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "29500"}}), "");
}

TEST(Distributed, IgnoresASignalThatSendingToADeadProcessRaises) {
  const auto before = std::signal(SIGPIPE, SIG_DFL);
  (void)torchamp::make_process_group();
  EXPECT_EQ(std::signal(SIGPIPE, [](int) {}), SIG_IGN);
  (void)torchamp::make_process_group();
  EXPECT_NE(std::signal(SIGPIPE, before), SIG_IGN);  // the program's own handler stays
}

TEST(Distributed, AveragesOverNccl) {
  SKIP_WITHOUT(at::kCUDA);
#ifdef TORCHAMP_TEST_NCCL
  if (at::getNumGPUs() < 2) GTEST_SKIP() << "NCCL needs a CUDA device for each of two processes";
  if (ran_in_processes(2)) return;
  const auto environment = torchamp::ProcessEnvironment::read();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank));
  at::accelerator::setDeviceIndex(device.index());
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
