// SPDX-License-Identifier: BSD-3-Clause
// What makes the host wait for a device, as the iteration of a graph must not.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "torchamp/detail/extras/graph/iteration.h"

namespace {

using torchamp::detail::HostAccessWatch;

TEST(HostAccessWatch, NamesTheFirstOpThatNeedsTheValues) {
  const at::Tensor x = torch::ones({2, 2});
  const auto first = [](const auto& work) {
    const HostAccessWatch watch(at::kCPU);
    work();
    return watch.first();
  };
  EXPECT_EQ(first([&] { (void)(x + 1).sum(); }), "");
  EXPECT_EQ(first([&] {
              (void)x.nonzero();
              (void)x.sum().item<float>();
            }),
            "aten::nonzero (the result's shape depends on values) on a tensor of shape [2, 2]");
  EXPECT_NE(first([&] { (void)x.masked_select(x > 0); }), "");
  EXPECT_NE(first([&] { (void)at::_unique(x); }), "");
  EXPECT_NE(first([&] { (void)at::_unique2(x); }), "");
  EXPECT_NE(first([&] { (void)at::unique_dim(x, 0); }), "");
  EXPECT_NE(first([&] { (void)at::unique_consecutive(x); }), "");
  EXPECT_NE(first([&] { (void)at::repeat_interleave(x[0].to(at::kLong)); }), "");
  const at::Tensor counts = x[0].to(at::kLong);
  EXPECT_EQ(first([&] { (void)at::repeat_interleave(counts, /*output_size=*/2); }), "");
  EXPECT_EQ(first([&] { (void)at::repeat_interleave(x, counts, 0, /*output_size=*/2); }), "");
  EXPECT_EQ(first([&] { (void)at::repeat_interleave(x, 3); }), "");
  EXPECT_NE(first([&] { (void)at::repeat_interleave(x, counts, 0); }), "");
  EXPECT_NE(first([&] { (void)at::bincount(x[0].to(at::kLong)); }), "");
  EXPECT_NE(first([&] { (void)at::equal(x, x + 1); }), "");
}

TEST(HostAccessWatch, NamesCopiesThatWaitAndNoOthers) {
  const at::Tensor host = torch::ones({2}), device = torch::ones({2}, at::device(at::kMeta));
  const auto first = [](const auto& work) {
    const HostAccessWatch watch(at::kMeta);
    work();
    return watch.first();
  };
  const char* const text = "aten::copy_ (from the host to the device) on a tensor of shape [2]";
  EXPECT_EQ(first([&] { at::empty_like(device).copy_(host); }), text);
  EXPECT_EQ(first([&] { at::empty_like(device).copy_(host, /*non_blocking=*/true); }), text)
      << "the memory is not pinned";
  EXPECT_EQ(first([&] { at::empty_like(device).copy_(device); }), "");
  EXPECT_EQ(first([&] { at::empty_like(host).copy_(host); }), "");
  EXPECT_EQ(first([&] { (void)host.sum().item<float>(); }), "") << "the host may read its own";
}

}  // namespace
