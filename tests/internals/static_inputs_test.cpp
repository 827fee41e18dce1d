// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/graph/iteration.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "simulated_device/counts.h"
#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/expect_error.h"

namespace {

using torchamp::detail::StaticInputs;

TEST(StaticInputs, TakeAsManyEachTime) {
  StaticInputs inputs(at::kCPU);
  const at::Tensor one = torch::ones({2});
  inputs.fill({one, one});
  EXPECT_ERROR(inputs.fill({one}), "1 inputs, but the first call had 2");
  EXPECT_ERROR(inputs.fill({one, one, one}), "3 inputs, but the first call had 2");
  inputs.reset();
  EXPECT_TRUE(inputs.tensors().empty());
  inputs.fill({one});
  inputs.fill({one * 2});
  ASSERT_EQ(inputs.tensors().size(), 1U);
  EXPECT_TRUE(inputs.tensors()[0].equal(one * 2));
}

TEST(StaticInputs, DoNotWaitForCopiesOfPinnedMemory) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const c10::Device device(at::kPrivateUse1, 0);
  StaticInputs inputs(device);
  const at::Tensor pinned = torch::ones({2}, torch::TensorOptions().pinned_memory(true));
  inputs.fill({pinned});
  const simulated::Counts counts;
  inputs.fill({pinned});
  EXPECT_EQ(counts.now().host_to_device, 1);
  EXPECT_EQ(counts.now().waits, 0);
  EXPECT_TRUE(inputs.tensors()[0].cpu().equal(pinned));
}

}  // namespace
