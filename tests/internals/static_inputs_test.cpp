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
  inputs.fill({one, one * 2});
  ASSERT_EQ(inputs.tensors().size(), 2U);
  EXPECT_TRUE(inputs.tensors()[1].equal(one * 2));
}

TEST(StaticInputs, FitTheSameShapesAndDtypesOnceThereAreAny) {
  StaticInputs inputs(at::kCPU);
  EXPECT_FALSE(inputs.fit({torch::ones({2})})) << "there are none yet";
  inputs.fill({torch::ones({2})});
  EXPECT_TRUE(inputs.fit({torch::zeros({2})}));
  EXPECT_FALSE(inputs.fit({torch::ones({3})}));
  EXPECT_FALSE(inputs.fit({torch::ones({2}, at::kDouble)}));
  EXPECT_FALSE(inputs.fit({torch::ones({2}, torch::requires_grad())}));
  EXPECT_FALSE(inputs.fit({at::Tensor()}));
  EXPECT_FALSE(inputs.fit({}));
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
