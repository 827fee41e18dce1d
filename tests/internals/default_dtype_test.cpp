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
using torchamp::detail::has_fast_bf16;
using training_steps::make_net;
using training_steps::Net;

TEST(TrainingStep, TakesTheDtypeThatIsFastWhereNoneIsAskedFor) {
  EXPECT_EQ(default_dtype(at::kCUDA, false), at::kHalf);
  EXPECT_EQ(default_dtype(at::kCPU, true), at::kBFloat16);
  EXPECT_EQ(default_dtype(at::kCPU, false), at::kFloat);
  Net net = make_net(at::kCPU);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  CollectedWarnings warnings;
  TrainingStep train(net, optimizer);
  const bool is_fast = has_fast_bf16();
  EXPECT_EQ(train.autocast().enabled, is_fast);
  EXPECT_EQ(warnings.text().empty(), is_fast) << warnings.text();
  const auto product = [&] {
    return train.evaluate([] { return at::ones({2, 2}).mm(at::ones({2, 2})).scalar_type(); });
  };
  EXPECT_EQ(product(), is_fast ? at::kBFloat16 : at::kFloat);
}

}  // namespace
