// SPDX-License-Identifier: BSD-3-Clause
// The buckets of a DistributedDataParallel: how they are filled, and that no graph may hold them.
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <vector>

#include "support/expect_error.h"
#include "support/launch.h"
#include "torchamp/detail/extras/distributed/buckets.h"
#include "torchamp/distributed/data_parallel.h"

namespace {

using at::Tensor;
using torchamp::DistributedDataParallel;

TEST(Distributed, IsRefusedInTheIterationOfAGraph) {
  if (ran_in_processes(1)) return;
  torch::nn::Linear model(4, 2);
  DistributedDataParallel net(model, make_group());
  {
    const torchamp::detail::GraphBody body;
    EXPECT_ERROR(net.forward(at::randn({6, 4})),
                 "DistributedDataParallel: it averages gradients on its own streams, which the "
                 "iteration of a CudaGraph cannot hold. Run that iteration eagerly");
    const auto no_sync = net.no_sync();
    EXPECT_NO_THROW(net.forward(at::randn({6, 4})));
  }
  EXPECT_NO_THROW(net.forward(at::randn({6, 4})).sum().backward());
}

TEST(Distributed, FillsASmallFirstBucketOfEachKindAndOthersToAnEighth) {
  const auto slots = [](std::int64_t bucket_bytes, std::int64_t mebibytes = 1000) {
    torchamp::detail::BucketLayout layout(/*processes=*/1, bucket_bytes, sizeof(float),
                                          mebibytes << 18);
    const Tensor half_a_mebibyte = at::empty({128, 1024});
    for (int i = 0; i < 7; ++i) {
      layout.add("weight", half_a_mebibyte, at::kFloat);
      layout.add("norm", half_a_mebibyte, at::kBFloat16);
    }
    std::vector<std::int64_t> sizes[2];
    for (const auto& bucket : layout.buckets()) {
      sizes[bucket.dtype == at::kFloat ? 0 : 1].push_back(bucket.slot / half_a_mebibyte.numel());
    }
    EXPECT_EQ(sizes[0], sizes[1]);
    return sizes[0];
  };
  EXPECT_EQ(slots(2 << 20), (std::vector<std::int64_t>{2, 4, 1}));
  EXPECT_EQ(slots(25 << 20), (std::vector<std::int64_t>{2, 5}));
  EXPECT_EQ(slots(25 << 20, 16), (std::vector<std::int64_t>{2, 4, 1}));
  EXPECT_EQ(slots(25 << 20, 7), (std::vector<std::int64_t>{2, 2, 2, 1}));
  EXPECT_EQ(slots(1), (std::vector<std::int64_t>{1, 1, 1, 1, 1, 1, 1}));
}

}  // namespace

#endif
