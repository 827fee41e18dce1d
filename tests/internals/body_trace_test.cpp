// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/graph/body_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torchamp/autocast.h"

namespace {

using ::testing::HasSubstr;
using torchamp::detail::BodyTrace;
using torchamp::detail::Observation;
using torchamp::detail::Watched;

std::shared_ptr<BodyTrace> trace_of(const std::function<void()>& body) {
  auto trace = std::make_shared<BodyTrace>(at::kCPU);
  const Observation observation("a test", trace, Watched::ops);
  body();
  return trace;
}

std::string difference(const std::function<void()>& before, const std::function<void()>& after) {
  return trace_of(before)->difference(*trace_of(after));
}

TEST(BodyTrace, DistinguishesCallsNumbersShapesAndOuterTensors) {
  const at::Tensor x = torch::ones({2, 3}), other = torch::ones({2, 3});
  const auto same = [&] { (void)(x * 2. + x).sum(); };
  EXPECT_EQ(difference(same, same), "");
  EXPECT_THAT(difference(same, [&] { (void)(x * 3. + x).sum(); }),
              HasSubstr("aten::mul takes another number"));
  EXPECT_THAT(difference(same, [&] { (void)(x * 2. - x).sum(); }),
              HasSubstr("it calls aten::sub where the call before called aten::add"));
  EXPECT_THAT(difference(same, [&] { (void)(x * 2. + other).sum(); }),
              HasSubstr("aten::add reads a tensor (Float[2, 3]) that is not among the inputs"));
  EXPECT_THAT(difference(same, [&] { (void)(x * 2. + x); }),
              HasSubstr("it calls aten::sum in one call and not in another"));
  const auto rows = [&](int64_t n) { return [&x, n] { (void)x.narrow(0, 0, n).exp(); }; };
  EXPECT_NE(difference(rows(1), rows(2)), "");
}

TEST(BodyTrace, DistinguishesListsOfIndices) {
  const at::Tensor x = torch::ones({2, 3}), value = torch::ones({});
  const at::Tensor rows = torch::zeros({1}, torch::kLong), others = torch::ones({1}, torch::kLong);
  const auto rows_of = [&](const at::Tensor& at) { return [&x, at] { (void)x.index({at}); }; };
  const auto columns_of = [&](const at::Tensor& at) {  // an undefined index before the other one
    return [&x, at] { (void)x.index({torch::indexing::Slice(), at}); };
  };
  const auto put = [&](const at::Tensor& at) {
    return [&, at] { (void)at::index_put(x, {at}, value); };
  };
  EXPECT_EQ(difference(rows_of(rows), rows_of(rows)), "");
  EXPECT_THAT(difference(rows_of(rows), rows_of(others)), HasSubstr("aten::index reads a tensor"));
  EXPECT_THAT(difference(columns_of(rows), columns_of(others)),
              HasSubstr("aten::index reads a tensor"));
  EXPECT_THAT(difference(put(rows), put(others)), HasSubstr("aten::index_put reads a tensor"));
  EXPECT_THAT(difference(rows_of(rows), rows_of(torch::zeros({2}, torch::kLong))),
              HasSubstr("with tensors of other shapes"));
}

TEST(BodyTrace, DistinguishesMissingArguments) {
  using torch::indexing::Slice;
  const at::Tensor x = torch::ones({3, 3}), at = torch::zeros({1}, torch::kLong);
  const at::Tensor value = torch::ones({1});
  const auto rows = [&] { (void)x.index({at}); };
  const auto columns = [&] { (void)x.index({Slice(), at}); };
  const auto write = [&](const std::vector<std::optional<at::Tensor>>& places) {
    return [&x, &value, places] {
      (void)at::index_put(x, c10::List<std::optional<at::Tensor>>(places), value);
    };
  };
  const auto clamp = [&](std::optional<at::Scalar> low, std::optional<at::Scalar> high) {
    return [&x, low, high] { (void)x.clamp(low, high); };
  };
  EXPECT_EQ(difference(rows, rows), "");
  EXPECT_EQ(difference(columns, columns), "");
  EXPECT_THAT(difference(rows, columns), HasSubstr("aten::index with tensors of other"));
  EXPECT_THAT(difference(columns, rows), HasSubstr("aten::index with tensors of other"));
  EXPECT_EQ(difference(write({std::nullopt, at}), write({std::nullopt, at})), "");
  EXPECT_THAT(difference(write({at, std::nullopt}), write({std::nullopt, at})),
              HasSubstr("aten::index_put with tensors of other"));
  EXPECT_EQ(difference(clamp(std::nullopt, 1), clamp(std::nullopt, 1)), "");
  EXPECT_THAT(difference(clamp(std::nullopt, 1), clamp(1, std::nullopt)),
              HasSubstr("aten::clamp takes another number"));
}

TEST(BodyTrace, DistinguishesListsOfNumbersAndTexts) {
  const at::Tensor x = torch::ones({2, 2});
  const auto permute = [&](std::vector<int64_t> order) {
    return [&x, order] { (void)x.permute(order); };
  };
  const auto product = [&](const char* equation) {
    return [&x, equation] { (void)at::einsum(equation, {x, x}); };
  };
  EXPECT_EQ(difference(permute({0, 1}), permute({0, 1})), "");
  EXPECT_THAT(difference(permute({0, 1}), permute({1, 0})),
              HasSubstr("aten::permute takes another number"));
  EXPECT_EQ(difference(product("ij,jk->ik"), product("ij,jk->ik")), "");
  EXPECT_THAT(difference(product("ij,jk->ik"), product("ij,kj->ik")),
              HasSubstr("it calls aten::einsum ij,kj->ik where the call before called"));
}

TEST(BodyTrace, IgnoresTheAddressesOfTensorsThatTheBodyMakes) {
  const at::Tensor x = torch::ones({2, 3});
  at::Tensor kept;  // so that the second one is elsewhere
  const auto body = [&] {
    const at::Tensor made = torch::ones({2, 3});
    (void)(x + made);
    kept = made;
  };
  EXPECT_EQ(difference(body, body), "");
}

TEST(BodyTrace, IgnoresOpsInsideOpsAndOpsWithoutGradients) {
  const at::Tensor x = torch::ones({2, 3}), weight = torch::ones({4, 3}, torch::requires_grad());
  const auto body = [&](bool warm) {
    return [&, warm] {
      const torchamp::AutocastGuard autocast(at::kCPU, at::kBFloat16);
      if (warm) {
        const at::NoGradGuard no_grad;
        (void)(x * 3);
      }
      (void)torch::linear(x, weight);
    };
  };
  EXPECT_EQ(difference(body(false), body(true)), "");
}

TEST(BodyTrace, KnowsMemoryFromBeforeThatIsGone) {
  at::Tensor before = torch::ones({2, 3});
  const at::Tensor stays = torch::ones({2, 3});
  const auto trace = trace_of([&] { (void)(before + stays + torch::ones({3})); });
  const auto gone = [&] {
    int count = 0;
    for (const auto& memory : trace->outer_memory()) count += memory.is_gone() ? 1 : 0;
    return count;
  };
  const auto memory = trace->outer_memory();
  EXPECT_EQ(memory.size(), 2U);
  before = at::Tensor();
  EXPECT_TRUE(memory[0].is_gone() || memory[1].is_gone());
  EXPECT_EQ(trace->outer_memory().size(), 1U);
  EXPECT_EQ(gone(), 0);
}

}  // namespace
