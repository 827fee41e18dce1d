// SPDX-License-Identifier: BSD-3-Clause
// Gradients of micro-batches within no_sync(), if a window ends early or is dropped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/launch.h"
#include "support/sharded.h"
#include "support/warnings.h"
#include "torchamp/accumulate.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"

namespace {

using at::Tensor;
using sharded::batch_of;
using sharded::expect_same_bits;
using sharded::loss_of;
using sharded::make_net;
using sharded::Net;
using torchamp::DistributedDataParallel;
using torchamp::ShardedMasterWeights;

torch::nn::Sequential linear_layers() {
  at::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::Linear(8, 8),
                               torch::nn::Linear(8, 2));
}

TEST(Distributed, WarnsOnceOfAStepWithGradientsThatAreThisProcesssOwn) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  constexpr const char* text = "so these gradients are local";
  for (const bool has_masters : {false, true}) {
    for (const bool safe : {false, true}) {
      for (const bool averages : {true, false}) {
        SCOPED_TRACE(c10::str(has_masters, ", ", safe, ", ", averages));
        auto model = linear_layers();
        std::optional<torchamp::MasterWeights> masters;
        if (has_masters) {
          masters.emplace(model, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16});
        }
        DistributedDataParallel net(model, group);
        torch::optim::SGD optimizer(has_masters ? masters->parameters() : model->parameters(), 0.1);
        torchamp::GradScaler scaler({.init_scale = 8.});
        const auto loss = [&](bool syncs) {
          const auto no_sync = net.no_sync(!syncs);
          const Tensor x = at::ones({1, 4}, has_masters ? at::kBFloat16 : at::kFloat);
          return net.forward(x).to(at::kFloat).pow(2).sum();
        };
        const auto before_unscale = [&] {
          if (averages) net.sync_gradients();
          if (masters) masters->take_gradients();
        };
        const CollectedWarnings warnings;
        torchamp::Accumulation window(scaler, optimizer, 2);
        DroppingAccumulation sums(scaler, optimizer);
        window.before_unscale(before_unscale);
        sums.before_unscale(before_unscale);
        for (int i = 0; i < 4; ++i) {
          if (safe) {
            const auto no_sync = net.no_sync();
            sums.backward(loss(false));
            sums.step();
          } else {
            window.backward(loss(i == 1));  // which averages what the first has left
          }
          if (masters && (safe || i % 2 == 1)) masters->copy_to_model();
          if (!safe && i == 1) {
            EXPECT_THAT(warnings.text(), testing::IsEmpty());
          }
        }
        if (averages) {
          EXPECT_THAT(warnings.text(), testing::IsEmpty());
        } else {
          EXPECT_THAT(warnings.text(), testing::HasSubstr(text));
          EXPECT_EQ(warnings.text().find(text), warnings.text().rfind(text));
        }
        sums.discard();
      }
    }
  }
}

TEST(Distributed, AveragesWhatMicroBatchesHaveLeftWhenAskedTo) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  struct Case {
    at::ScalarType dtype;
    bool has_masters, has_main_gradients;
  };
  for (const Case& one : {Case{at::kFloat, false, false},
                          {at::kDouble, false, false},
                          {at::kBFloat16, true, false},
                          {at::kBFloat16, true, true}}) {
    const at::ScalarType dtype = one.dtype;
    const bool has_masters = one.has_masters, has_main = one.has_main_gradients;
    SCOPED_TRACE(c10::str(dtype, ", ", has_main));
    auto model = linear_layers();
    std::optional<torchamp::MasterWeights> masters;
    if (has_masters) {
      masters.emplace(model,
                      torchamp::MasterWeightsOptions{.dtype = dtype, .main_gradients = has_main});
    } else {
      model->to(dtype);
    }
    DistributedDataParallel net(model, group, {.bucket_bytes = 100});
    const auto parameters = has_main ? masters->parameters() : model->parameters();
    const auto backward = [&](bool syncs) {
      const auto no_sync = net.no_sync(!syncs);
      const Tensor x = at::full({1, 4}, group->getRank() + 1., dtype);
      net.forward(x).to(at::kFloat).pow(2).sum().backward();
    };
    for (int i = 0; i < 2; ++i) backward(false);
    if (group->getRank() == 1) parameters[2].mutable_grad().reset();  // which only process 0 has
    std::vector<Tensor> expected;
    for (const Tensor& parameter : parameters) {
      expected.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                                    : at::zeros_like(parameter.detach()));
      torchamp::average_over(group)(expected.back());
    }
    for (int i = 0; i < 2; ++i) {  // the second finds nothing to do
      net.sync_gradients();
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        const Tensor& gradient = parameters[p].grad();
        EXPECT_EQ(gradient.scalar_type(), expected[p].scalar_type());
        const double tolerance = dtype == at::kBFloat16 ? 0.01 : dtype == at::kFloat ? 1e-5 : 1e-12;
        EXPECT_TRUE(at::allclose(gradient, expected[p], tolerance, tolerance * 1e-3)) << tolerance;
      }
      expect_same_everywhere(group, {parameters[0].grad(), parameters[2].grad()});
    }
    for (const Tensor& parameter : parameters) parameter.mutable_grad().reset();
    backward(true);
    expect_same_everywhere(group, {parameters[0].grad()});
  }
}

/// Two layers, of which a forward may leave out the second.
struct BranchesImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, bool uses_second) {
    return uses_second ? second(first(x)) : first(x);
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(3, 3))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(3, 3))};
};
TORCH_MODULE(Branches);

TEST(Distributed, AParameterThatAWindowLeavesUnusedHasNoGradientWhateverTheWindowBeforeUsed) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  Branches model;
  DistributedDataParallel net(model, group, {.find_unused_parameters = true});
  const auto backward = [&](bool uses_second, bool syncs) {
    const auto no_sync = net.no_sync(!syncs);
    net.forward(at::full({1, 3}, group->getRank() + 1.), uses_second).sum().backward();
  };
  for (const bool is_sent : {true, false}) {
    SCOPED_TRACE(is_sent);
    backward(/*uses_second=*/group->getRank() == 1, /*syncs=*/false);
    if (is_sent) {
      net.sync_gradients();
      expect_same_everywhere(group, {model->second->weight.grad()});
    }
    model->zero_grad();
    backward(false, true);
    EXPECT_FALSE(model->second->weight.grad().defined());
    expect_same_everywhere(group, {model->first->weight.grad()});
    model->zero_grad();

    backward(group->getRank() == 1, false);  // a window that goes on knows what it has used
    backward(false, true);
    ASSERT_TRUE(model->second->weight.grad().defined());
    expect_same_everywhere(group, {model->first->weight.grad(), model->second->weight.grad()});
    model->zero_grad();
  }
}

TEST(Distributed, AnAverageThatWasAskedForIsNotAveragedAgainByABackwardThatDoesNotUseIt) {
  if (ran_in_processes(3)) return;  // the sum of thirds is not exact
  const auto group = make_group();
  Branches model;
  DistributedDataParallel net(model, group, {.find_unused_parameters = true});
  at::manual_seed(static_cast<std::uint64_t>(group->getRank()));
  for (int i = 0; i < 8; ++i) {
    {
      const auto no_sync = net.no_sync();
      net.forward(at::randn({1, 3}), /*uses_second=*/true).pow(2).sum().backward();
    }
    net.sync_gradients();
    const Tensor average = model->second->weight.grad().clone();
    net.forward(at::randn({1, 3}), /*uses_second=*/false).sum().backward();
    EXPECT_TRUE(at::equal(model->second->weight.grad(), average));
    model->zero_grad();
  }
}

TEST(Distributed, AWindowThatEndsEarlyStepsAlikeOnAllProcesses) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  auto model = linear_layers();
  DistributedDataParallel net(model, group);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  torchamp::GradScaler scaler({.init_scale = 8.});
  torchamp::Accumulation accumulation(scaler, optimizer, 3);
  accumulation.before_unscale([&] { net.sync_gradients(); });
  const auto backward = [&](bool syncs) {
    const auto no_sync = net.no_sync(!syncs);
    (void)accumulation.backward(net.forward(at::full({1, 4}, group->getRank() + 1.)).pow(2).sum());
  };
  backward(false);
  backward(false);
  EXPECT_TRUE(accumulation.flush()->stepped());
  expect_same_everywhere(group, model->parameters());
  backward(false);
  accumulation.discard();
  for (const Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  for (int i = 0; i < 3; ++i) backward(i == 2);
  EXPECT_EQ(accumulation.pending(), 0);
  expect_same_everywhere(group, model->parameters());
}

/// What two processes train with windows of three micro-batches.
struct Windows {
  explicit Windows(const torchamp::ProcessGroupPtr& group)
      : rank(group->getRank()), masters(net, group, {.dtype = at::kBFloat16}) {
    masters.check_optimizer(optimizer);
  }
  void micro_batch(int number, bool sends) {
    const auto no_sync = masters.no_sync(!sends);
    if (accumulation.backward(loss_of(net, batch_of(rank, number)))) masters.copy_to_model();
  }
  bool has_gradients_in_model() const {
    return std::ranges::any_of(net->parameters(), [](auto& p) { return p.grad().defined(); });
  }

  int rank;
  Net net = make_net();
  ShardedMasterWeights masters;
  torch::optim::SGD optimizer{masters.parameters(), 0.1};
  torchamp::GradScaler scaler{{.init_scale = 64.}};
  torchamp::Accumulation accumulation{scaler, optimizer, 3};
};

TEST(ShardedMasters, SendWhatAWindowThatEndsEarlyHasLeft) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  Windows early(group), expected(group);
  for (Windows* const one : {&early, &expected}) {
    one->micro_batch(0, false);
    one->micro_batch(1, /*sends=*/one == &expected);
    EXPECT_EQ(one->has_gradients_in_model(), one == &early);
    const auto result = one->accumulation.flush();
    ASSERT_TRUE(result.has_value());
    EXPECT_TRUE(result->stepped());
    EXPECT_FALSE(one->has_gradients_in_model());
    one->masters.copy_to_model();
    for (int i = 2; i < 5; ++i) one->micro_batch(i, i == 4);
  }
  expect_same_bits(*early.net, *expected.net);
  expect_same_everywhere(group, early.net->parameters());
}

TEST(ShardedMasters, DropWhatADiscardedWindowHasLeft) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  Windows discarded(group), expected(group);
  discarded.micro_batch(0, false);
  discarded.accumulation.discard();
  EXPECT_FALSE(discarded.has_gradients_in_model());
  for (Windows* const one : {&discarded, &expected}) {
    for (int i = 1; i < 4; ++i) one->micro_batch(i, i == 3);
  }
  expect_same_bits(*discarded.net, *expected.net);

  DroppingAccumulation safe(discarded.scaler, discarded.optimizer);
  const auto backward = [&] { safe.backward(loss_of(discarded.net, batch_of(0, 0))); };
  {
    const auto no_sync = discarded.masters.no_sync();
    EXPECT_ERROR(backward(), "within no_sync() and not sent");
  }
  EXPECT_EQ(safe.pending(), 0);
  EXPECT_FALSE(discarded.has_gradients_in_model());
  backward();
  EXPECT_EQ(safe.step().kept(), 1);
}

TEST(ShardedMasters, SayThatAStepHasMissedGradientsThatWereNotSent) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  Windows one(group);
  {
    const auto no_sync = one.masters.no_sync();
    loss_of(one.net, batch_of(one.rank, 0)).backward();
  }
  one.optimizer.step();
  EXPECT_ERROR(one.masters.copy_to_model(), "within no_sync() were not sent");
  one.masters.sync_gradients();
  EXPECT_FALSE(one.has_gradients_in_model());
  for (const Tensor& piece : one.masters.parameters()) EXPECT_TRUE(piece.grad().defined());
  const Tensor sent = one.masters.parameters()[0].grad();
  one.masters.sync_gradients();  // nothing is left
  EXPECT_TRUE(one.masters.parameters()[0].grad().is_same(sent));
  one.masters.copy_to_model();
  {
    const auto no_sync = one.masters.no_sync();
    loss_of(one.net, batch_of(one.rank, 0)).backward();
  }
  one.net->zero_grad();
  one.masters.copy_to_model();
}

}  // namespace

#endif
