// SPDX-License-Identifier: BSD-3-Clause
// Calls that run out of memory anywhere leave everything as it was.
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/accumulate.h>
#include <torchamp/autocast.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/labs/precision_audit.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>
#include <torchamp/training_checkpoint.h>
#include <torchamp/weight_cache.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/dropping_accumulation.h"
#include "support/host_allocation_limit.h"
#include "support/out_of_memory.h"
#include "support/temporary_folder.h"

namespace {

using at::Tensor;
using simulated::on;
using simulated::sim0;
using torchamp::GradScaler;

struct OutOfMemory : testing::Test {
  void SetUp() override { SKIP_WITHOUT(at::kPrivateUse1); }
};

std::vector<Tensor> on_host(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().cpu() : Tensor());
  }
  return copies;
}

void expect_same(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << i;
    EXPECT_TRUE(!actual[i].defined() || at::equal(actual[i], expected[i])) << i;
  }
}

torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return to_device(torch::nn::Sequential(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6),
                                         torch::nn::Linear(6, 2)),
                   sim0);
}

/// Parameters, buffers and gradients of a model, and the random numbers to come.
std::vector<Tensor> all_of(torch::nn::Sequential& net) {
  std::vector<Tensor> tensors = net->parameters();
  for (const Tensor& parameter : net->parameters()) tensors.push_back(parameter.grad());
  for (const Tensor& buffer : net->buffers()) tensors.push_back(buffer);
  for (const at::Device device : {at::Device(at::kCPU), sim0}) {
    tensors.push_back(at::globalContext().defaultGenerator(device).get_state());
  }
  return on_host(tensors);
}

TEST_F(OutOfMemory, AnAuditPutsTheModelBack) {
  auto net = make_net();
  const Tensor x = at::randn({8, 4}).to(sim0);
  net->forward(x).sum().backward();
  torchamp::PrecisionAudit audit(net, {.dtype = at::kHalf});
  const auto step = [&] {
    const torchamp::AutocastGuard autocast(sim0);
    torch::dropout(net->forward(x), 0.5, true).pow(2).mean().backward();
  };
  audit.run(step, 1);
  const auto before = all_of(net);
  const std::string measured = audit.to_csv();
  int failures = 0;
  for (std::int64_t allocations = 0;; allocations += 1 + allocations / 4) {
    SCOPED_TRACE(allocations);
    ASSERT_LT(allocations, 100'000);
    try {
      const simulated::AllocationLimit limit(allocations);
      audit.run(step, 1);
      break;
    } catch (const c10::Error&) {
      ++failures;
    }
    expect_same(all_of(net), before);
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kPrivateUse1));
    EXPECT_EQ(audit.to_csv(), measured);
    if (HasFailure()) break;
  }
  EXPECT_GT(failures, 10);
  expect_same(all_of(net), before);
}

/// Parameters of several kinds, so that there are several sums.
struct Window {
  GradScaler scaler{{.init_scale = 8.}};
  std::vector<Tensor> parameters{at::ones({3}, on(sim0)).requires_grad_(),
                                 at::ones({2}, on(sim0, at::kDouble)).requires_grad_()};
  torchamp::FusedSGD optimizer{parameters, torch::optim::SGDOptions(0.5)};

  Tensor loss(double factor) const {
    return (parameters[0] * factor).sum().to(at::kDouble) + (parameters[1] * factor).sum();
  }
};

TEST_F(OutOfMemory, ADroppingAccumulationAddsAMicroBatchOnceOrNotAtAll) {
  const auto run = [](bool fails) {
    Window window;
    DroppingAccumulation accumulation(window.scaler, window.optimizer);
    int failures = 0;
    for (const double factor : {1., 1e300, 5.}) {
      const auto call = [&] { accumulation.backward(window.loss(factor)); };
      fails ? void(failures += until_memory_suffices(call, [] {})) : call();
    }
    std::optional<torchamp::AccumulationResult> result;
    const auto step = [&] { result = accumulation.step(); };
    fails ? void(failures += until_memory_suffices(step, [] {})) : step();
    EXPECT_EQ(result->kept(), 2);
    EXPECT_EQ(failures > 20, fails);
    auto all = on_host(window.parameters);
    all.push_back(at::tensor(window.scaler.get_scale()));
    all.push_back(at::tensor(window.scaler.state_dict().growth_tracker));
    return all;
  };
  expect_same(run(true), run(false));
}

TEST_F(OutOfMemory, AnAccumulationStepsOnceWithItsWindow) {
  const auto run = [](bool fails) {
    Window window;
    torchamp::Accumulation accumulation(window.scaler, window.optimizer, 2);
    int failures = 0;
    accumulation.backward(window.loss(1.));
    for (std::int64_t allocations = fails ? 0 : 1000; accumulation.pending() > 0; ++allocations) {
      const simulated::AllocationLimit limit(allocations);
      try {
        if (accumulation.pending() == 1) {
          accumulation.backward(window.loss(2.));
        } else {
          accumulation.flush();
        }
      } catch (const c10::OutOfMemoryError&) {
        ++failures;
      } catch (const c10::Error& error) {  // a backward that is half done
        EXPECT_NE(std::string(error.what()).find("may hold part of a micro-batch"),
                  std::string::npos)
            << error.what();
        ++failures;
        accumulation.discard();
        const simulated::AllocationLimit enough(1000);
        accumulation.backward(window.loss(1.));
      }
    }
    EXPECT_EQ(failures > 5, fails);
    return on_host(window.parameters);
  };
  expect_same(run(true), run(false));
}

/// What a checkpoint has.
struct AdamRun {
  void train() {
    optimizer.zero_grad();
    scaler.scale(net->forward(at::ones({8, 4}, on(sim0))).pow(2).mean()).backward();
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    noted.add_(1.);
  }
  std::vector<Tensor> state() {
    auto tensors = all_of(net);
    for (const Tensor& parameter : net->parameters()) {
      const auto& of = *optimizer.state().at(parameter.unsafeGetTensorImpl());
      const auto& moments = static_cast<const torch::optim::AdamParamState&>(of);
      tensors.push_back(at::tensor(moments.step()));
      tensors.push_back(moments.exp_avg().cpu());
      tensors.push_back(moments.exp_avg_sq().cpu());
    }
    tensors.push_back(noted.cpu());
    tensors.push_back(at::tensor(scaler.get_scale()));
    return tensors;
  }

  torch::nn::Sequential net = make_net();
  torchamp::FusedAdam optimizer{net->parameters(), torch::optim::AdamOptions(0.1)};
  GradScaler scaler{{.init_scale = 8., .growth_interval = 2}};
  Tensor noted = at::zeros({3}, on(sim0));
};

TEST_F(OutOfMemory, ACheckpointLoadsAllOrNothing) {
  const TemporaryFolder folder;
  AdamRun run, undisturbed;
  torchamp::TrainingCheckpoint checkpoint(folder / "checkpoint.pt");
  checkpoint.add("net", run.net).add("optimizer", run.optimizer).add("scaler", run.scaler);
  checkpoint.add("noted", run.noted);
  for (int i = 0; i < 3; ++i) run.train();
  for (int i = 0; i < 3; ++i) undisturbed.train();
  checkpoint.save();
  const auto saved = run.state();
  const int failures =
      until_memory_suffices([&] { (void)checkpoint.load(); },
                            [&] {
                              run.train();
                              undisturbed.train();
                              expect_same(all_of(run.net), all_of(undisturbed.net));
                            });
  EXPECT_GT(failures, 5);
  expect_same(run.state(), saved);
}

TEST_F(OutOfMemory, ACheckpointOfMasterWeightsLoadsAllOrNothing) {
  const TemporaryFolder folder;
  for (const auto storage : {torchamp::MasterStorage::full, torchamp::MasterStorage::split}) {
    torch::manual_seed(4);
    const auto net = to_device(torch::nn::Linear(4, 2), sim0);
    torchamp::MasterWeights masters(net, {.dtype = at::kBFloat16, .storage = storage});
    torchamp::FusedAdam optimizer(masters.parameters(), torch::optim::AdamOptions(0.1));
    torchamp::TrainingCheckpoint checkpoint(folder / "checkpoint.pt");
    const auto other_net = to_device(torch::nn::Linear(4, 2), sim0);
    torchamp::MasterWeights others(
        other_net, {.dtype = at::kBFloat16, .storage = torchamp::MasterStorage::split});
    checkpoint.add("masters", masters).add("optimizer", optimizer).add("others", others);
    const auto train = [&] {
      at::linear(at::ones({2, 4}, on(sim0, at::kBFloat16)), net->weight, net->bias)
          .sum()
          .backward();
      masters.take_gradients();
      optimizer.step();
      masters.copy_to_model();
      masters.zero_grad();
    };
    const auto state = [&] {
      std::stringstream file;
      torch::save(masters, file);
      torch::nn::Linear plain(4, 2);
      torch::load(plain, file, at::Device(at::kCPU));
      auto tensors = on_host(plain->parameters());
      for (const Tensor& weight : net->parameters()) tensors.push_back(weight.detach().cpu());
      return tensors;
    };
    train();
    checkpoint.save();
    const auto saved = state();
    train();
    auto before = state();
    const int failures = until_memory_suffices([&] { (void)checkpoint.load(); },
                                               [&] {
                                                 expect_same(state(), before);
                                                 train();
                                                 before = state();
                                               });
    EXPECT_GT(failures, 5);
    expect_same(state(), saved);
    train();
  }
}

/// What an optimizer on the host steps piece by piece, in several lists.
struct StepByPieces {
  /// Split weights; each group has its own list.
  StepByPieces()
      : masters(net, {.dtype = at::kBFloat16, .storage = torchamp::MasterStorage::split}),
        parameters(masters.parameters()) {
    optimizer.emplace(
        std::vector<torch::optim::OptimizerParamGroup>{{{parameters[0]}}, {{parameters[1]}}},
        torch::optim::AdamOptions(0.1));
    optimizer->drop_gradients_after_step();
  }

  void give_gradients(int i) {
    torch::manual_seed(static_cast<std::uint64_t>(i));
    for (Tensor& parameter : parameters) {
      parameter.mutable_grad() = at::randn(parameter.sizes());
    }
  }
  void step() { optimizer->step_scaled(at::full({}, 4.F), at::zeros({})); }

  std::vector<Tensor> values() {
    std::stringstream file;
    torch::save(masters, file);
    torch::nn::Linear plain(300, 300);
    torch::load(plain, file);
    return on_host(plain->parameters());
  }

  torch::nn::Linear net{300, 300};
  torchamp::MasterWeights masters;
  std::vector<Tensor> parameters;
  std::optional<torchamp::FusedAdam> optimizer;
};

TEST(OutOfHostMemory, AStepByPiecesIsCountedAndMadeOnceOrNotAtAll) {
  const auto run = [](bool fails) {
    torch::manual_seed(5);
    StepByPieces training;
    int failures = 0;
    for (int i = 0; i < 3; ++i) {
      training.give_gradients(i);
      const auto before = training.values();
      const auto step = [&] { training.step(); };
      const auto nothing_changed = [&] { expect_same(training.values(), before); };
      fails ? void(failures += until_memory_suffices<HostAllocationLimit>(step, nothing_changed))
            : step();
      training.masters.copy_to_model();
    }
    EXPECT_EQ(failures > 6, fails);
    return training.values();
  };
  expect_same(run(true), run(false));
}

TEST_F(OutOfMemory, KeptCastsStillFitTheWeights) {
  auto net = make_net();
  net->eval();
  const Tensor x = at::randn({8, 4}).to(sim0);
  const auto forward = [&](torchamp::WeightCache cache) {
    const torchamp::AutocastGuard autocast(sim0, {.dtype = at::kHalf, .cache = cache});
    return net->forward(x).detach();
  };
  using torchamp::WeightCache;
  for (const WeightCache cache : std::vector<WeightCache>{WeightCache::region, WeightCache::kept}) {
    for (int i = 0; i < 2; ++i) {
      Tensor y;
      EXPECT_GT(until_memory_suffices([&] { y = forward(cache); }, [] {}), 2);
      EXPECT_TRUE(at::equal(y.cpu(), forward(torchamp::WeightCache::none).cpu()));
      const at::NoGradGuard no_grad;
      for (Tensor& parameter : net->parameters()) parameter.mul_(1.5);
    }
  }
}

}  // namespace
