// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <memory>
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

std::vector<at::Tensor> double_all_(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) tensor.mul_(2);
  return tensors.vec();
}

std::vector<at::Tensor> sums(at::TensorList tensors, std::optional<at::ScalarType> dtype) {
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) results.push_back(tensor.sum(dtype));
  return results;
}

TORCH_LIBRARY(torchamp_test, library) {
  library.def("affine(Tensor x, Tensor w, Tensor? bias=None) -> Tensor", affine);
  library.def("stack_and_halves(Tensor[] tensors) -> (Tensor, Tensor[])", stack_and_halves);
  library.def("first_defined(Tensor?[] tensors) -> Tensor", first_defined);
  library.def("increment_(Tensor(a!) x) -> Tensor(a!)", [](at::Tensor& x) { return x.add_(1); });
  library.def("twice_out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
              [](const at::Tensor& x, at::Tensor& out) { return out.copy_(x * 2); });
  library.def("count(int n) -> int", [](int64_t n) { return n; });
  library.def("double_all_(Tensor[] tensors) -> Tensor[]", double_all_);
  library.def("zero_into(Tensor tensor) -> ()", [](at::Tensor tensor) { tensor.zero_(); });
  library.def("copy_to(Tensor self, Tensor dst) -> Tensor",
              [](const at::Tensor& self, at::Tensor dst) { return dst.copy_(self).clone(); });
  library.def("sums(Tensor[] tensors, *, ScalarType? dtype=None) -> Tensor[]", sums);
  library.def(
      "gather_sum(Tensor index, Tensor values, *, ScalarType? dtype=None) -> Tensor",
      [](const at::Tensor& index, const at::Tensor& values, std::optional<at::ScalarType> dtype) {
        return values.index_select(0, index).sum(dtype);
      });
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

TEST(CustomOp, LookupReturnsItsRule) {
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

TEST(CustomOp, OneThatWritesToWhatItDoesNotDeclareCannotBeCast) {
  const auto fp32 = [](const char* name) { Policy::standard().fp32({name}); };
  EXPECT_ERROR(fp32("torchamp_test::double_all_"), "it writes to an argument");
  EXPECT_ERROR(fp32("torchamp_test::copy_to"), "it writes to an argument");
  EXPECT_ERROR(fp32("torchamp_test::zero_into"), "it returns nothing");
  EXPECT_NO_THROW(Policy::standard().unchanged({"torchamp_test::double_all_"}));
}

// ---- Ops with an optional dtype -----------------------------------------------------------------

using Sums = std::vector<at::Tensor>(at::TensorList, std::optional<at::ScalarType>);

TEST(CustomOp, AListThatLeadsIsAskedForFp32AsATensorIs) {
  const AutocastGuard guard(
      at::kCPU, {.policy = Policy::standard().fp32({"torchamp_test::sums", "_foreach_norm"})});
  const std::vector<at::Tensor> tensors{ones(at::kBFloat16), ones(at::kFloat)};
  for (const at::Tensor& sum : call<Sums>("torchamp_test::sums", tensors, std::nullopt)) {
    EXPECT_EQ(sum.scalar_type(), at::kFloat);
  }
  for (const at::Tensor& norm : at::_foreach_norm(tensors)) {
    EXPECT_EQ(norm.scalar_type(), at::kFloat);
  }
  const auto asked = call<Sums>("torchamp_test::sums", tensors, at::kBFloat16);
  EXPECT_EQ(asked[0].scalar_type(), at::kBFloat16) << "a dtype that the caller gives stands";
}

TEST(CustomOp, ATensorOfFp64IsNotNarrowedByAnAskedDtype) {
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().fp32({"torchamp_test::sums"})});
  const std::vector<at::Tensor> tensors{ones(at::kBFloat16), ones(at::kDouble)};
  const auto results = call<Sums>("torchamp_test::sums", tensors, std::nullopt);
  EXPECT_EQ(results[0].scalar_type(), at::kFloat);
  EXPECT_EQ(results[1].scalar_type(), at::kDouble);
}

TEST(CustomOp, AComplexTensorDoesNotBecomeReal) {
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().fp32({"torchamp_test::sums"})});
  const std::vector<at::Tensor> tensors{ones(at::kBFloat16), ones(at::kComplexFloat)};
  const auto results = call<Sums>("torchamp_test::sums", tensors, std::nullopt);
  EXPECT_EQ(results[0].scalar_type(), at::kFloat);
  EXPECT_EQ(results[1].scalar_type(), at::kComplexFloat);
}

TEST(CustomOp, AnIndexThatLeadsDoesNotHideTheTensorsBehindIt) {
  using GatherSum = at::Tensor(const at::Tensor&, const at::Tensor&, std::optional<at::ScalarType>);
  const AutocastGuard guard(at::kCPU,
                            {.policy = Policy::standard().fp32({"torchamp_test::gather_sum"})});
  const at::Tensor sum = call<GatherSum>("torchamp_test::gather_sum", at::zeros({1}, at::kLong),
                                         ones(at::kBFloat16), std::nullopt);
  EXPECT_EQ(sum.scalar_type(), at::kFloat);
}

// ---- Ops that come and go -----------------------------------------------------------------------

std::unique_ptr<torch::Library> library_that_goes(torch::Library::Kind kind) {
  return std::make_unique<torch::Library>(kind, "torchamp_goes", std::nullopt, __FILE__, __LINE__);
}

TEST(CustomOp, OneWhoseLibraryWasUnloadedIsUnknownAgain) {
  auto library = library_that_goes(torch::Library::DEF);
  library->def("twice(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * 2; });
  library->def("thrice(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * 3; });
  const Policy policy = Policy::standard().lower_precision({"torchamp_goes::twice"});
  {
    const AutocastGuard guard(at::kCPU, {.policy = policy});
    EXPECT_EQ(
        call<at::Tensor(const at::Tensor&)>("torchamp_goes::twice", ones(at::kFloat)).scalar_type(),
        at::kBFloat16);
  }
  library.reset();
  EXPECT_ERROR(Policy::standard().fp32({"torchamp_goes::twice"}),
               "LibTorch knows no op 'torchamp_goes::twice', nor any other in its namespace");
  EXPECT_ERROR(Policy::standard().fp32({"torchamp_goes::twice.overload"}), "LibTorch knows no op");
  EXPECT_ERROR((void)policy.lookup("torchamp_goes::twice", at::kCPU), "LibTorch knows no op");
  const AutocastGuard of_an_op_that_has_gone(at::kCPU, {.policy = policy});

  library = library_that_goes(torch::Library::DEF);
  library->def("twice(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * 2; });
  EXPECT_EQ(policy.lookup("torchamp_goes::twice", at::kCPU), Cast::lower_precision);
  EXPECT_EQ(
      call<at::Tensor(const at::Tensor&)>("torchamp_goes::twice", ones(at::kFloat)).scalar_type(),
      at::kBFloat16);
}

void leave_argument_as_result(const c10::OperatorHandle&, torch::jit::Stack*) {}

TEST(CustomOp, AnOpRegisteredAgainWithOtherArgumentsIsAnErrorIfItIsCast) {
  auto library = library_that_goes(torch::Library::DEF);
  library->def("changes(Tensor x, Tensor y) -> Tensor",
               [](const at::Tensor& x, const at::Tensor& y) { return x * y; });
  const Policy policy = Policy::standard().lower_precision({"torchamp_goes::changes"});
  { const AutocastGuard installs(at::kCPU, {.policy = policy}); }
  library.reset();
  library = library_that_goes(torch::Library::DEF);
  // LibTorch compares the signatures of the kernels that have one.
  library->def("changes(Tensor x) -> Tensor",
               torch::CppFunction::makeFromBoxedFunction<&leave_argument_as_result>());
  const auto changes = [] {
    torch::jit::Stack stack{ones(at::kFloat)};
    c10::Dispatcher::singleton().findSchemaOrThrow("torchamp_goes::changes", "").callBoxed(stack);
    return stack.back().toTensor();
  };
  EXPECT_EQ(changes().scalar_type(), at::kFloat);
  const AutocastGuard guard(at::kCPU, {.policy = policy});
  EXPECT_ERROR(changes(), "'torchamp_goes::changes' was registered again with other arguments");
}

TEST(CustomOp, OneThatIsRegisteredAgainUnchangedIsCastAgain) {
  const auto product = [](const at::Tensor& x, const at::Tensor& y) { return x * y; };
  constexpr const char* schema = "returns(Tensor x, Tensor y) -> Tensor";
  auto library = library_that_goes(torch::Library::DEF);
  library->def(schema, product);
  const Policy policy = Policy::standard().lower_precision({"torchamp_goes::returns"});
  { const AutocastGuard installs(at::kCPU, {.policy = policy}); }
  const AutocastGuard guard(at::kCPU, {.policy = policy});
  const auto op = [] {
    return c10::Dispatcher::singleton().findSchemaOrThrow("torchamp_goes::returns", "");
  };
  for (int time = 0; time < 2; ++time) {
    library.reset();
    library = library_that_goes(torch::Library::DEF);
    library->def("returns(Tensor x) -> Tensor",
                 torch::CppFunction::makeFromBoxedFunction<&leave_argument_as_result>());
    torch::jit::Stack other{ones(at::kFloat)};
    EXPECT_ERROR(op().callBoxed(other), "was registered again with other arguments");
    library.reset();
    library = library_that_goes(torch::Library::DEF);
    library->def(schema, product);
    torch::jit::Stack stack{ones(at::kFloat), ones(at::kFloat)};
    op().callBoxed(stack);
    EXPECT_EQ(stack.back().toTensor().scalar_type(), at::kBFloat16);
  }
}

TEST(CustomOp, AnOverloadThatIsRegisteredLaterCanBeNamed) {
  auto library = library_that_goes(torch::Library::DEF);
  library->def("grows(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * 2; });
  EXPECT_ERROR(Policy::standard().fp32({"torchamp_goes::grows.by"}), "has no overload 'by'");
  auto more = library_that_goes(torch::Library::FRAGMENT);
  more->def("grows.by(Tensor x, Scalar by) -> Tensor",
            [](const at::Tensor& x, const at::Scalar& by) { return x * by; });
  const Policy policy = Policy::standard().fp32({"torchamp_goes::grows.by"});
  EXPECT_EQ(policy.lookup("torchamp_goes::grows.by", at::kCPU), Cast::fp32);
  EXPECT_EQ(
      Policy::standard().fp32({"torchamp_goes::grows"}).lookup("torchamp_goes::grows.by", at::kCPU),
      Cast::fp32);
  more.reset();
  EXPECT_ERROR(Policy::standard().fp32({"torchamp_goes::grows.by"}), "has no overload 'by'");
}

TEST(CustomOp, IsNotTakenForLibTorchsOpOfTheSameName) {
  torch::Library library(torch::Library::DEF, "mine", std::nullopt, __FILE__, __LINE__);
  library.def("sub(Tensor x, Tensor y) -> Tensor",
              [](const at::Tensor& x, const at::Tensor& y) { return x * y; });
  EXPECT_EQ(Policy::standard().lookup("mine::sub", at::kCPU), Cast::unchanged);
}

TEST(CustomOp, OfTwoNamesAsNearTheFirstIsSuggested) {
  const auto library = library_that_goes(torch::Library::DEF);
  for (const char* schema : {"near_c(Tensor x) -> Tensor", "near_b(Tensor x) -> Tensor"}) {
    library->def(schema, [](const at::Tensor& x) { return x * 2; });
  }
  EXPECT_ERROR((void)Policy::standard().lookup("torchamp_goes::near_a", at::kCPU),
               "Did you mean 'torchamp_goes::near_b'?");
}

}  // namespace
