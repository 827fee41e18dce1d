// SPDX-License-Identifier: BSD-3-Clause
// Ops that add up elements by an index, a window or a segment, in the forward or in the backward
// pass: 5,000 summands in 16 bits. See Note [Sums in 16 bits].
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "torchamp/autocast.h"
#include "torchamp/policy.h"

namespace {

using at::Tensor;
using torchamp::AutocastGuard;
using torchamp::Policy;

constexpr std::int64_t many = 5000;
using Tensors = std::vector<Tensor>;

/// Indices that all name the first element.
Tensor first(at::IntArrayRef shape) {
  return at::zeros(shape, at::kLong);
}

struct Sum {
  const char* name;
  std::function<Tensor(const Tensors&)> call;
  std::vector<std::vector<std::int64_t>> shapes;  // of arguments that are full of ones
};

Tensors ones(const Sum& sum, at::ScalarType dtype) {
  Tensors arguments;
  for (const auto& shape : sum.shapes) arguments.push_back(at::ones(shape, dtype));
  for (Tensor& argument : arguments) argument.requires_grad_();
  return arguments;
}

/// The result, then the gradients, for a gradient of ones.
Tensors outcome(const Tensor& result, const Tensors& arguments) {
  Tensors values{result};
  if (!result.requires_grad()) return values;
  for (const Tensor& gradient :
       torch::autograd::grad({result}, arguments, {at::ones_like(result)}, {}, false, true)) {
    values.push_back(gradient);
  }
  return values;
}

void expect_close_to_fp64(const Sum& sum) {
  const Tensors exact_arguments = ones(sum, at::kDouble);
  const Tensors exact = outcome(sum.call(exact_arguments), exact_arguments);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const Tensors arguments = ones(sum, dtype);
    Tensor result;
    {
      const AutocastGuard guard(at::kCPU, dtype);
      result = sum.call(arguments);
    }
    const Tensors values = outcome(result, arguments);
    ASSERT_EQ(values.size(), exact.size()) << sum.name;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!exact[i].defined()) continue;
      const double size = exact[i].abs().max().item<double>();
      const double error = (values[i].to(at::kDouble) - exact[i]).abs().max().item<double>();
      EXPECT_LE(error, 0.01 * size)
          << sum.name << " in " << dtype << (i == 0 ? "" : ", gradient " + std::to_string(i));
    }
  }
}

const std::vector<Sum> forward_sums = {
    {"index_add", [](auto& x) { return x[0].index_add(0, first({many}), x[1]); }, {{3}, {many}}},
    {"index_add, middle",
     [](auto& x) { return x[0].index_add(1, first({many}), x[1]); },
     {{2, 3, 2}, {2, many, 2}}},
    {"index_add, alpha",
     [](auto& x) { return x[0].index_add(0, first({many}), x[1], 2); },
     {{3, 2}, {many, 2}}},
    {"index_put",
     [](auto& x) { return x[0].index_put({first({many})}, x[1], true); },
     {{3}, {many}}},
    {"_unsafe_index_put",
     [](auto& x) { return at::_unsafe_index_put(x[0], {first({many})}, x[1], true); },
     {{3}, {many}}},
    {"put", [](auto& x) { return x[0].put(first({many}), x[1], true); }, {{3}, {many}}},
    {"index_reduce",
     [](auto& x) { return x[0].index_reduce(0, first({many}), x[1], "mean"); },
     {{3, 2}, {many, 2}}},
    {"scatter_add",
     [](auto& x) { return x[0].scatter_add(0, first({many}), x[1]); },
     {{3}, {many}}},
    {"scatter_reduce",
     [](auto& x) { return x[0].scatter_reduce(0, first({many}), x[1], "sum"); },
     {{3}, {many}}},
    {"scatter",
     [](auto& x) { return x[0].detach().scatter(0, first({many}), x[1].detach(), "add"); },
     {{3}, {many}}},
    {"segment_reduce",
     [](auto& x) { return at::segment_reduce(x[0], "sum", at::full({1}, many, at::kLong)); },
     {{many}}},
    {"segment_reduce, mean",
     [](auto& x) { return at::segment_reduce(x[0], "mean", at::full({1}, many, at::kLong)); },
     {{many, 2}}},
    {"col2im",
     [](auto& x) {
       return at::col2im(x[0], {100, 100}, {70, 70}, {1, 1}, {0, 0}, {1, 1});
     },
     {{1, 70 * 70, 31 * 31}}},
    {"addbmm",
     [](auto& x) { return at::addbmm(x[0], x[1], x[2]); },
     {{2, 2}, {many, 2, 1}, {many, 1, 2}}},
    {"histc", [](auto& x) { return at::histc(x[0].detach(), 2, 0, 1); }, {{many}}},
};

const std::vector<Sum> backward_sums = {
    {"index", [](auto& x) { return x[0].index({first({many})}); }, {{3}}},
    {"index of a column",
     [](auto& x) {
       return x[0].index({at::indexing::Slice(), first({many})});
     },
     {{3, 2}}},
    {"take", [](auto& x) { return x[0].take(first({many})); }, {{3}}},
    {"gather", [](auto& x) { return x[0].gather(0, first({many})); }, {{3}}},
    {"index_select, middle",
     [](auto& x) { return x[0].index_select(1, first({many})); },
     {{2, 3, 2}}},
    {"repeat_interleave",
     [](auto& x) { return x[0].repeat_interleave(at::full({3}, many, at::kLong), 0); },
     {{3}}},
    {"embedding", [](auto& x) { return at::embedding(x[0], first({many})); }, {{4, 8}}},
    {"embedding_bag",
     [](auto& x) { return std::get<0>(at::embedding_bag(x[0], first({many}), first({1}))); },
     {{4, 8}}},
    {"embedding_bag with weights",
     [](auto& x) {
       return std::get<0>(
           at::embedding_bag(x[0], first({many}), first({1}), false, 0, false, x[1]));
     },
     {{4, 8}, {many}}},
    {"adaptive_avg_pool1d",
     [](auto& x) { return at::adaptive_avg_pool1d(x[0], {many}); },
     {{1, 1, 1}}},
    {"adaptive_avg_pool2d, as area interpolation calls it",
     [](auto& x) {
       return at::adaptive_avg_pool2d(x[0], {70, 70});
     },
     {{1, 1, 1, 1}}},
    {"adaptive_max_pool2d",
     [](auto& x) {
       return std::get<0>(at::adaptive_max_pool2d(x[0], {70, 70}));
     },
     {{1, 1, 1, 1}}},
    {"avg_pool1d", [](auto& x) { return at::avg_pool1d(x[0], {300}, {1}); }, {{1, 1, many}}},
    {"avg_pool2d",
     [](auto& x) {
       return at::avg_pool2d(x[0], {70, 70}, {1, 1}, {0, 0}, false, true, 1);
     },
     {{1, 1, 140, 140}}},
    {"max_pool2d",
     [](auto& x) {
       return at::max_pool2d(at::constant_pad_nd(x[0], {70, 70, 70, 70}, -1), {71, 71}, {1, 1});
     },
     {{1, 1, 1, 1}}},
    {"im2col",
     [](auto& x) {
       return at::im2col(x[0], {70, 70}, {1, 1}, {0, 0}, {1, 1});
     },
     {{1, 1, 140, 140}}},
    {"unfold_copy", [](auto& x) { return at::unfold_copy(x[0], 0, 300, 1); }, {{many}}},
};

TEST(Sums, InTheForwardPassAreInFp32) {
  for (const Sum& sum : forward_sums) {
    expect_close_to_fp64(sum);
    const AutocastGuard guard(at::kCPU);
    EXPECT_EQ(sum.call(ones(sum, at::kBFloat16)).scalar_type(), at::kFloat) << sum.name;
  }
}

TEST(Sums, InTheBackwardPassAreInFp32OnACpu) {
  for (const Sum& sum : backward_sums) expect_close_to_fp64(sum);
}

TEST(Sums, OfAnEmbeddingBagAreInFp32ThoughItsWeightsNeedNoGradient) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const Tensor table = at::ones({4, 8}, dtype).requires_grad_();
    Tensor result;
    {
      const AutocastGuard guard(at::kCPU, dtype);
      result = std::get<0>(at::embedding_bag(table, first({many}), first({1}), false, 0, false,
                                             at::ones({many}, dtype)));
    }
    result.sum().backward();
    EXPECT_NEAR(table.grad()[0][0].item<double>(), many, 0.01 * many);
  }
}

TEST(Sums, InTheBackwardPassDoNotChangeTheResultNorItsDtype) {
  for (const Sum& sum : backward_sums) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      Tensors arguments = ones(sum, dtype);
      for (Tensor& argument : arguments) argument = (argument.detach() * 0.3).requires_grad_();
      const Tensor plain = sum.call(arguments);
      const AutocastGuard guard(at::kCPU, dtype);
      const Tensor recorded = sum.call(arguments);
      EXPECT_EQ(recorded.scalar_type(), dtype) << sum.name;
      EXPECT_TRUE(recorded.equal(plain)) << sum.name;
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(sum.call(arguments).equal(plain)) << sum.name;
    }
  }
}

TEST(Sums, ACallThatOnlyWritesTakesTheWidestDtypeOfItsArguments) {
  const Tensor x = at::ones({3}, at::kBFloat16), y = at::ones({1}, at::kBFloat16);
  const Tensor index = first({1});
  const AutocastGuard guard(at::kCPU);
  for (const bool is_wide : {false, true}) {
    const Tensor from = y.to(is_wide ? at::kFloat : at::kBFloat16);
    for (const Tensor& result :
         {x.index_put({index}, from), x.put(index, from), x.scatter(0, index, from),
          x.scatter_reduce(0, index, from, "amax"), x.index_reduce(0, index, from, "amin")}) {
      EXPECT_EQ(result.scalar_type(), from.scalar_type());
    }
  }
}

TEST(Sums, SparseGradientsOfEmbeddingsStaySparse) {
  for (const Policy& policy : {Policy::standard(), Policy::torch()}) {
    const Tensor weight = at::ones({4, 2}, at::kBFloat16).requires_grad_();
    const AutocastGuard guard(at::kCPU, {.policy = policy});
    at::embedding(weight, first({3}), -1, false, /*sparse=*/true).sum().backward();
    EXPECT_TRUE(weight.grad().is_sparse());
    EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
  }
}

TEST(Sums, AnEditTakesTheFp32BackwardPassAway) {
  for (const Policy& policy :
       {Policy::standard().unchanged("embedding"), Policy::standard().native("embedding")}) {
    const Tensor weight = at::ones({4, 2}, at::kBFloat16).requires_grad_();
    const AutocastGuard guard(at::kCPU, {.policy = policy});
    at::embedding(weight, first({many})).backward(at::ones({many, 2}, at::kBFloat16));
    EXPECT_EQ(weight.grad().max().item<float>(), 256);
  }
}

}  // namespace
