// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/core/products/workspace.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <thread>

#include "torchamp/autocast.h"
#include "torchamp/cpu_products.h"

namespace {

using at::Tensor;
using torchamp::detail::Workspace;

Tensor in_16_bits(at::IntArrayRef sizes) {
  return at::randn(sizes).to(at::kBFloat16);
}

TEST(Workspace, GivesTheNextProductTheSameMemoryEvenAfterAnException) {
  const Tensor tensor = in_16_bits({8, 9});
  void* first = nullptr;
  try {
    Workspace workspace;
    first = workspace.copy_in_fp32(tensor).data_ptr();
    throw std::runtime_error("a product failed");
  } catch (const std::runtime_error&) {
  }
  Workspace workspace;
  EXPECT_EQ(workspace.copy_in_fp32(tensor).data_ptr(), first);
}

TEST(Workspace, KeepsTheOperandsOfAProductApartWhileItGrows) {
  std::thread([] {  // without memory
    for (int i = 0; i < 2; ++i) {
      Workspace workspace;
      const Tensor a = in_16_bits({3, 5}), b = in_16_bits({700, 11}), c = in_16_bits({2, 2, 2});
      const Tensor of_a = workspace.copy_in_fp32(a), of_b = workspace.copy_in_fp32(b.t());
      Workspace of_an_inner_product;
      const Tensor of_c = of_an_inner_product.copy_in_fp32(c);
      EXPECT_TRUE(at::equal(of_a, a.to(at::kFloat)));
      EXPECT_TRUE(at::equal(of_b, b.t().to(at::kFloat)));
      EXPECT_EQ(of_b.strides(), b.t().strides());
      EXPECT_TRUE(at::equal(of_c, c.to(at::kFloat)));
    }
  })
      .join();
}

TEST(Workspace, GivesALargeOperandSeparateMemory) {
  Workspace workspace;
  const Tensor small = workspace.copy_in_fp32(in_16_bits({2}));
  const Tensor large = workspace.copy_in_fp32(at::ones({Workspace::most}, at::kBFloat16));
  EXPECT_FALSE(large.is_alias_of(small));
  EXPECT_TRUE(workspace.copy_in_fp32(in_16_bits({2})).is_alias_of(small));
  EXPECT_EQ(large.sum().item<float>(), static_cast<float>(Workspace::most));
}

TEST(Workspace, ServesTrainingAfterInferenceModeAndTheOtherWayRound) {
  torchamp::set_cpu_products(torchamp::CpuProducts::fp32);
  { const torchamp::AutocastGuard decides(at::kCPU, at::kBFloat16); }
  for (const bool first : {true, false}) {
    std::thread([first] {
      const Tensor x = in_16_bits({4, 6}), w = in_16_bits({6, 3}).requires_grad_();
      const Tensor expected = x.to(at::kFloat).mm(w.detach().to(at::kFloat)).to(at::kBFloat16);
      for (const bool inference : {first, !first, first}) {
        const c10::InferenceMode mode(inference);
        const Tensor y = x.mm(w);
        EXPECT_TRUE(at::equal(y, expected));
        if (inference) continue;
        w.mutable_grad().reset();
        y.sum().backward();
        EXPECT_TRUE(at::equal(w.grad(), x.t().mm(at::ones_like(expected))));
      }
    }).join();
  }
  torchamp::set_cpu_products(torchamp::CpuProducts::fastest);
}

}  // namespace
