// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <ATen/ATen.h>

#include <string>

#include "support/expect_error.h"
#include "support/launch.h"
#include "support/sharded.h"
#include "torchamp/distributed/sharded_masters.h"

namespace {

using sharded::make_net;
using sharded::Net;
using torchamp::MasterStorage;
using torchamp::ShardedMasterWeights;

TEST(ShardedMasters, RefuseOptionsAndModelsThatDifferBetweenProcesses) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  const bool is_second = group->getRank() == 1;
  using Options = torchamp::ShardedMasterWeightsOptions;
  const Options common{.dtype = at::kBFloat16};
  const auto expect_refusal = [&](const Net& net, const Options& others, const std::string& what) {
    EXPECT_ERROR(ShardedMasterWeights(net, group, is_second ? others : common),
                 "ShardedMasterWeights: process 1 has another " + what);
    EXPECT_EQ(net->first->weight.scalar_type(), at::kFloat) << what;
  };
  const auto with = [&](const auto& change) {
    Options options = common;
    change(options);
    return options;
  };
  expect_refusal(make_net(), with([](Options& o) { o.dtype = at::kHalf; }), "dtype than process 0");
  expect_refusal(make_net(), with([](Options& o) { o.storage = MasterStorage::split; }), "storage");
  expect_refusal(make_net(), with([](Options& o) { o.find_unused_parameters = true; }),
                 "find_unused_parameters");
  expect_refusal(make_net(), with([](Options& o) { ++o.bucket_bytes; }), "bucket_bytes");
  expect_refusal(make_net(), with([](Options& o) { o.reduce_dtype = at::kBFloat16; }),
                 "reduce_dtype");
  const std::string model = "model or other options (keep_fp32, keep_norms)";
  expect_refusal(make_net(), with([](Options& o) { o.keep_fp32 = {"last"}; }), model);
  expect_refusal(make_net(), with([](Options& o) { o.keep_norms = false; }), model);
  Net frozen = make_net(), other_buffer = make_net();
  frozen->last->bias.set_requires_grad(!is_second);
  expect_refusal(frozen, common, model);
  other_buffer->register_buffer("sums", at::zeros({2 + group->getRank()}));
  expect_refusal(other_buffer, common, model);
  const Net net = make_net();
  const ShardedMasterWeights masters(net, group, common);  // which all give alike
  EXPECT_EQ(net->first->weight.scalar_type(), at::kBFloat16);
}

}  // namespace

#endif
