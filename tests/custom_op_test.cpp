// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "support/expect_error.h"
#include "torchamp/autocast.h"

namespace {

at::Tensor affine(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias) {
  const at::Tensor y = at::matmul(x, w);
  return bias ? y.add(*bias) : y;
}

std::tuple<at::Tensor, std::vector<at::Tensor>> stack_and_halves(at::TensorList tensors) {
  std::vector<at::Tensor> halves;
  for (const at::Tensor& tensor : tensors) halves.push_back(tensor * 0.5);
  return {at::stack(tensors), halves};
}

at::Tensor first_defined(const c10::List<std::optional<at::Tensor>>& tensors) {
  for (const std::optional<at::Tensor> tensor : tensors) {
    if (tensor) return *tensor * 2;
  }
  return {};
}

TORCH_LIBRARY(torchamp_test, library) {
  library.def("affine(Tensor x, Tensor w, Tensor? bias=None) -> Tensor", affine);
  library.def("stack_and_halves(Tensor[] tensors) -> (Tensor, Tensor[])", stack_and_halves);
  library.def("first_defined(Tensor?[] tensors) -> Tensor", first_defined);
  library.def("increment_(Tensor(a!) x) -> Tensor(a!)", [](at::Tensor& x) { return x.add_(1); });
  library.def("twice_out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
              [](const at::Tensor& x, at::Tensor& out) { return out.copy_(x * 2); });
  library.def("count(int n) -> int", [](int64_t n) { return n; });
}

template <class Signature, class... Args>
auto call(const char* name, Args&&... args) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(
      std::forward<Args>(args)...);
}

at::Tensor call_affine(const at::Tensor& x, const at::Tensor& w,
                       const std::optional<at::Tensor>& b) {
  return call<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&)>(
      "torchamp_test::affine", x, w, b);
}

using torchamp::AutocastGuard;
using torchamp::Cast;
using torchamp::Policy;

at::Tensor ones(at::ScalarType dtype) {
  return at::ones({2, 2}, dtype);
}

TEST(CustomOp, FollowsThePolicyWithTensorsAndOptionalTensors) {
  const AutocastGuard guard(
      at::kCPU,
      {.policy = Policy::standard().unchanged({"add"}).lower_precision({"torchamp_test::affine"})});
  const at::Tensor x = ones(at::kFloat);
  EXPECT_EQ(call_affine(x, x, std::nullopt).scalar_type(), at::kBFloat16);
  EXPECT_EQ(call_affine(x, x, x).scalar_type(), at::kBFloat16) << "the bias is cast too";
}

TEST(CustomOp, WithoutARuleTheOpsThatItCallsFollowTheirs) {
  const AutocastGuard guard(at::kCPU);
  const at::Tensor x = ones(at::kFloat);
  EXPECT_EQ(call_affine(x, x, std::nullopt).scalar_type(), at::kBFloat16) << "its matmul was cast";
}

TEST(CustomOp, FollowsThePolicyWithListsAndSeveralOutputs) {
  const AutocastGuard guard(at::kCPU,
                            {.policy = Policy::standard()
                                           .lower_precision({"torchamp_test::stack_and_halves"})
                                           .fp32({"torchamp_test::first_defined"})});
  const auto [stacked, halves] =
      call<std::tuple<at::Tensor, std::vector<at::Tensor>>(at::TensorList)>(
          "torchamp_test::stack_and_halves",
          std::vector<at::Tensor>{ones(at::kFloat), ones(at::kHalf)});
  EXPECT_EQ(stacked.scalar_type(), at::kBFloat16);
  for (const at::Tensor& half : halves) EXPECT_EQ(half.scalar_type(), at::kBFloat16);

  c10::List<std::optional<at::Tensor>> optional;
  optional.push_back(std::nullopt);
  optional.push_back(ones(at::kBFloat16));
  EXPECT_EQ((call<at::Tensor(const c10::List<std::optional<at::Tensor>>&)>(
                 "torchamp_test::first_defined", optional)
                 .scalar_type()),
            at::kFloat);
}

TEST(CustomOp, GradientsFlowThroughTheCasts) {
  const at::Tensor x = at::linspace(-1, 1, 4).view({2, 2});
  const at::Tensor w = at::linspace(0, 1, 4).view({2, 2}).requires_grad_();
  const at::Tensor by_hand = w.detach().clone().requires_grad_();
  {
    const AutocastGuard guard(
        at::kCPU, {.policy = Policy::torch().lower_precision({"torchamp_test::affine"})});
    call_affine(x, w, std::nullopt).sum(at::kFloat).backward();
  }
  x.to(at::kBFloat16).matmul(by_hand.to(at::kBFloat16)).sum(at::kFloat).backward();
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(w.grad(), by_hand.grad()));
}

TEST(CustomOp, LookupTellsItsRule) {
  const Policy policy = Policy::standard().promote({"torchamp_test::affine"});
  EXPECT_EQ(policy.lookup("torchamp_test::affine", at::kCUDA), Cast::promote);
  EXPECT_EQ(policy.lookup("torchamp_test::first_defined", at::kCUDA), Cast::unchanged);
}

TEST(CustomOp, OneThatCannotBeCoveredIsAnErrorThatSaysWhy) {
  const auto lower = [](const char* name) { Policy::standard().lower_precision({name}); };
  EXPECT_ERROR(lower("torchamp_test::increment_"),
               "Policy::lower_precision: 'torchamp_test::increment_' cannot be cast: it writes to "
               "an argument");
  EXPECT_ERROR(lower("torchamp_test::twice_out"), "it writes to an argument");
  EXPECT_ERROR(lower("torchamp_test::count"), "it takes no tensors");
  EXPECT_ERROR(lower("torchamp_test::afine"), "Did you mean 'torchamp_test::affine'?");
}

}  // namespace
