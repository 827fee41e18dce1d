// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/master_weights.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/master_nets.h"
#include "support/memory_meter.h"
#include "support/optimizers.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"
#include "torchamp/recompute.h"

namespace {

using at::Tensor;
using master_nets::clones;
using master_nets::expect_equal;
using master_nets::loss_of;
using master_nets::Net;
using torchamp::MasterWeights;

TEST(MasterWeights, KeepNormsAndNamedParametersInFp32) {
  Net net;
  const auto before = clones(net->parameters());
  const MasterWeights masters(net, {.dtype = at::kBFloat16, .keep_fp32 = {"head.bias"}});
  std::map<std::string, at::ScalarType> dtypes;
  for (const auto& item : net->named_parameters()) dtypes[item.key()] = item.value().scalar_type();
  EXPECT_EQ(dtypes, (std::map<std::string, at::ScalarType>{{"frozen", at::kBFloat16},
                                                           {"body.weight", at::kBFloat16},
                                                           {"body.bias", at::kBFloat16},
                                                           {"batch.weight", at::kFloat},
                                                           {"batch.bias", at::kFloat},
                                                           {"own.gain", at::kFloat},
                                                           {"head.weight", at::kBFloat16},
                                                           {"head.bias", at::kFloat}}));
  EXPECT_EQ(net->batch->running_mean.scalar_type(), at::kFloat);

  const auto named = masters.named_parameters();
  ASSERT_EQ(named.size(), 7u);  // all but the frozen one
  std::size_t i = 0;
  for (const auto& item : net->named_parameters()) {
    if (item.key() != "frozen") {
      EXPECT_EQ(named[i].first, item.key());
      EXPECT_TRUE(at::equal(named[i].second, before[i + 1])) << item.key();
      EXPECT_EQ(named[i].second.is_same(item.value()), item.value().scalar_type() == at::kFloat);
      EXPECT_TRUE(named[i].second.is_leaf() && named[i].second.requires_grad());
      ++i;
    }
  }
}

TEST(MasterWeights, TakeWholeModulesByNameAndNormsOnRequest) {
  Net net;
  const MasterWeights masters(net, {.keep_fp32 = {"head"}, .keep_norms = false});
  EXPECT_EQ(net->head->weight.scalar_type(), at::kFloat);
  EXPECT_EQ(net->batch->weight.scalar_type(), at::kHalf);
  EXPECT_ERROR(MasterWeights(Net(), {.keep_fp32 = {"hea"}}),
               "MasterWeights: keep_fp32 names 'hea', but the model has no parameter of that name");
  EXPECT_ERROR(MasterWeights(Net(), {.dtype = at::kFloat}),
               "MasterWeights: a model cannot be kept in Float");
}

TEST(MasterWeights, GiveASharedParameterOneMaster) {
  struct Tied : torch::nn::Module {
    Tied() { register_parameter("b", register_parameter("a", at::ones({2}))); }
  };
  const auto tied = std::make_shared<Tied>();
  const MasterWeights masters(tied);
  EXPECT_EQ(masters.parameters().size(), 1u);
  EXPECT_EQ(tied->named_parameters()["b"].scalar_type(), at::kHalf);
}

// A bf16 weight of 1 would stay 1: half of its last digit is 0.002.
TEST(MasterWeights, AddUpUpdatesThatSixteenBitsWouldLose) {
  torch::nn::Linear net(torch::nn::LinearOptions(4, 1).bias(false));
  torch::nn::init::ones_(net->weight);
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  torch::optim::SGD optimizer(masters.parameters(), 1e-4);
  for (int i = 0; i < 100; ++i) {
    optimizer.zero_grad();
    net->forward(at::ones({1, 4}, at::kBFloat16)).sum().backward();
    masters.take_gradients();
    optimizer.step();
    masters.copy_to_model();
  }
  expect_close(masters.parameters()[0], at::full({1, 4}, 0.99f));
  EXPECT_TRUE(at::equal(net->weight, at::full({1, 4}, 0.99f).to(at::kBFloat16)));
}

/// The same by hand, one parameter at a time.
TEST(MasterWeights, TrainAsAPlainLoopOverParametersDoes) {
  at::manual_seed(3);
  Net net;
  Net by_hand;
  {
    const at::NoGradGuard no_grad;
    for (const auto& item : by_hand->named_parameters()) {
      item.value().copy_(*net->named_parameters().find(item.key()));
    }
  }
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  torch::optim::Adam optimizer(masters.parameters(), torch::optim::AdamOptions(0.01));

  std::vector<Tensor> theirs;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // 16-bit parameter and master
  for (const auto& item : by_hand->named_parameters()) {
    const Tensor& parameter = item.value();
    const bool norm = item.key().starts_with("batch") || item.key().starts_with("own");
    Tensor master = parameter;
    if (!norm) {
      master = parameter.detach().clone();
      parameter.set_data(parameter.detach().to(at::kBFloat16));
    }
    if (!parameter.requires_grad()) continue;
    if (!norm) pairs.emplace_back(parameter, master.set_requires_grad(true));
    theirs.push_back(master);
  }
  torch::optim::Adam by_hand_optimizer(theirs, torch::optim::AdamOptions(0.01));

  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    by_hand_optimizer.zero_grad();
    for (int batch = 0; batch < 2; ++batch) {
      const Tensor x = at::randn({8, 4});
      loss_of(net, x).backward();
      masters.take_gradients();
      loss_of(by_hand, x).backward();
      for (auto& [parameter, master] : pairs) {
        const Tensor wide = parameter.grad().to(at::kFloat);
        master.mutable_grad() = master.grad().defined() ? master.grad() + wide : wide;
        parameter.mutable_grad().reset();
      }
    }
    optimizer.step();
    masters.copy_to_model();
    by_hand_optimizer.step();
    const at::NoGradGuard no_grad;
    for (auto& [parameter, master] : pairs) parameter.copy_(master);
  }
  expect_equal(masters.parameters(), theirs);
  expect_equal(net->parameters(), by_hand->parameters());
}

/// The ops that the calling thread calls, without those that they call in turn.
std::vector<std::string> ops_called_by(const std::function<void()>& body) {
  static thread_local std::vector<std::string>* names = nullptr;
  static thread_local int depth = 0;
  std::vector<std::string> result;
  names = &result;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
            if (depth++ == 0) names->emplace_back(op.name());
            return nullptr;
          },
          [](const at::RecordFunction&, at::ObserverContext*) { --depth; })
          .scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return result;
}

TEST(MasterWeights, CopyBackInOnePassOverAllParameters) {
  torch::nn::Sequential net;
  for (int i = 0; i < 10; ++i) net->push_back(torch::nn::Linear(4, 4));
  MasterWeights masters(net);
  EXPECT_EQ(ops_called_by([&] { masters.copy_to_model(); }),
            std::vector<std::string>{"aten::_foreach_copy_"});
}

TEST(MasterWeights, WorkWithScalerClippingAndFusedOptimizers) {
  for (const bool fused : {false, true}) {
    at::manual_seed(5);
    Net net;
    MasterWeights masters(net, {.dtype = at::kHalf});
    const auto optimizer = plain_or_fused_sgd(masters.parameters(), fused, 0.1);
    torchamp::GradScaler scaler({.init_scale = 1024.});
    for (const bool overflow : {false, true, false}) {
      const auto before = clones(masters.parameters());
      const auto model_before = clones(net->parameters());
      optimizer->zero_grad();
      const Tensor loss = loss_of(net, at::randn({8, 4}), at::kHalf);
      scaler.scale(overflow ? loss * 1e30 : loss).backward();
      masters.take_gradients();
      scaler.unscale_(*optimizer);
      torchamp::clip_grad_norm_(masters.parameters(), 0.5);
      EXPECT_EQ(scaler.step(*optimizer).stepped(), !overflow);
      scaler.update();
      masters.copy_to_model();
      if (overflow) {
        expect_equal(masters.parameters(), before);
        expect_equal(net->parameters(), model_before);
        continue;
      }
      double length = 0.;
      for (std::size_t i = 0; i < before.size(); ++i) {
        length += (masters.parameters()[i] - before[i]).pow(2).sum().item<double>();
      }
      EXPECT_GT(length, 0.);
      EXPECT_LE(std::sqrt(length), 0.1 * 0.5 * 1.001);
    }
    EXPECT_EQ(scaler.get_scale(), 512.);
  }
}

TEST(MasterWeights, WhoseGradientsAreTakenAfterUnscalingAreNotSteppedWith) {
  for (const bool fused : {false, true}) {
    Net net;
    MasterWeights masters(net, {.dtype = at::kHalf});
    const auto optimizer = plain_or_fused_sgd(masters.parameters(), fused, 0.1);
    torchamp::GradScaler scaler;
    const auto before = clones(masters.parameters());
    scaler.scale(loss_of(net, at::randn({8, 4}), at::kHalf)).backward();
    scaler.unscale_(*optimizer);  // finds those of the norms, in fp32
    masters.take_gradients();
    EXPECT_ERROR(scaler.step(*optimizer), "call MasterWeights::take_gradients() before unscale_");
    expect_equal(masters.parameters(), before);
  }
}

// What averages gradients over processes has its hooks there.
TEST(MasterWeights, LeaveTheNodesThatAccumulateGradientsInPlace) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  const auto node = torch::autograd::impl::grad_accumulator(net->body->weight);
  std::stringstream file;
  torch::save(masters, file);
  torch::load(masters, file);
  EXPECT_EQ(torch::autograd::impl::grad_accumulator(net->body->weight), node);
}

TEST(MasterWeights, HalveTheMemoryOfWeightsAndActivations) {
  struct Bytes {
    double weights, forward;
  };
  const auto measure = [](bool narrow) {
    constexpr std::int64_t width = 64, batch = 256;
    const MemoryMeter memory;
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) {
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    }
    const std::int64_t built = memory.bytes();
    std::optional<MasterWeights> masters;
    if (narrow) masters.emplace(net, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16});
    const Tensor x = at::randn({batch, width}, narrow ? at::kBFloat16 : at::kFloat);
    const std::int64_t before = memory.bytes();
    const Tensor y = net->forward(x);
    return Bytes{static_cast<double>(before - built - static_cast<std::int64_t>(x.nbytes())),
                 static_cast<double>(memory.bytes() - before)};
  };
  const Bytes plain = measure(false), narrow = measure(true);
  EXPECT_EQ(plain.weights, 0.);                 // the fp32 ones are there in both
  EXPECT_EQ(narrow.weights, 4 * 64 * 64 * 2.);  // the model's own
  EXPECT_EQ(narrow.forward, plain.forward / 2.);
}

TEST(MasterWeights, ComposeWithRecomputation) {
  at::manual_seed(9);
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  const Tensor x = at::randn({8, 4});
  const auto gradients = [&](bool checkpointed) {
    Tensor loss;
    {
      const torchamp::AutocastGuard autocast(at::kCPU, at::kBFloat16);
      loss = (checkpointed ? torchamp::checkpoint(net, x) : net->forward(x))
                 .to(at::kFloat)
                 .pow(2)
                 .mean();
    }
    loss.backward();
    masters.take_gradients();
    std::vector<Tensor> result;
    for (const Tensor& parameter : masters.parameters()) {
      result.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
    return result;
  };
  expect_equal(gradients(false), gradients(true));
}

TEST(MasterWeights, RefuseANullModel) {
  EXPECT_ERROR(MasterWeights(std::shared_ptr<torch::nn::Module>()), "the model is null");
}

TEST(MasterWeights, RefuseAWeightOfWhichManyElementsAreOne) {
  torch::nn::Linear net(3, 2);
  net->weight.set_data(at::ones({2, 1}).expand({2, 3}));
  for (const auto storage : {torchamp::MasterStorage::full, torchamp::MasterStorage::split}) {
    for (const bool main_gradients : {false, true}) {
      EXPECT_ERROR(
          MasterWeights(
              net, {.dtype = at::kBFloat16, .storage = storage, .main_gradients = main_gradients}),
          "MasterWeights: several elements of the parameter 'weight' (sizes [2, 3], "
          "strides [1, 0]) share memory, as after expand(), so no optimizer can step it. Give it "
          "its own memory: parameter.set_data(parameter.contiguous()).");
    }
  }
  EXPECT_EQ(net->bias.scalar_type(), at::kFloat) << "as it was";
  net->weight.set_requires_grad(false);
  const MasterWeights masters(net, {.dtype = at::kBFloat16});
  EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
}

TEST(MasterWeights, RefuseTwoParametersInTheSameMemory) {
  for (const auto storage : {torchamp::MasterStorage::full, torchamp::MasterStorage::split}) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
    const auto parameters = net->parameters();
    const Tensor flat = at::ones({12});
    for (std::size_t i = 0; i < 4; ++i) {  // next to each other in one piece of memory
      const auto begin = static_cast<int64_t>(i / 2 * 6 + i % 2 * 4);
      parameters[i].set_data(
          flat.narrow(0, begin, parameters[i].numel()).view(parameters[i].sizes()));
    }
    const MasterWeights apart(net, {.dtype = at::kBFloat16, .storage = storage});

    torch::nn::Sequential tied(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
    const auto weights = tied->parameters();
    weights[2].set_data(weights[0]);
    EXPECT_ERROR(MasterWeights(tied, {.dtype = at::kBFloat16, .storage = storage}),
                 "MasterWeights: the parameters '0.weight' and '1.weight' are two tensors in the "
                 "same memory, which the cast would separate. Use one tensor in both places");
    EXPECT_ERROR(
        MasterWeights(tied, {.dtype = at::kBFloat16, .keep_fp32 = {"0"}, .storage = storage}),
        "are two tensors in the same memory");
    EXPECT_TRUE(weights[2].is_alias_of(weights[0])) << "as it was";
    EXPECT_EQ(weights[1].scalar_type(), at::kFloat);

    weights[0].set_requires_grad(false);
    weights[2].set_requires_grad(false);
    const MasterWeights frozen(tied, {.dtype = at::kBFloat16, .storage = storage});
    EXPECT_TRUE(at::equal(weights[2], weights[0])) << "nobody changes either";
  }
}

TEST(MasterWeights, RefuseAModelWhoseMastersOthersKeep) {
  for (const auto storage : {torchamp::MasterStorage::full, torchamp::MasterStorage::split}) {
    for (const bool main_gradients : {false, true}) {
      Net net;
      const torchamp::MasterWeightsOptions options{
          .dtype = at::kBFloat16, .storage = storage, .main_gradients = main_gradients};
      std::optional<MasterWeights> first(std::in_place, net, options);
      const auto values = clones(first->parameters());
      for (const auto other : {torchamp::MasterStorage::full, torchamp::MasterStorage::split}) {
        EXPECT_ERROR(MasterWeights(net, {.dtype = at::kBFloat16, .storage = other}),
                     "MasterWeights: the parameter 'body.weight' has a master already");
      }
      expect_equal(first->parameters(), values);
      {
        const torchamp::AutocastGuard autocast(at::kCPU, at::kBFloat16);
        net->forward(at::randn({4, 4})).sum().backward();
      }
      first->take_gradients();
      EXPECT_TRUE(first->parameters()[0].grad().defined());
      const MasterWeights copy = *first;  // keeps the same masters
      first.reset();
      EXPECT_ERROR(MasterWeights(net, options), "has a master already");
    }
  }
  Net net;
  { const MasterWeights gone(net, {.dtype = at::kBFloat16, .keep_fp32 = {"head"}}); }
  MasterWeights masters(net, {.dtype = at::kBFloat16, .keep_norms = false});
  EXPECT_EQ(net->head->weight.scalar_type(), at::kBFloat16);
  masters.parameters()[0].mutable_grad() = at::ones_like(masters.parameters()[0].detach());
  EXPECT_NO_THROW(masters.zero_grad());
}

TEST(MasterWeights, OfTwoModelsMayShareAFrozenPart) {
  torch::nn::Linear trunk(4, 4);
  for (const Tensor& parameter : trunk->parameters()) parameter.set_requires_grad(false);
  const auto with_head = [&] { return torch::nn::Sequential(trunk, torch::nn::Linear(4, 2)); };
  const auto one = with_head(), other = with_head();
  const MasterWeights of_one(one, {.dtype = at::kBFloat16});
  const MasterWeights of_other(other, {.dtype = at::kBFloat16});
  EXPECT_EQ(of_one.parameters().size(), 2u);
  EXPECT_EQ(of_other.parameters().size(), 2u);
}

}  // namespace
