// SPDX-License-Identifier: BSD-3-Clause
// The memory of sharded masters, and their state after memory runs out.
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "support/devices.h"
#include "support/launch.h"
#include "support/memory_meter.h"
#include "support/out_of_memory.h"
#include "support/sharded.h"
#include "support/staging_group.h"
#include "torchamp/distributed/sharded_masters.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"

namespace {

using at::Tensor;
using sharded::expect_same_bits;
using torchamp::MasterStorage;
using torchamp::ShardedMasterWeights;

// A process for each storage: one thread of the group may free what it has sent late.
class StorageOfShardedMasters : public ::testing::TestWithParam<MasterStorage> {};

TEST_P(StorageOfShardedMasters, IsTheirShareOfMastersAndStatesAlone) {
  if (ran_in_processes(4)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  constexpr std::int64_t width = 128, count = 2 * (width * width + width), bucket = 20'000;
  torch::nn::Sequential net(torch::nn::Linear(width, width), torch::nn::Linear(width, width));
  const MemoryMeter meter;
  ShardedMasterWeights masters(
      net.ptr(), group, {.dtype = at::kBFloat16, .storage = GetParam(), .bucket_bytes = bucket});
  torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(1e-3));
  net->forward(at::ones({1, width}, at::kBFloat16)).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
  masters.copy_to_model();
  // The model, and a quarter of masters and states.
  const std::int64_t expected =
      GetParam() == MasterStorage::full ? count * (2 + 12 / 4) : count * 2 + count * 10 / 4;
  EXPECT_GE(meter.bytes(), expected);
  EXPECT_LT(meter.bytes(), expected + bucket);
}

INSTANTIATE_TEST_SUITE_P(Full, StorageOfShardedMasters, ::testing::Values(MasterStorage::full));
INSTANTIATE_TEST_SUITE_P(Split, StorageOfShardedMasters, ::testing::Values(MasterStorage::split));

TEST(ShardedMasters, KeepTheGradientsOfTheirPiecesAlone) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  torch::nn::Linear net(4, 2);
  ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16});
  net->forward(at::ones({1, 4}, at::kBFloat16)).sum().backward();
  constexpr std::size_t share = (4 * 2 + 2) / 2;
  for (const Tensor& piece : masters.parameters()) {  // in one bucket
    EXPECT_EQ(piece.grad().storage().nbytes(), share * sizeof(float));
  }
}

/// What a plain model reads from the masters' file.
torch::nn::Linear in_a_plain_model(ShardedMasterWeights& masters) {
  masters.gather();
  std::stringstream file;
  torch::save(masters, file);
  torch::nn::Linear plain(3, 2);
  torch::load(plain, file, at::Device(at::kCPU));
  return plain;
}

TEST(ShardedMasters, AreKeptAndBroughtBackWithoutMemoryOfTheDevice) {
  SKIP_WITHOUT(at::kPrivateUse1);
  if (ran_in_processes(1)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    const auto net = to_device(torch::nn::Linear(3, 2), simulated::sim0);
    ShardedMasterWeights masters(net, group, {.dtype = at::kBFloat16, .storage = storage});
    auto before = in_a_plain_model(masters);
    const Tensor narrow = net->weight.detach().cpu();
    std::function<void()> back;
    {
      const simulated::AllocationLimit none(0);
      back = masters.keep();
    }
    std::stringstream file;
    torch::save(torch::nn::Linear(3, 2), file);
    torch::load(masters, file);
    EXPECT_FALSE(at::equal(net->weight.detach().cpu(), narrow));
    {
      const simulated::AllocationLimit none(0);
      back();
    }
    EXPECT_TRUE(at::equal(net->weight.detach().cpu(), narrow));
    expect_same_bits(*in_a_plain_model(masters), *before);
  }
}

TEST(ShardedMasters, LeaveTheModelInFp32AndLoadAllOrNothingIfMemoryRunsOut) {
  SKIP_WITHOUT(at::kPrivateUse1);
  if (ran_in_processes(1)) return;
  const auto group = c10::make_intrusive<StagingGroup>(make_group());
  for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
    const auto net = to_device(torch::nn::Linear(3, 2), simulated::sim0);
    torch::nn::Linear before(3, 2), other(3, 2);
    before->weight.set_data(net->weight.detach().cpu());
    before->bias.set_data(net->bias.detach().cpu());
    std::optional<ShardedMasterWeights> masters;
    EXPECT_GE(until_memory_suffices(
                  [&] {
                    masters.emplace(net, group,
                                    torchamp::ShardedMasterWeightsOptions{.dtype = at::kBFloat16,
                                                                          .storage = storage});
                  },
                  [&] {
                    EXPECT_TRUE(at::equal(net->weight.cpu(), before->weight));
                    EXPECT_TRUE(at::equal(net->bias.cpu(), before->bias));
                  }),
              4);
    expect_same_bits(*in_a_plain_model(*masters), *before);

    std::stringstream file;
    torch::save(other, file);
    EXPECT_GE(until_memory_suffices(
                  [&] {
                    file.seekg(0);
                    torch::load(*masters, file);
                  },
                  [&] { expect_same_bits(*in_a_plain_model(*masters), *before); }),
              2);
    expect_same_bits(*in_a_plain_model(*masters), *other);
  }
}

}  // namespace

#endif
