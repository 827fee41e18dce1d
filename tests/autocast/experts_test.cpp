// SPDX-License-Identifier: BSD-3-Clause
// Products that LibTorch has on no autocast list: a mixture of experts, and attention.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "support/devices.h"
#include "torchamp/autocast.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"

namespace {

using at::Tensor;
using torchamp::AutocastGuard;

Tensor grouped_mm(const Tensor& rows, const Tensor& matrices, const Tensor& ends) {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_grouped_mm", ""});
  std::vector<c10::IValue> stack{rows, matrices, ends, {}, {}};
  op->callBoxed(stack);
  return stack.front().toTensor();
}

/// Two experts, each with its own half of the rows.
struct Experts {
  explicit Experts(at::DeviceType device)
      : weight(at::linspace(-0.5, 0.5, 2 * 16 * 16).view({2, 16, 16}).to(device)),
        gate(at::linspace(-1, 1, 32).view({16, 2}).to(device)),
        ends(at::tensor({8, 16}, at::kInt).to(device)) {
    weight.requires_grad_();
    gate.requires_grad_();
  }
  Tensor forward(const Tensor& rows) const {
    const Tensor chosen = at::matmul(rows, gate).softmax(-1);
    return grouped_mm(rows, weight, ends) * chosen.select(1, 0).unsqueeze(1);
  }
  Tensor weight, gate, ends;
};

class ExpertsOn : public testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
    GTEST_SKIP() << "_grouped_mm has no kernel for a CPU before LibTorch 2.10";
#endif
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, ExpertsOn, all_devices(), device_name);

TEST_P(ExpertsOn, TrainUnderAGuard) {
  const Experts experts(GetParam());
  const Tensor rows = at::linspace(-1, 1, 256).view({16, 16}).to(GetParam());
  torchamp::FusedSGD optimizer({experts.weight, experts.gate}, torch::optim::SGDOptions(0.5));
  torchamp::GradScaler scaler({.init_scale = 16.});
  std::vector<float> losses;
  for (int step = 0; step < 10; ++step) {
    Tensor loss;
    {
      const AutocastGuard guard(GetParam(), at::kBFloat16);
      EXPECT_EQ(grouped_mm(rows, experts.weight, experts.ends).scalar_type(), at::kBFloat16);
      loss = (experts.forward(rows) - rows).pow(2).mean();
    }
    optimizer.zero_grad();
    scaler.scale(loss).backward();
    EXPECT_EQ(experts.weight.grad().scalar_type(), at::kFloat);
    scaler.step(optimizer);
    scaler.update();
    losses.push_back(loss.item<float>());
  }
  EXPECT_LT(losses.back(), 0.9F * losses.front());
}

TEST(Attention, TakesQueriesKeysAndValuesOfDifferentDtypes) {
  const Tensor x = at::linspace(-1, 1, 24).view({1, 2, 3, 4});
  for (const at::ScalarType region : {at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType q : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const Tensor query = x.to(q, /*non_blocking=*/false, /*copy=*/true).requires_grad_();
      const Tensor key = x.to(region), value = x;
      std::vector<Tensor> results;
      {
        const AutocastGuard guard(at::kCPU, region);
        results = {at::scaled_dot_product_attention(query, key, value),
                   std::get<0>(at::_scaled_dot_product_attention_math(query, key, value)),
                   std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value))};
      }
      for (const Tensor& result : results) {
        EXPECT_EQ(result.scalar_type(), region);
        EXPECT_TRUE(at::allclose(result.to(at::kFloat), results[0].to(at::kFloat), 0, 0.02));
        result.sum().backward();
        EXPECT_EQ(query.grad().scalar_type(), q);
      }
    }
  }
}

}  // namespace
