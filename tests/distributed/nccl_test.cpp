// SPDX-License-Identifier: BSD-3-Clause
// NCCL in a world of one, which takes neither Gloo nor a second device.
#include <gtest/gtest.h>

#include "support/devices.h"

#if !TORCHAMP_CUDA_GRAPHS || !__has_include(<nccl.h>)

TEST(Nccl, AveragesInAWorldOfOne) {
  SKIP_WITHOUT(at::kCUDA);
  GTEST_SKIP() << "compiled without the headers of CUDA or NCCL";
}

#else

#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "torchamp/distributed/data_parallel.h"
#include "torchamp/distributed/nccl.h"

TEST(Nccl, AveragesInAWorldOfOne) {
  SKIP_WITHOUT(at::kCUDA);
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(),
                                                             /*rank=*/0, /*size=*/1);
  torchamp::add_nccl(*group);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
  torch::nn::Linear model(4, 2);
  model->to(at::kCUDA);
  torchamp::DistributedDataParallel net(model, group);
  net.forward(at::ones({3, 4}, at::kCUDA)).sum().backward();
  EXPECT_TRUE(at::equal(model->weight.grad(), at::full({2, 4}, 3., at::kCUDA)));
  at::Tensor flag = at::ones({}, at::kCUDA);
  torchamp::found_inf_agreement(group)(flag);
  EXPECT_EQ(flag.item<float>(), 1.F);
}

#endif
