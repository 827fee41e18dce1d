// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/policy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <array>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "torchamp/autocast.h"
#include "torchamp/policy_text.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Cast;
using torchamp::Policy;
namespace ops = torchamp::ops;

at::Tensor ones(at::ScalarType dtype, at::IntArrayRef shape = {2, 2}) {
  return at::ones(shape, at::TensorOptions(dtype));
}

TEST(Policy, StandardPutsAdditionsAndReductionsInFp32OnEveryDevice) {
  const Policy policy = Policy::standard();
  for (const at::DeviceType device : {at::kCPU, at::kCUDA, at::kXPU, at::kMPS}) {
    for (const char* op : {"add", "sub", "rsub.Scalar", "sum", "mean.dim", "var", "cumsum"}) {
      EXPECT_EQ(policy.lookup(op, device), Cast::fp32) << op << " on " << device;
    }
  }
}

TEST(Policy, StandardFollowsTheCudaListsIfADeviceHasNoKernel) {
  const Policy policy = Policy::standard();
  EXPECT_EQ(policy.lookup("softmax", at::kCPU), Cast::fp32);
  EXPECT_EQ(policy.lookup("softmax", at::kCUDA), Cast::native);
  EXPECT_EQ(policy.lookup("mv", at::kCPU), Cast::lower_precision);
  EXPECT_EQ(policy.lookup("addcmul", at::kCPU), Cast::promote);
  EXPECT_EQ(policy.lookup("mm", at::kCPU), Cast::native);
}

TEST(Policy, EffectSaysWhatLibTorchsOwnKernelsDo) {
  for (const Policy& policy : {Policy::standard(), Policy::torch()}) {
    for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
      EXPECT_EQ(policy.lookup("linear", device), Cast::native);
      EXPECT_EQ(policy.effect("linear", device), Cast::lower_precision);
      EXPECT_EQ(policy.effect("mse_loss", device), Cast::fp32);
      EXPECT_EQ(policy.effect("relu", device), Cast::unchanged);
    }
  }
  EXPECT_EQ(Policy::torch().effect("cat", at::kCPU), Cast::promote);
  EXPECT_EQ(Policy::torch().effect("dot", at::kCUDA), Cast::promote);
  EXPECT_EQ(Policy::torch().effect("cudnn_convolution", at::kCUDA), Cast::lower_precision);
  EXPECT_EQ(Policy::torch().effect("softmax", at::kCPU), Cast::unchanged);
  EXPECT_EQ(Policy::torch().effect("softmax", at::kCUDA), Cast::fp32);
  EXPECT_EQ(Policy::standard().effect("add", at::kCPU), Cast::fp32);
  EXPECT_EQ(Policy::standard().fp32({"linear"}).effect("linear", at::kCPU), Cast::fp32);
  EXPECT_EQ(Policy::standard().fp32({"mm"}).native({"mm"}).effect("mm", at::kCPU),
            Cast::lower_precision);
  EXPECT_ERROR((void)Policy::standard().effect("lineer", at::kCPU),
               "Policy::effect: LibTorch knows no op 'lineer'. Did you mean 'linear'?");
  EXPECT_ERROR((void)Policy::standard().unchanged({"add.Scalar"}).effect("add", at::kCPU),
               "Policy::effect: the overloads of 'add' follow different rules");
}

TEST(Policy, LookupTakesADevice) {
  const at::Device cpu(at::kCPU), second(at::kCUDA, 1);
  EXPECT_EQ(Policy::standard().lookup("softmax", cpu), Cast::fp32);
  EXPECT_EQ(Policy::standard().lookup("softmax", second), Cast::native);
  EXPECT_EQ(Policy::standard().effect("softmax", second), Cast::fp32);
  EXPECT_EQ(Policy::standard().lookup("softmax", {at::kCUDA, 0}), Cast::native);
}

TEST(Policy, NamedEditsAreSet) {
  const auto text = [](Policy (*edit)(Policy)) { return to_text(edit(Policy::torch())); };
  const auto set = [](Cast rule) { return to_text(Policy::torch().set(rule, {"pow"})); };
  EXPECT_EQ(text([](Policy p) { return p.lower_precision({"pow"}); }), set(Cast::lower_precision));
  EXPECT_EQ(text([](Policy p) { return p.fp32({"pow"}); }), set(Cast::fp32));
  EXPECT_EQ(text([](Policy p) { return p.promote({"pow"}); }), set(Cast::promote));
  EXPECT_EQ(text([](Policy p) { return p.unchanged({"pow"}); }), set(Cast::unchanged));
  EXPECT_EQ(text([](Policy p) { return p.native({"pow"}); }), set(Cast::native));
}

TEST(Cast, PrintsItsName) {
  std::ostringstream out;
  out << Cast::lower_precision << ' ' << Cast::fp32;
  EXPECT_EQ(out.str(), "lower_precision fp32");
}

TEST(Policy, StandardLeavesTheRestUnchanged) {
  const Policy policy = Policy::standard();
  for (const char* op : {"relu", "max", "argmax", "topk", "add_.Tensor", "add.out", "mul"}) {
    EXPECT_EQ(policy.lookup(op, at::kCPU), Cast::unchanged) << op;
  }
}

TEST(Policy, TorchIsLibTorchsOwnKernelOrNothing) {
  const Policy policy = Policy::torch();
  EXPECT_EQ(policy.lookup("mm", at::kCPU), Cast::native);
  EXPECT_EQ(policy.lookup("add", at::kCPU), Cast::unchanged);
  EXPECT_EQ(policy.lookup("softmax", at::kCPU), Cast::unchanged);
  EXPECT_EQ(policy.lookup("softmax", at::kCUDA), Cast::native);
}

TEST(Policy, KernelsOfTorchampDoNotCountAsLibTorchs) {
  const AutocastGuard installs(at::kCPU, {.policy = Policy::standard()});
  EXPECT_EQ(Policy::torch().lookup("softmax", at::kCPU), Cast::unchanged);
  EXPECT_EQ(Policy::standard().lookup("softmax", at::kCPU), Cast::fp32);
}

TEST(Policy, TakesOneNameAListARangeOrAFamily) {
  const std::vector<std::string> vector{"relu", "gelu"};
  const std::array<const char*, 1> array{"tanh"};
  Policy policy = Policy::standard();
  policy.fp32("sigmoid").fp32({"mul", "div.Tensor"}).fp32(vector).fp32(array).fp32(ops::conv);
  for (const char* op : {"sigmoid", "mul", "div.Tensor", "relu", "gelu", "tanh", "conv2d"}) {
    EXPECT_EQ(policy.lookup(op, at::kCPU), Cast::fp32) << op;
  }
}

TEST(Policy, ANameWithoutOverloadMeansAllThatCanBeCast) {
  const Policy policy = Policy::standard().lower_precision({"add"});
  EXPECT_EQ(policy.lookup("add.Tensor", at::kCPU), Cast::lower_precision);
  EXPECT_EQ(policy.lookup("add.Scalar", at::kCPU), Cast::lower_precision);
  EXPECT_EQ(policy.lookup("add.out", at::kCPU), Cast::unchanged);
}

TEST(Policy, ALaterEditReplacesAnEarlierOne) {
  const Policy policy =
      Policy::standard().fp32(ops::matmul).lower_precision({"mm"}).native({"bmm"});
  EXPECT_EQ(policy.lookup("addmm", at::kCPU), Cast::fp32);
  EXPECT_EQ(policy.lookup("mm", at::kCPU), Cast::lower_precision);
  EXPECT_EQ(policy.lookup("bmm", at::kCPU), Cast::native);
}

TEST(Policy, NativeTakesAnOpBackToLibTorchsRule) {
  EXPECT_EQ(Policy::standard().native({"add"}).lookup("add", at::kCPU), Cast::unchanged);
  EXPECT_EQ(Policy::standard().native({"sum"}).lookup("sum", at::kCUDA), Cast::native);
}

TEST(Policy, ACopyDoesNotFollowLaterEdits) {
  Policy original = Policy::standard();
  const Policy copy = original;
  original.fp32({"relu"});
  EXPECT_EQ(copy.lookup("relu", at::kCPU), Cast::unchanged);
  EXPECT_EQ(Policy::standard().lookup("relu", at::kCPU), Cast::unchanged);
}

TEST(Policy, AGuardKeepsThePolicyItWasGiven) {
  Policy policy = Policy::standard();
  const AutocastGuard guard(at::kCPU, {.policy = policy});
  policy.lower_precision({"add"});
  EXPECT_EQ((ones(at::kBFloat16) + 1).scalar_type(), at::kFloat);
}

TEST(Policy, EachEditIsCarriedOutByTheOps) {
  const at::Tensor lower = ones(at::kBFloat16), wide = ones(at::kFloat);
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard()
                                                     .lower_precision({"relu"})
                                                     .fp32({"mul"})
                                                     .promote({"maximum"})
                                                     .unchanged({"mm"})
                                                     .native({"add"})});
  EXPECT_EQ(wide.relu().scalar_type(), at::kBFloat16);
  EXPECT_EQ((lower * lower).scalar_type(), at::kFloat);
  EXPECT_EQ(at::maximum(lower, wide).scalar_type(), at::kFloat);
  EXPECT_EQ(at::maximum(lower, lower).scalar_type(), at::kBFloat16);
  EXPECT_EQ(wide.mm(wide).scalar_type(), at::kFloat);
  EXPECT_EQ((lower + lower).scalar_type(), at::kBFloat16);
}

TEST(Policy, UnchangedReachesTheOpsThatAnOpCalls) {
  const at::Tensor x = ones(at::kFloat);
  {
    const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().unchanged({"linear"})});
    EXPECT_EQ(at::linear(x, x).scalar_type(), at::kFloat);
    EXPECT_EQ(x.mm(x).scalar_type(), at::kBFloat16);
  }
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().unchanged({"einsum"})});
  EXPECT_EQ(at::einsum("ij,jk->ik", {x, x}).scalar_type(), at::kFloat);
}

TEST(Policy, ARuleForAnInnerOpDoesNotReachTheOuterOp) {
  const at::Tensor x = ones(at::kFloat);
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().fp32({"mm", "addmm"})});
  EXPECT_EQ(x.mm(x).scalar_type(), at::kFloat);
  EXPECT_EQ(at::linear(x, x).scalar_type(), at::kBFloat16);
}

TEST(Policy, AnUnknownNameIsAnErrorWithTheNearestKnownOne) {
  EXPECT_ERROR(Policy::standard().fp32({"sofmax"}),
               "Policy::fp32: LibTorch knows no op 'sofmax'. Did you mean 'softmax'?");
  EXPECT_ERROR(Policy::standard().unchanged({"softmax.string"}),
               "Policy::unchanged: the op 'aten::softmax' has no overload 'string'. It has '");
  EXPECT_ERROR(Policy::standard().fp32({"outer.axis"}),
               "has no overload 'axis'. It has 'outer', 'outer.out'.");
  EXPECT_ERROR((void)Policy::standard().lookup("lieanr", at::kCPU), "Did you mean 'linear'?");
  // Of two that are as near, the one in more families.
  EXPECT_ERROR((void)Policy::standard().lookup("adddmm", at::kCPU), "Did you mean 'addmm'?");
  EXPECT_ERROR(Policy::standard().fp32({"no_such_library::relu"}),
               "LibTorch knows no op 'no_such_library::relu', nor any other in its namespace. "
               "First load the library that registers it.");
  EXPECT_ERROR((void)Policy::standard().lookup("", at::kCPU),
               "Policy::lookup: LibTorch knows no op ''");
}

TEST(Policy, ATypoInAUsersOwnFamilyIsAnErrorToo) {
  static constexpr std::string_view typo[] = {"relu", "sofmax"}, in_place[] = {"add_"};
  Policy policy = Policy::standard();
  EXPECT_ERROR(policy.fp32(torchamp::OpFamily("mine", typo)),
               "Policy::fp32: LibTorch knows no op 'sofmax'. Did you mean 'softmax'?");
  EXPECT_ERROR(policy.fp32(torchamp::OpFamily("norm", typo)), "'sofmax'");
  EXPECT_ERROR(policy.fp32(torchamp::OpFamily("mine", in_place)), "'add_' cannot be cast");
  EXPECT_EQ(policy.lookup("relu", at::kCPU), Cast::unchanged);
}

TEST(Policy, AnOpThatCannotBeCastIsAnErrorThatSaysWhy) {
  EXPECT_ERROR(Policy::standard().fp32({"add_"}),
               "'add_' cannot be cast: it writes to an argument");
  EXPECT_ERROR(Policy::standard().fp32({"mm.out"}), "it writes to an argument");
  EXPECT_ERROR(Policy::standard().lower_precision({"randn"}), "it takes no tensors");
  EXPECT_ERROR(Policy::standard().fp32({"transpose.int"}), "it returns a view of its argument");
  EXPECT_ERROR(Policy::standard().fp32({"norm.ScalarOpt_dtype"}), "the caller names its dtype");
}

TEST(Policy, AFailedEditLeavesThePolicyUnchanged) {
  Policy policy = Policy::standard();
  EXPECT_ERROR(policy.fp32({"relu", "no_such_op"}), "no_such_op");
  EXPECT_EQ(policy.lookup("relu", at::kCPU), Cast::unchanged);
}

TEST(Policy, LookupRefusesADeviceWithoutAutocast) {
  EXPECT_ERROR((void)Policy::standard().lookup("mm", at::kMeta),
               "Policy::lookup: LibTorch has no autocast for the device type 'meta'");
}

TEST(Policy, LookupOfOverloadsThatDifferListsThem) {
  const Policy policy = Policy::standard().unchanged({"add.Scalar"});
  EXPECT_ERROR((void)policy.lookup("add", at::kCPU),
               "follow different rules (Scalar: unchanged, Tensor: fp32)");
}

std::string printed(const Policy& policy) {
  std::ostringstream out;
  out << policy;
  return out.str();
}

TEST(Policy, PrintsTheSameWhateverRanBefore) {
  const std::string torch = printed(Policy::torch()), standard = printed(Policy::standard());
  { const AutocastGuard installs(at::kCPU, {.policy = Policy::torch().fp32({"sinc", "erf"})}); }
  EXPECT_EQ(printed(Policy::torch()), torch);
  EXPECT_EQ(printed(Policy::standard()), standard);
  EXPECT_EQ(torch.find("unchanged\n   "), std::string::npos) << torch;
}

TEST(Policy, PrintsARuleThatHoldsInOneDtypeOnly) {
  EXPECT_NE(printed(Policy::torch().fp32({"relu"}, {.dtype = at::kFloat}))
                .find("\n  fp32 when float32: relu\n"),
            std::string::npos);
}

TEST(Policy, PromoteGoesToTheWidestDtypeAmongTheArgumentsWhateverTheRegions) {
  const at::Tensor fp16 = ones(at::kHalf, {3}), bf16 = ones(at::kBFloat16, {3});
  const at::Tensor index = at::zeros({3}, at::kLong);
  const AutocastGuard guard(at::kCPU, at::kBFloat16);
  EXPECT_EQ(fp16.dot(fp16).scalar_type(), at::kHalf) << "as under Policy::torch()";
  EXPECT_EQ(at::atan2(fp16, fp16).scalar_type(), at::kHalf);
  EXPECT_EQ(at::addcmul(fp16, fp16, fp16).scalar_type(), at::kHalf);
  EXPECT_EQ(at::scatter_add(fp16, 0, index, fp16).scalar_type(), at::kFloat) << "it sums";
  EXPECT_EQ(at::index_put(fp16, {index}, fp16).scalar_type(), at::kHalf);
  EXPECT_EQ(fp16.dot(bf16).scalar_type(), at::kFloat) << "neither holds the other";
  EXPECT_EQ(at::atan2(ones(at::kFloat, {3}), fp16).scalar_type(), at::kFloat);
  EXPECT_EQ(at::atan2(index, index).scalar_type(), at::kFloat) << "nothing to cast";
}

TEST(Policy, StandardCastsWhatAnOpInPlaceReadsToTheDtypeOfWhatItWritesTo) {
  for (const at::ScalarType lower : {at::kHalf, at::kBFloat16}) {
    const at::Tensor wide = ones(at::kFloat), index = at::arange(2);
    const AutocastGuard guard(at::kCPU, lower);
    const at::Tensor product = at::mm(wide, wide);  // of twos
    at::Tensor into = wide.clone();
    into.index_put_({index}, product);
    EXPECT_TRUE(into.equal(product.to(at::kFloat))) << into;
    into.addmm_(product, wide);
    EXPECT_TRUE(into.equal(at::full({2, 2}, 6.F))) << into;
    EXPECT_EQ(into.scalar_type(), at::kFloat);
    at::Tensor low = product.clone();
    low.index_add_(0, index, wide);
    EXPECT_TRUE(low.equal(at::full({2, 2}, 3, low.options()))) << low;
    EXPECT_EQ(low.scalar_type(), lower);
    at::Tensor whole = at::zeros({2}, at::kLong);
    whole.index_put_({index}, at::ones({2}, at::kLong));
    EXPECT_TRUE(whole.equal(at::ones({2}, at::kLong)));
    at::Tensor twice = at::zeros({2, 2}, at::kDouble);
    twice.index_put_({index}, product);
    EXPECT_TRUE(twice.equal(product.to(at::kDouble)));

    at::Tensor learned = at::ones({2, 2}).requires_grad_();
    (wide.clone().index_put_({index}, at::mm(learned, wide)) * 3).sum().backward();
    EXPECT_TRUE(learned.grad().equal(at::full({2, 2}, 6.F))) << learned.grad();
  }
}

TEST(Policy, PromotedOpsInPlaceCastWhatTheyReadAndWriteToTheirArgument) {
  const at::Tensor wide = at::full({2}, 1.F + 0x1p-9F), low = at::full({2}, 0x1p-7F, at::kBFloat16);
  const auto sum = [&](const Policy& policy, const at::Tensor& to, const at::Tensor& from) {
    const AutocastGuard guard(at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
    const at::Tensor into = to.clone();
    EXPECT_TRUE(into.add_(from).is_same(into));
    return into;
  };
  for (const Policy& base : {Policy::standard(), Policy::torch()}) {
    const Policy promoted = Policy(base).promote({"add_"});
    EXPECT_EQ(promoted.lookup("add_.Tensor", at::kCPU), Cast::promote);
    EXPECT_TRUE(sum(promoted, low, wide).equal(sum(base, low, wide.to(at::kBFloat16))));
    EXPECT_TRUE(sum(promoted, wide, low).equal(wide + low.to(at::kFloat)));
    EXPECT_TRUE(sum(promoted, at::arange(2), at::arange(2)).equal(at::arange(2) * 2));
  }
  EXPECT_ERROR(Policy::torch().promote({"_foreach_add_"}), "'_foreach_add_' cannot be cast");
}

// As torch::nn::Linear adds its bias to three and more dimensions.
TEST(Policy, PromotedAdditionsInPlaceRoundABiasAsLinearDoes) {
  at::Tensor bias = at::full({2}, 1.F + 0x1p-8F + 0x1p-12F).requires_grad_();
  const at::Tensor product = at::full({3, 2}, 0x1p-8F, at::kBFloat16);
  const auto added = [&](const Policy& policy) {
    const AutocastGuard guard(at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
    return product.clone().add_(bias);
  };
  const at::Tensor rounded = added(Policy::standard().promote({"add_"}));
  EXPECT_TRUE(rounded.equal(product + bias.detach().to(at::kBFloat16)));
  EXPECT_FALSE(rounded.equal(added(Policy::standard()))) << "which rounds once";
  rounded.sum().backward();
  EXPECT_TRUE(bias.grad().equal(at::full({2}, 3.F)));
}

TEST(Policy, AnEditTakesARowForOpsInPlaceAway) {
  const at::Tensor wide = ones(at::kFloat), low = ones(at::kBFloat16), index = at::arange(2);
  for (const Policy& policy :
       {Policy::standard().unchanged({"index_put_", "lerp"}),
        Policy::standard().native({"index_put_", "lerp"}), Policy::torch()}) {
    EXPECT_EQ(policy.lookup("index_put_", at::kCPU), Cast::unchanged);
    const AutocastGuard guard(at::kCPU, {.policy = policy});
    EXPECT_ERROR(wide.clone().index_put_({index}, low), "source and destination dtypes match");
    EXPECT_ERROR((void)at::lerp(wide, low, 0.5), "expected dtype float");
  }
  EXPECT_EQ(Policy::standard().lookup("index_put_", at::kCUDA), Cast::promote);
  EXPECT_ERROR(Policy::standard().fp32("index_put_"), "cannot be cast");
}

TEST(Policy, MaskedFillIsInFp32IfItsValueDoesNotFit) {
  const at::Tensor mask = at::eye(2).to(at::kBool);
  const auto dtype = [&](at::ScalarType of, const at::Scalar& value) {
    return ones(of).masked_fill(mask, value).scalar_type();
  };
  constexpr double inf = std::numeric_limits<double>::infinity();
  {
    const AutocastGuard guard(at::kCPU, at::kHalf);
    EXPECT_EQ(dtype(at::kHalf, -1e9), at::kFloat);
    EXPECT_EQ(ones(at::kHalf).masked_fill(mask, -1e9).min().item<float>(), -1e9F);
    EXPECT_EQ(dtype(at::kHalf, 1 << 20), at::kFloat);
    EXPECT_EQ(dtype(at::kHalf, -65504.), at::kHalf);
    EXPECT_EQ(dtype(at::kHalf, 65505.), at::kFloat);
    EXPECT_EQ(dtype(at::kHalf, -inf), at::kHalf);
    EXPECT_EQ(dtype(at::kHalf, true), at::kHalf);
    EXPECT_EQ(dtype(at::kBFloat16, -1e9), at::kBFloat16);
    EXPECT_EQ(dtype(at::kBFloat16, 3.4e38), at::kFloat);
    EXPECT_EQ(dtype(at::kFloat, -1e9), at::kFloat);
    EXPECT_EQ(dtype(at::kLong, -1e9), at::kLong);
    EXPECT_ANY_THROW((void)dtype(at::kHalf, c10::complex<double>(1e9, 0.)));  // as LibTorch does
  }
  const AutocastGuard always(at::kCPU, {.policy = Policy::standard().fp32("masked_fill")});
  EXPECT_EQ(dtype(at::kHalf, 0.), at::kFloat);
}

TEST(Policy, WhatPolicyTorchComputesStandardComputesForEveryLayout) {
  const at::Tensor dense = at::linspace(-1, 1, 9).view({3, 3});
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor nested =
        at::_nested_tensor_from_tensor_list({dense.to(dtype), dense.to(dtype)});
    const at::Tensor coo = dense.to(dtype).to_sparse(), csr = dense.to(dtype).to_sparse_csr();
    const AutocastGuard guard(at::kCPU);
    EXPECT_EQ(nested.sum(at::IntArrayRef{-1}, true).scalar_type(), at::kFloat);
    EXPECT_EQ((nested + nested).scalar_type(), at::kFloat);
    for (const at::Tensor& sparse : {coo, csr}) {
      EXPECT_EQ(sparse.sum().scalar_type(), at::kFloat);
      if (sparse.is_sparse_csr() && !at::hasMKL()) continue;  // LibTorch adds these by MKL alone
      EXPECT_EQ((sparse + sparse).scalar_type(), at::kFloat);
      EXPECT_EQ((dense.to(dtype) + sparse).scalar_type(), at::kFloat);
      EXPECT_TRUE(at::allclose((sparse + sparse).to_dense(), dense.to(dtype).to(at::kFloat) * 2));
    }
  }
}

TEST(Policy, ANumberMinusATensorIsMadeOfInPlaceOpsInCpp) {
  const at::Tensor x = ones(at::kBFloat16);
  const AutocastGuard guard(at::kCPU);
  // ATen's operator fills a tensor like `x` and subtracts in place (guide/policies.md).
  EXPECT_EQ((1 - x).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::rsub(x, 1).scalar_type(), at::kFloat);
  EXPECT_EQ((1 + x).scalar_type(), at::kFloat);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= 11
TEST(Policy, OverloadsWithNamedDimensionsCanBeCovered) {
  const at::Dimname rows = at::Dimname::fromSymbol(at::Symbol::dimname("rows"));
  const at::Tensor x = at::ones({2}, at::kBFloat16).refine_names({rows});
  const auto expect_right = [&] {
    const at::Tensor sums = x.cumsum(rows), sum = x.sum(rows);
    EXPECT_EQ(sums.names(), at::DimnameList{rows});
    EXPECT_EQ(sums.scalar_type(), at::kBFloat16);
    EXPECT_EQ(sums.select(0, 1).item<float>(), 2);
    EXPECT_EQ(sum.item<float>(), 2);
  };
  {
    const AutocastGuard guard(at::kCPU,
                              {.policy = Policy::standard().unchanged({"cumsum", "sum"})});
    expect_right();
  }
  {
    const auto named = [](const torchamp::OpCall& call) { return !call.argument("dim").isNone(); };
    const AutocastGuard guard(
        at::kCPU, {.policy = Policy::torch().unchanged({"cumsum"}, {.predicate = named})});
    expect_right();
  }
  expect_right();
  EXPECT_ERROR(Policy::standard().fp32({"cumsum.dimname"}),
               "'cumsum.dimname' cannot be cast: it takes named dimensions");
}
#endif

TEST(Policy, PrintsItsEditsAndTheRulesOfBothDevices) {
  std::ostringstream out;
  out << Policy::torch().fp32({"relu"});
  const std::string text = out.str();
  EXPECT_NE(text.find("torchamp policy: torch\n  fp32: relu\n"), std::string::npos) << text;
  EXPECT_NE(text.find("on cpu\n"), std::string::npos);
  EXPECT_NE(text.find("on cuda\n"), std::string::npos);
  EXPECT_NE(text.find("  fp32\n    relu\n"), std::string::npos) << text;
  // On CUDA, the list that LibTorch's kernel is on.
  const std::string cuda = text.substr(text.find("on cuda\n"));
  const auto lower = cuda.find("  native: lower_precision\n"), wide = cuda.find("  native: fp32\n");
  EXPECT_LT(lower, cuda.find(" linear,")) << text;
  EXPECT_LT(cuda.find(" linear,"), wide) << text;
  EXPECT_LT(wide, cuda.find(" softmax.int,")) << text;
  const std::string cpu = text.substr(0, text.find("on cuda\n"));
  const auto cpu_lower = cpu.find("  native: lower_precision\n");
  const auto cpu_wide = cpu.find("  native: fp32\n"), both = cpu.find("  native: promote\n");
  EXPECT_LT(cpu_lower, cpu.find(" linear,")) << text;
  EXPECT_LT(cpu.find(" linear,"), cpu_wide) << text;
  EXPECT_LT(cpu_wide, cpu.find(" mse_loss,")) << text;
  EXPECT_LT(both, cpu.find(" stack")) << text;
  EXPECT_EQ(cpu.find("  native\n"), std::string::npos) << "what no list knows:\n" << text;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
}

at::ScalarType dtype_of_product(const Policy& policy) {
  const AutocastGuard guard(at::kCPU, {.policy = policy});
  return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type();
}

TEST(PolicyConditions, OfEarlierEditsEndWithAnEditWithoutOne) {
  const torchamp::When always{.predicate = [](const torchamp::OpCall&) { return true; }};
  Policy policy = Policy::standard().fp32("mm", always);
  EXPECT_EQ(dtype_of_product(policy), at::kFloat);
  EXPECT_EQ(dtype_of_product(policy.lower_precision("mm")), at::kBFloat16);
}

TEST(PolicyConditions, OfTheLaterEditCountIfBothHold) {
  const torchamp::When always{.predicate = [](const torchamp::OpCall&) { return true; }};
  const Policy policy = Policy::standard().fp32("mm", always).lower_precision("mm", always);
  EXPECT_EQ(dtype_of_product(policy), at::kBFloat16);
}

}  // namespace
