// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <sstream>
#include <vector>

#include "support/expect_error.h"
#include "support/launch.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"

namespace {

using at::Tensor;
using torchamp::MasterStorage;
using torchamp::MasterWeights;

/// A group that counts the bytes that its processes reduce.
class CountingGroup final : public c10d::ProcessGroup {
 public:
  explicit CountingGroup(torchamp::ProcessGroupPtr group)
      : ProcessGroup(group->getRank(), group->getSize()), group_(std::move(group)) {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    for (const Tensor& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
    return group_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return group_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& outputs,
                                           std::vector<Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return group_->allgather(outputs, inputs, options);
  }

  std::int64_t bytes = 0;

 private:
  torchamp::ProcessGroupPtr group_;
};

struct ProductImpl : torch::nn::Module {
  ProductImpl() {
    for (const char* name : {"a", "b", "c"}) register_parameter(name, at::ones({5}));
  }
  /// Its gradients are `factor` for "a" and "b", and for "c" if that is used.
  Tensor forward(double factor, bool uses_c = true) {
    const auto all = named_parameters();
    Tensor sum = all["a"] + all["b"];
    if (uses_c) sum = sum + all["c"];
    return (sum * factor).sum();
  }
};
TORCH_MODULE(Product);
constexpr std::int64_t elements = 15;

std::vector<Tensor> gradients_of(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

TEST(ReduceDtype, SaysHowManyBytesFp32GradientsTakeOnTheWire) {
  if (ran_in_processes(2)) return;
  const auto group = c10::make_intrusive<CountingGroup>(make_group());
  for (const std::optional<at::ScalarType> dtype :
       {std::optional<at::ScalarType>(), std::optional(at::kFloat), std::optional(at::kBFloat16),
        std::optional(at::kHalf)}) {
    const Product net;
    torchamp::DistributedDataParallel parallel(net, group, {.reduce_dtype = dtype});
    const std::int64_t before = group->bytes;
    parallel.forward(group->getRank() == 0 ? 1.001 : 3.).backward();
    EXPECT_EQ(group->bytes - before, elements * (!dtype || *dtype == at::kFloat ? 4 : 2));
    for (const Tensor& gradient : gradients_of(net->parameters())) {
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::allclose(gradient, at::full({5}, 2.0005F), dtype ? 0.01 : 1e-6)) << gradient;
    }
    expect_same_everywhere(group, gradients_of(net->parameters()));
  }
}

TEST(ReduceDtype, OfLocalGradientsIsTheDtypeOfTheTrainedParameters) {
  if (ran_in_processes(2)) return;
  const auto group = c10::make_intrusive<CountingGroup>(make_group());
  const auto sent = [&](bool has_frozen_doubles) {
    Product net;
    if (has_frozen_doubles) {
      net->register_parameter("frozen", at::ones({5}, at::kDouble), /*requires_grad=*/false);
    }
    torchamp::DistributedDataParallel parallel(net, group);
    {
      const auto no_sync = parallel.no_sync(true);
      parallel.forward(2.).backward();
    }
    const std::int64_t before = group->bytes;
    parallel.sync_gradients();
    return group->bytes - before;
  };
  const std::int64_t bytes = sent(false);
  EXPECT_GE(bytes, elements * 4);
  EXPECT_LT(bytes, elements * 8);
  EXPECT_EQ(sent(true), bytes);
}

TEST(ReduceDtype, LeavesAnOverflowOnTheWireToTheScaler) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const Product net;
    torchamp::DistributedDataParallel parallel(net, group, {.reduce_dtype = dtype});
    torchamp::FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    torchamp::GradScaler scaler({.init_scale = 65536.});
    scaler.scale(parallel.forward(group->getRank() == 0 ? 4. : 1.)).backward();
    EXPECT_EQ(scaler.step(optimizer).stepped(), dtype == at::kBFloat16);
    scaler.update();
    expect_same_everywhere(group, net->parameters());
  }
}

// Above 65504 there is nothing but inf in fp16.
TEST(ReduceDtype, GivesAveragesInFp16WhoseSumsWouldOverflow) {
  if (ran_in_processes(4)) return;
  const auto group = make_group();
  const Product net;
  torchamp::DistributedDataParallel parallel(net, group, {.reduce_dtype = at::kHalf});
  parallel.forward(40000.).backward();
  for (const Tensor& gradient : gradients_of(net->parameters())) {
    EXPECT_TRUE(at::equal(gradient, at::full({5}, 40000.))) << gradient;
  }
  Product sharded;
  torchamp::ShardedMasterWeights masters(sharded, group,
                                         {.keep_fp32 = {"a", "b", "c"}, .reduce_dtype = at::kHalf});
  sharded->forward(40000.).backward();
  for (const Tensor& gradient : gradients_of(masters.parameters())) {
    EXPECT_TRUE(((gradient == 40000.) | (gradient == 0.)).all().item<bool>()) << gradient;
  }
}

TEST(ReduceDtype, DoublesWhatSixteenBitGradientsTakeAndSumsThemInFp32) {
  if (ran_in_processes(2)) return;
  const auto group = c10::make_intrusive<CountingGroup>(make_group());
  for (const bool wide : {false, true}) {
    const Product net;
    MasterWeights masters(net, {.dtype = at::kBFloat16});
    torchamp::DistributedDataParallelOptions options;
    if (wide) options.reduce_dtype = at::kFloat;
    torchamp::DistributedDataParallel parallel(net, group, options);
    const std::int64_t before = group->bytes;
    parallel.forward(group->getRank() == 0 ? 256. : 4.).backward();
    EXPECT_EQ(group->bytes - before, elements * (wide ? 4 : 2));
    EXPECT_TRUE(at::equal(net->parameters()[0].grad(), at::full({5}, 130., at::kBFloat16)));
  }
}

TEST(ReduceDtype, IsOneThatGradientsHaveAndTheOnlyWordOnHowTheyAreSent) {
  if (ran_in_processes(1)) return;
  const auto group = make_group();
  const Product net;
  using Parallel = torchamp::DistributedDataParallel<Product>;
  EXPECT_ERROR(Parallel(net, group, {.reduce_dtype = at::kDouble}), "cannot be sent as Double");
  EXPECT_ERROR(Parallel(net, group,
                        {.communication = c10d::BuiltinCommHookType::FP16_COMPRESS,
                         .reduce_dtype = at::kHalf}),
               "communication and reduce_dtype both");
}

// In bf16 the sums of micro-batches would be 256 and 512, and their average 384.
TEST(MainGradientsOfProcesses, AreAveragedInFp32AfterTheyHaveAddedUp) {
  if (ran_in_processes(2)) return;
  const auto group = c10::make_intrusive<CountingGroup>(make_group());
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    const Product net;
    MasterWeights masters(
        net,
        {.dtype = at::kBFloat16, .keep_fp32 = {"b"}, .storage = storage, .main_gradients = true});
    const torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1));
    torchamp::DistributedDataParallel parallel(net, group, {.bucket_bytes = 24});
    const double factor = group->getRank() == 0 ? 256. : 512.;
    const std::int64_t before = group->bytes;
    for (int window = 0; window < 2; ++window) {
      for (const Tensor& parameter : masters.parameters()) parameter.mutable_grad().reset();
      {
        const auto no_sync = parallel.no_sync();
        parallel.forward(factor).backward();
      }
      parallel.forward(1.).backward();
      for (const Tensor& gradient : gradients_of(masters.parameters())) {
        EXPECT_EQ(gradient.scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(gradient, at::full({5}, 385.F))) << gradient;
      }
    }
    EXPECT_EQ(group->bytes - before, 2 * elements * 4);
  }
}

TEST(MainGradientsOfProcesses, TrainAllCopiesAlike) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  at::manual_seed(1);
  torch::nn::Linear net(4, 3);
  MasterWeights masters(
      net, {.dtype = at::kBFloat16, .storage = MasterStorage::split, .main_gradients = true});
  torchamp::DistributedDataParallel parallel(net, group, {.reduce_dtype = at::kBFloat16});
  torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(0.01));
  torchamp::GradScaler scaler({.init_scale = 4.});
  at::manual_seed(2 + static_cast<std::uint64_t>(group->getRank()));
  double first = 0., last = 0.;
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const Tensor loss =
        parallel.forward(at::randn({64, 4}, at::kBFloat16)).to(at::kFloat).pow(2).mean();
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    (step == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_LT(last, first);
  expect_same_everywhere(group, {net->weight.to(at::kFloat), net->bias.to(at::kFloat)});
}

TEST(MainGradientsOfProcesses, AreAveragedByOneDataParallelAtATime) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const torchamp::MasterWeightsOptions options{.dtype = at::kBFloat16, .main_gradients = true};
  const Product net;
  const MasterWeights masters(net, options);
  const auto expect_average = [&](auto& parallel) {
    for (const Tensor& parameter : masters.parameters()) parameter.mutable_grad().reset();
    parallel.forward(group->getRank() == 0 ? 2. : 4.).backward();
    EXPECT_TRUE(at::equal(masters.parameters()[0].grad(), at::full({5}, 3.F)));
  };
  {
    torchamp::DistributedDataParallel parallel(net, group);
    EXPECT_ERROR(torchamp::DistributedDataParallel(net, group),
                 "'a' are averaged by another DistributedDataParallel. Destroy that one first");
    EXPECT_ERROR(MasterWeights(net, options), "'a' are averaged by a DistributedDataParallel");
    EXPECT_ERROR(torchamp::ShardedMasterWeights(net, group, {.dtype = at::kBFloat16}),
                 "'a' are averaged by a DistributedDataParallel");
    expect_average(parallel);
  }
  torchamp::DistributedDataParallel parallel(net, group);
  expect_average(parallel);
}

TEST(SplitMastersOfProcesses, StartWithTheValuesOfTheFirst) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  at::manual_seed(1 + static_cast<std::uint64_t>(group->getRank()));
  torch::nn::Linear net(5, 3), read(5, 3);
  MasterWeights masters(net, {.dtype = at::kBFloat16, .storage = MasterStorage::split});
  torchamp::broadcast_module(*net, group);
  net->forward(at::ones({2, 5}, at::kBFloat16)).sum().backward();
  EXPECT_NO_THROW(masters.take_gradients()) << "this is no write of the program's";
  std::stringstream file;
  torch::save(masters, file);
  torch::load(read, file);
  at::manual_seed(1);
  const torch::nn::Linear first(5, 3);
  EXPECT_TRUE(at::equal(read->weight, first->weight));
  EXPECT_TRUE(at::equal(read->bias, first->bias));
}

TEST(MainGradientsOfProcesses, MayBeMissingOnAProcessWithFindUnusedParameters) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  for (const bool looks : {true, false}) {
    const Product net;
    MasterWeights masters(net, {.dtype = at::kBFloat16, .main_gradients = true});
    torchamp::DistributedDataParallel parallel(net, group, {.find_unused_parameters = looks});
    const auto pass = [&](bool uses_c) { parallel.forward(2., uses_c).backward(); };
    if (looks) {
      pass(/*uses_c=*/false);
      EXPECT_FALSE(masters.parameters()[2].grad().defined()) << "used nowhere";
      for (const Tensor& parameter : masters.parameters()) parameter.mutable_grad().reset();
      pass(/*uses_c=*/group->getRank() == 0);
      EXPECT_TRUE(at::equal(masters.parameters()[2].grad(), at::full({5}, 1.F)));
      EXPECT_TRUE(at::equal(masters.parameters()[0].grad(), at::full({5}, 2.F)));
    } else {
      EXPECT_ERROR(pass(/*uses_c=*/false), "has given the parameter 'c' no gradient");
    }
  }
}

}  // namespace

#endif
