// SPDX-License-Identifier: BSD-3-Clause
// The dtype of a TrainingStep that is given none.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/training_steps.h"
#include "support/warnings.h"
#include "torchamp/training_step.h"

namespace {

using torchamp::TrainingStep;
using torchamp::detail::default_dtype;
using training_steps::make_net;
using training_steps::Net;

TEST(TrainingStep, ComputesIn16BitsOnEachDeviceIfNoDtypeIsSelected) {
  EXPECT_EQ(default_dtype(at::kCUDA), at::kHalf);
  EXPECT_EQ(default_dtype(at::kCPU), at::kBFloat16);
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const CollectedWarnings warnings;
  TrainingStep train(net, optimizer);
  EXPECT_TRUE(train.autocast().enabled);
  EXPECT_EQ(warnings.text(), "");
  const auto product = [&] {
    return train.evaluate([] { return at::ones({2, 2}).mm(at::ones({2, 2})).scalar_type(); });
  };
  EXPECT_EQ(product(), at::kBFloat16);
}

}  // namespace
