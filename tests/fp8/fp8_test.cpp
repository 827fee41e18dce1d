// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/labs/fp8.h"
#include "torchamp/policy_text.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support/expect_error.h"
#include "support/fp8_reference.h"
#include "support/warnings.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/labs/module_policy.h"
#include "torchamp/torchamp.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Cast;
using torchamp::Fp8Options;
using torchamp::Policy;
namespace ops = torchamp::ops;

Policy fp8_policy() {
  return torchamp::fp8(Policy::standard(), ops::dense);
}

/// Within a step of bf16 of `expected`, in fp64, by the largest of its terms.
void expect_close(const at::Tensor& result, const at::Tensor& expected, const at::Tensor& terms) {
  ASSERT_EQ(result.sizes(), expected.sizes());
  const at::Tensor bound = expected.abs() * 0x1p-8 + terms * 0x1p-20 + 1e-30;
  const at::Tensor distance = (result.to(at::kDouble) - expected).abs();
  EXPECT_TRUE((distance <= bound).all().item<bool>())
      << (distance - bound).max().item<double>() << '\n'
      << result << '\n'
      << expected;
}

/// x w^T, its gradients for the gradient `g`, all from the slow reference.
struct Reference {
  at::Tensor y, dx, dw, y_terms, dx_terms, dw_terms;

  Reference(const at::Tensor& x, const at::Tensor& w, const at::Tensor& g) {
    const at::Tensor xq = through(e4m3, x.reshape({-1, x.size(-1)}));
    const at::Tensor wq = through(e4m3, w);
    const at::Tensor gq = through(e5m2, g.reshape({-1, g.size(-1)}));
    y = xq.mm(wq.t()).reshape(g.sizes());
    dx = gq.mm(wq).reshape(x.sizes());
    dw = gq.t().mm(xq);
    y_terms = xq.abs().mm(wq.abs().t()).reshape(g.sizes());
    dx_terms = gq.abs().mm(wq.abs()).reshape(x.sizes());
    dw_terms = gq.abs().t().mm(xq.abs());
  }
};

TEST(Fp8, ResultAndGradientsEqualASlowReference) {
  torch::manual_seed(1);
  const std::vector<std::vector<int64_t>> shapes = {
      {4, 16, 8}, {16, 16, 16}, {1, 1, 1}, {3, 17, 5}, {33, 48, 31}, {2, 3, 7, 9}, {5, 2, 1}};
  for (const auto& shape : shapes) {
    const int64_t n = shape.back();
    const std::vector<int64_t> x_sizes(shape.begin(), shape.end() - 1);
    const torch::Tensor x = torch::randn(x_sizes).requires_grad_();
    const torch::Tensor w = torch::randn({n, x_sizes.back()}).requires_grad_();
    std::vector<int64_t> y_sizes = x_sizes;
    y_sizes.back() = n;
    const torch::Tensor g = torch::randn(y_sizes).to(torch::kBFloat16);
    torch::Tensor y;
    {
      const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
      y = torch::linear(x, w);
    }
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    y.backward(g);
    const Reference reference(x, w, g);
    SCOPED_TRACE(testing::PrintToString(shape));
    expect_close(y, reference.y, reference.y_terms);
    expect_close(x.grad(), reference.dx, reference.dx_terms);
    expect_close(w.grad(), reference.dw, reference.dw_terms);
    EXPECT_EQ(w.grad().scalar_type(), torch::kFloat);
  }
}

TEST(Fp8, ProductsOfSmallIntegersAreExact) {
  torch::manual_seed(2);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const torch::Tensor x = torch::randint(-4, 5, {7, 12}).to(torch::kFloat).requires_grad_();
    const torch::Tensor w = torch::randint(-1, 2, {5, 12}).to(torch::kFloat).requires_grad_();
    const torch::Tensor g = torch::randint(-2, 3, {7, 5}).to(dtype);
    const AutocastGuard guard(torch::kCPU, {.dtype = dtype, .policy = fp8_policy()});
    const torch::Tensor y = torch::linear(x, w);
    EXPECT_EQ(y.scalar_type(), dtype);
    y.backward(g);
    EXPECT_TRUE(y.to(at::kDouble).equal(x.to(at::kDouble).mm(w.to(at::kDouble).t())));
    EXPECT_TRUE(x.grad().to(at::kDouble).equal(g.to(at::kDouble).mm(w.to(at::kDouble))));
    EXPECT_TRUE(w.grad().to(at::kDouble).equal(g.to(at::kDouble).t().mm(x.to(at::kDouble))));
  }
}

TEST(Fp8, AllDenseOpsAndTransposedOrStridedFactorsGiveTheSame) {
  torch::manual_seed(3);
  const torch::Tensor x = torch::randn({6, 20}), w = torch::randn({9, 20}), b = torch::randn({9});
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  const torch::Tensor y = torch::linear(x, w);
  const torch::Tensor wide = torch::empty({6, 40});
  wide.slice(1, 0, 40, 2).copy_(x);
  EXPECT_TRUE(x.mm(w.t()).equal(y));
  EXPECT_TRUE(x.matmul(w.t()).equal(y));
  EXPECT_TRUE(wide.slice(1, 0, 40, 2).mm(w.t().contiguous()).equal(y));
  EXPECT_TRUE(x.t().contiguous().t().matmul(w.t()).equal(y));
  EXPECT_TRUE(torch::linear(x.view({2, 3, 20}), w).view({6, 9}).equal(y));
  EXPECT_TRUE(x.view({2, 3, 20}).matmul(w.t()).view({6, 9}).equal(y));
  EXPECT_EQ(x[0].matmul(w.t()).sizes(), (std::vector<int64_t>{9}));
  const torch::Tensor with_bias =
      (y.to(torch::kFloat) + b.to(torch::kBFloat16)).to(torch::kBFloat16);
  EXPECT_TRUE(torch::linear(x, w, b).equal(with_bias));
  EXPECT_TRUE(torch::addmm(b, x, w.t()).equal(with_bias));
  EXPECT_TRUE(torch::addmm(b, x, w.t(), 0, 1).equal(y));
  EXPECT_TRUE(torch::addmm(b, x, w.t(), 0, 2).equal(y * 2));
}

TEST(Fp8, GradientsOfBiasBetaAndAlphaAreAutogradsOwn) {
  const torch::Tensor x = torch::ones({3, 4}), w = torch::ones({4, 2}).requires_grad_();
  const torch::Tensor b = torch::zeros({2}).requires_grad_();
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  torch::addmm(b, x, w, 3, 2).sum().backward();
  EXPECT_TRUE(b.grad().equal(torch::full({2}, 9.)));
  EXPECT_TRUE(w.grad().equal(torch::full({4, 2}, 6.)));
}

TEST(Fp8, DenseReachesTorchNnLinear) {
  torch::nn::Linear linear(8, 4);
  torch::nn::Linear no_bias(torch::nn::LinearOptions(8, 4).bias(false));
  torchamp::CastRecorder recorder;
  {
    const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
    for (const auto& sizes : {std::vector<int64_t>{3, 8}, {2, 3, 8}}) {
      EXPECT_EQ(linear(torch::randn(sizes)).scalar_type(), torch::kBFloat16);
      EXPECT_EQ(no_bias(torch::randn(sizes)).scalar_type(), torch::kBFloat16);
    }
  }
  EXPECT_EQ(recorder.report().total().fp8, 4) << recorder.report();
  EXPECT_TRUE(recorder.report().total().not_fp8.empty()) << recorder.report();
}

TEST(Fp8, EmptyBatchesAndSizesGiveZeros) {
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  const std::vector<std::vector<int64_t>> shapes = {{0, 4, 3}, {2, 0, 3}, {2, 4, 0}, {0, 0, 0}};
  for (const auto& shape : shapes) {
    const torch::Tensor x = torch::ones({shape[0], shape[1]}).requires_grad_();
    const torch::Tensor w = torch::ones({shape[2], shape[1]}).requires_grad_();
    const torch::Tensor y = torch::linear(x, w);
    EXPECT_EQ(y.sizes(), (std::vector<int64_t>{shape[0], shape[2]}));
    EXPECT_EQ(y.abs().sum().item<double>(), 0);
    y.sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_EQ(w.grad().sizes(), w.sizes());
  }
  EXPECT_EQ(torch::linear(torch::ones({2, 0, 4}), torch::ones({3, 4})).sizes(),
            (std::vector<int64_t>{2, 0, 3}));
}

TEST(Fp8, AnInfOrNanInAFactorOrGradientMakesAllNan) {
  const float inf = std::numeric_limits<float>::infinity();
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
    torch::Tensor x = torch::ones({3, 4});
    x[1][2] = bad;
    const torch::Tensor w = torch::ones({2, 4}).requires_grad_();
    const torch::Tensor y = torch::linear(x, w);
    EXPECT_TRUE(y.isnan().all().item<bool>());
    y.sum().backward();
    EXPECT_TRUE(w.grad().isnan().all().item<bool>());
    w.mutable_grad() = torch::Tensor();
    torch::Tensor g = torch::ones({3, 2}, torch::kBFloat16);
    g[0][0] = bad;
    torch::linear(torch::ones({3, 4}), w).backward(g);
    EXPECT_TRUE(w.grad().isnan().all().item<bool>());
    w.mutable_grad() = torch::Tensor();
  }
}

TEST(Fp8, AnInfInAnInputMakesTheScalerSkipTheStep) {
  torch::nn::Linear model(4, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  torchamp::GradScaler scaler({.init_scale = 1024.});
  const auto step = [&](const torch::Tensor& x) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const AutocastGuard guard(torch::kCPU, {.dtype = torch::kHalf, .policy = fp8_policy()});
      loss = model(x).pow(2).mean();
    }
    scaler.scale(loss).backward();
    const bool stepped = scaler.step(optimizer).stepped();
    scaler.update();
    return stepped;
  };
  EXPECT_TRUE(step(torch::ones({3, 4})));
  const torch::Tensor before = model->weight.detach().clone();
  torch::Tensor x = torch::ones({3, 4});
  x[0][0] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(step(x));
  EXPECT_TRUE(model->weight.equal(before));
  EXPECT_EQ(scaler.get_scale(), 512.);
}

TEST(Fp8, ABf16RunUnderAnyScaleEndsWithTheSameWeights) {
  std::vector<torch::Tensor> weights;
  for (const double scale : {1., 65536., 0x1p40}) {
    torch::manual_seed(4);
    torch::nn::Sequential model(torch::nn::Linear(12, 16), torch::nn::ReLU(),
                                torch::nn::Linear(16, 3));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    torchamp::GradScaler scaler({.init_scale = scale, .growth_interval = 1000000});
    for (int i = 0; i < 20; ++i) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
        loss = torch::mse_loss(model->forward(torch::randn({8, 12})), torch::randn({8, 3}));
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
    }
    weights.push_back(model->parameters()[0].detach().clone());
  }
  EXPECT_TRUE(weights[0].equal(weights[1]));
  EXPECT_TRUE(weights[0].equal(weights[2]));
}

TEST(Fp8, DoesNothingInDisabledRegionsOrForOtherDtypes) {
  const torch::Tensor x = torch::randn({4, 8}), w = torch::randn({3, 8});
  {
    const AutocastGuard guard(torch::kCPU, {.enabled = false, .policy = fp8_policy()});
    EXPECT_TRUE(torch::linear(x, w).equal(x.mm(w.t())));
    EXPECT_EQ(torch::linear(x, w).scalar_type(), torch::kFloat);
  }
  torchamp::CastRecorder recorder;
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  const torch::Tensor doubles = x.to(torch::kDouble);
  EXPECT_EQ(torch::linear(doubles, w.to(torch::kDouble)).scalar_type(), torch::kDouble);
  EXPECT_EQ(torch::matmul(x.view({2, 2, 8}), w.t().expand({2, 8, 3})).scalar_type(),
            torch::kBFloat16);
  EXPECT_ERROR(torch::linear(x, torch::randn({3, 7})), "mat1 and mat2 shapes cannot be multiplied");
  EXPECT_ERROR(x.view({2, 2, 8}).mm(w.t()), "must be a matrix");
  const auto total = recorder.report().total();
  EXPECT_EQ(total.fp8, 0);
  EXPECT_EQ(total.not_fp8.at("the second factor has 3 dimensions"), 1);
  EXPECT_EQ(total.not_fp8.at("a factor is not in fp32 or 16 bits on the region's device"), 1);
  std::ostringstream out;
  out << recorder.report();
  EXPECT_NE(out.str().find("1 under the rule fp8 ran as lower_precision: the second factor has 3"),
            std::string::npos)
      << out.str();
}

TEST(Fp8, OnlyWorthwhileSizesRunInFp8WithThatOption) {
  torchamp::CastRecorder recorder;
  const AutocastGuard guard(torch::kCPU, {.policy = torchamp::fp8(Policy::standard(), ops::dense,
                                                                  Fp8Options::worthwhile())});
  const torch::Tensor small = torch::linear(torch::ones({2, 32}), torch::ones({1024, 32}));
  EXPECT_EQ(small.scalar_type(), torch::kBFloat16);
  (void)torch::linear(torch::ones({2, 24}), torch::ones({2048, 24}));
  (void)torch::linear(torch::ones({2, 32}), torch::ones({1040, 32}));
  const auto total = recorder.report().total();
  EXPECT_EQ(total.fp8, 1) << recorder.report();
  EXPECT_EQ(total.not_fp8.size(), 2u) << recorder.report();
}

TEST(Fp8, ConditionalRulesHoldIfTheirConditionsDo) {
  torchamp::CastRecorder recorder;
  const Policy policy = torchamp::fp8(Policy::standard(), ops::dense, {},
                                      {.predicate = [](const torchamp::OpCall& call) {
                                        return call.argument("self").toTensor().size(0) > 2;
                                      }});
  const AutocastGuard guard(torch::kCPU, {.policy = policy});
  (void)torch::ones({2, 4}).mm(torch::ones({4, 4}));
  (void)torch::ones({3, 4}).mm(torch::ones({4, 4}));
  EXPECT_EQ(recorder.report().total().fp8, 1) << recorder.report();
  EXPECT_EQ(policy.lookup("mm", torch::kCPU), Cast::native);
}

TEST(Fp8, AnOpThatCannotIsAnErrorAndLeavesThePolicyUnchanged) {
  Policy policy = Policy::standard();
  const auto* const before = policy.data().get();
  for (const char* op : {"softmax", "bmm", "conv2d", "add", "mm.out", "_addmm_activation"}) {
    EXPECT_ERROR((void)torchamp::fp8(policy, {"mm", op}),
                 "torchamp::fp8: '" + std::string(op) + "' cannot run in fp8");
  }
  EXPECT_ERROR((void)torchamp::fp8(policy, ops::matmul), "torchamp::fp8: 'bmm' cannot run in fp8");
  EXPECT_ERROR(policy.set(Cast::fp8, ops::conv),
               "cannot run in fp8: only linear, addmm, mm and matmul");
  EXPECT_EQ(policy.data().get(), before);
  policy.set(Cast::fp8, {"mm"});
  EXPECT_EQ(policy.lookup("mm", torch::kCPU), Cast::fp8);
  EXPECT_EQ(policy.effect("mm", torch::kCUDA), Cast::fp8);
  policy.native({"mm"});
  EXPECT_EQ(policy.lookup("mm", torch::kCPU), Cast::native);
}

TEST(Fp8, ARecipeThatThereIsNotIsAnError) {
  Policy policy = Policy::standard();
  EXPECT_ERROR(
      (void)torchamp::fp8(policy, ops::dense, {.recipe = static_cast<torchamp::Fp8Recipe>(5)}),
      "torchamp::fp8: 5 is not a recipe of Fp8Recipe.");
}

TEST(Fp8, IsPrintedWithItsOptions) {
  std::ostringstream out;
  out << torchamp::fp8(Policy::standard(), {"linear"}, {.strict = true}) << Cast::fp8;
  EXPECT_NE(out.str().find("  fp8(strict): linear\n"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("  fp8\n    linear\n"), std::string::npos) << out.str();
}

TEST(Fp8, ARegionWithoutOneProductInFp8WarnsAndNamesWhatItCalled) {
  torch::nn::Linear model(4, 2);
  const torch::Tensor x = torch::ones({3, 4});
  const Policy policy = torchamp::fp8(Policy::standard(), ops::linear);
  const auto warning = [&](const std::function<void()>& body) {
    const CollectedWarnings warnings;
    {
      const AutocastGuard guard(torch::kCPU, {.policy = policy});
      body();
    }
    return warnings.text();
  };
  EXPECT_NE(warning([&] { (void)model(x); }).find("Called instead: addmm."), std::string::npos);
  EXPECT_NE(warning([&] {
              (void)model(x);
              (void)model(x);
            }).find("Called instead: addmm."),
            std::string::npos);
  EXPECT_NE(warning([&] {
              (void)model(x);
              (void)torch::linear(x.to(torch::kDouble), model->weight.to(torch::kDouble));
            }).find("addmm, linear (a factor is not"),
            std::string::npos);
  EXPECT_EQ(warning([&] { (void)torch::linear(x, model->weight); }), "");
  EXPECT_EQ(warning([&] { (void)x.exp(); }), "");
  EXPECT_EQ(warning([&] {
              (void)model(x);
              const AutocastGuard inner(torch::kCPU, {.policy = fp8_policy()});
              (void)model(x);
            }),
            "");
  EXPECT_EQ(warning([&] {
              try {
                const AutocastGuard inner(torch::kCPU, {.policy = fp8_policy().native({"mm"})});
                (void)x.mm(x.t());
                throw 1;
              } catch (int) {
              }
            }),
            "");
}

TEST(Fp8, TheWarningOfARegionLeavesOutWhatModulesCallUnderTheirOwnPolicies) {
  torch::nn::Sequential model(
      torch::nn::Linear(4, 2),
      torch::nn::Functional([](const torch::Tensor& x) { return x.matmul(x.t()); }));
  torchamp::ModulePolicies{{"1", torchamp::fp8(Policy::standard(), ops::linear)}}.apply_to(*model);
  const CollectedWarnings warnings;
  {
    const AutocastGuard guard(torch::kCPU,
                              {.policy = torchamp::fp8(Policy::standard(), ops::linear)});
    (void)model->forward(torch::ones({3, 4}));
  }
  EXPECT_NE(warnings.text().find("Called instead: addmm."), std::string::npos) << warnings.text();
}

TEST(Fp8, AWeightMayBeUsedTwiceAndAGraphKept) {
  torch::manual_seed(5);
  const torch::Tensor x = torch::randn({4, 6}), w = torch::randn({6, 6}).requires_grad_();
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  const torch::Tensor y = torch::linear(torch::linear(x, w), w).sum();
  y.backward({}, /*retain_graph=*/true);
  const torch::Tensor once = w.grad().clone();
  y.backward();
  EXPECT_TRUE(w.grad().equal(once * 2));
  EXPECT_ERROR(y.backward(), "a second backward pass through an fp8 product");
}

TEST(Fp8, WithoutGradientsNothingIsRecorded) {
  const torch::Tensor x = torch::randn({4, 6}), w = torch::randn({6, 6}).requires_grad_();
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  const torch::Tensor recorded = torch::linear(x, w);
  {
    const torch::NoGradGuard no_grad;
    const torch::Tensor y = torch::linear(x, w);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(y.equal(recorded));
  }
  EXPECT_FALSE(torch::linear(x, w.detach()).requires_grad());
  const c10::InferenceMode inference;
  EXPECT_TRUE(torch::linear(x, w).equal(recorded));
}

TEST(Fp8, OnlyGradientsThatAreWantedAreMade) {
  const torch::Tensor x = torch::randn({4, 6}).requires_grad_(), w = torch::randn({6, 6});
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  torch::linear(x, w).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(w.grad().defined());
}

TEST(Fp8, ASecondDerivativeIsAnError) {
  const torch::Tensor x = torch::randn({4, 6}).requires_grad_();
  const torch::Tensor w = torch::randn({6, 6}).requires_grad_();
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  const torch::Tensor loss = torch::linear(x, w).pow(2).sum();
  const auto gradients = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
  EXPECT_ERROR(gradients[0].pow(2).sum().backward(), "fp8 products have no second derivative");
}

TEST(Fp8, ResultsMayBeWrittenToInPlaceAndInputsAfterwards) {
  const torch::Tensor x = torch::ones({2, 4}).requires_grad_(),
                      w = torch::ones({3, 4}).requires_grad_();
  const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
  torch::Tensor y = torch::linear(x.view({1, 2, 4}), w);
  y.add_(1).mul_(2);
  {
    const torch::NoGradGuard no_grad;
    w.zero_();  // the operands have been copied
  }
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({2, 4}, 6.)));
}

TEST(Fp8, ThreadsThatTakeOverTheStateRunInFp8Too) {
  torch::manual_seed(6);
  const torch::Tensor x = torch::randn({8, 16}), w = torch::randn({8, 16}).requires_grad_();
  torch::Tensor expected;
  std::vector<torch::Tensor> results(4);
  const CollectedWarnings warnings;
  {
    const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
    const at::ThreadLocalState state;
    std::vector<std::thread> threads;
    for (auto& result : results) {
      threads.emplace_back([&] {
        const at::ThreadLocalStateGuard taken(state);
        result = torch::linear(x, w);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(warnings.text(), "");
  {
    const AutocastGuard guard(torch::kCPU, {.policy = fp8_policy()});
    expected = torch::linear(x, w);
  }
  for (const auto& result : results) EXPECT_TRUE(result.equal(expected));
}

}  // namespace
