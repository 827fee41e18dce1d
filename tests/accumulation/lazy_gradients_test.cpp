// SPDX-License-Identifier: BSD-3-Clause
// Gradients whose values are still to be conjugated or negated: what .conj(), .mH and
// .conj().imag() give.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/accumulate.h>
#include <torchamp/clip_grad.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>
#include <torchamp/overflow_report.h>

#include <functional>
#include <vector>

#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/optimizer_kinds.h"
#include "support/optimizers.h"
#include "support/tolerances.h"

namespace {

Tensor resolved(const Tensor& t) {
  return t.resolve_conj().resolve_neg().clone();
}

struct LazyGradient {
  std::string name;
  Tensor gradient;
};

std::ostream& operator<<(std::ostream& out, const LazyGradient& lazy) {
  return out << lazy.name;
}

std::vector<LazyGradient> lazy_gradients() {
  const auto complex = [] { return torch::randn({3, 4}, at::kComplexFloat); };
  const Tensor indices = torch::tensor({{0, 2}});
  return {{"conj", complex().conj()},
          {"mH", complex().mH()},
          {"conj_double", torch::randn({5}, at::kComplexDouble).conj()},
          {"neg_complex", at::_neg_view(complex())},
          {"conj_neg", at::_neg_view(complex().conj())},
          {"neg", at::_neg_view(torch::randn({3, 4}))},
          {"imag_of_conj", at::imag(complex().conj())},
          {"sparse_conj",
           torch::sparse_coo_tensor(indices, torch::randn({2}, at::kComplexFloat).conj(), {4})},
          {"sparse_neg", torch::sparse_coo_tensor(indices, at::_neg_view(torch::randn({2})), {4})}};
}

/// A parameter with the gradient, as it is and resolved.
struct TwoParams {
  explicit TwoParams(const Tensor& gradient, double scale = 1.) {
    lazy = parameter_with(gradient.detach());
    plain = parameter_with(gradient.is_sparse() ? gradient.to_dense() : resolved(gradient));
    if (scale != 1.) {
      lazy.mutable_grad() = scaled(lazy.grad(), scale);
      plain.grad().mul_(scale);
    }
  }
  /// Times a number, with the same bits.
  static Tensor scaled(const Tensor& gradient, double scale) {
    if (gradient.is_sparse()) {
      return torch::sparse_coo_tensor(gradient._indices(), scaled(gradient._values(), scale),
                                      gradient.sizes());
    }
    Tensor memory = gradient;
    if (gradient.is_conj()) memory = memory.conj();
    if (gradient.is_neg()) memory = at::_neg_view(memory);
    memory = memory.clone() * scale;
    if (gradient.is_conj()) memory = memory.conj();
    return (gradient.is_neg() ? at::_neg_view(memory) : memory).detach();
  }
  void expect_same() const {
    const Tensor a = lazy.grad().to_dense(), b = plain.grad();
    EXPECT_TRUE(at::allclose(resolved(a), b, 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(lazy, plain, 1e-5, 1e-6));
  }
  Tensor lazy, plain;
};

class LazyGradients : public testing::TestWithParam<LazyGradient> {
 protected:
  Tensor gradient() const { return GetParam().gradient; }
};

INSTANTIATE_TEST_SUITE_P(All, LazyGradients, testing::ValuesIn(lazy_gradients()),
                         [](const auto& test) { return test.param.name; });

}  // namespace

TEST_P(LazyGradients, AreUnscaledCheckedAndSteppedWith) {
  TwoParams params(gradient(), 8.);
  torch::optim::SGD optimizer({params.lazy}, SGDOptions(1.));
  torchamp::GradScaler scaler({.init_scale = 8.});
  scaler.scale(torch::ones({}));
  scaler.unscale_(optimizer);
  params.plain.grad().div_(8.);
  params.expect_same();
  EXPECT_TRUE(scaler.step(optimizer).stepped());
  torch::optim::SGD({params.plain}, SGDOptions(1.)).step();
  params.expect_same();
}

TEST_P(LazyGradients, AreSearchedForInfsAndCounted) {
  const TwoParams params(gradient());
  const Tensor& values =
      params.lazy.grad().is_sparse() ? params.lazy.grad()._values() : params.lazy.grad();
  values.fill_(std::numeric_limits<double>::infinity());
  torch::optim::SGD optimizer({params.lazy}, SGDOptions(1.));
  const auto report = torchamp::overflow_report(optimizer);
  ASSERT_EQ(report.overflows.size(), 1U);
  EXPECT_EQ(report.overflows[0].infs, values.numel());
  torchamp::GradScaler scaler;
  scaler.scale(torch::ones({}));
  EXPECT_FALSE(scaler.step(optimizer).stepped());
}

TEST_P(LazyGradients, AreClipped) {
  for (const bool by_value : {false, true}) {
    if (by_value && gradient().is_complex()) continue;
    const TwoParams params(gradient());
    const auto clip = [&](const Tensor& param) {
      if (by_value) return torchamp::clip_grad_value_({param}, 0.25), Tensor();
      return torchamp::clip_grad_norm_({param}, 0.5);
    };
    const Tensor actual = clip(params.lazy), expected = clip(params.plain);
    if (!by_value) {
      EXPECT_TRUE(at::allclose(actual, expected));
    }
    params.expect_same();
  }
}

TEST_P(LazyGradients, AreSummedUp) {
  if (gradient().is_sparse()) return;
  for (const bool enabled : {false, true}) {
    const TwoParams params(gradient());
    torch::optim::SGD optimizer({params.lazy}, SGDOptions(1.));
    torchamp::GradScaler scaler({.init_scale = 4., .enabled = enabled});
    DroppingAccumulation accumulation(scaler, optimizer);
    const Tensor lazy = params.lazy.grad();
    params.lazy.mutable_grad().reset();
    for (int i = 0; i < 2; ++i) {
      const Tensor loss = torch::zeros({}).requires_grad_() * 1.;
      loss.register_hook([&](const Tensor& scale) {
        params.lazy.mutable_grad() = TwoParams::scaled(lazy, scale.item<double>());
      });
      accumulation.backward(loss);
    }
    EXPECT_TRUE(accumulation.step().stepped());
    EXPECT_TRUE(at::allclose(params.lazy.detach(), -params.plain.grad(), 1e-5, 1e-6));
  }
}

TEST_P(LazyGradients, AreSteppedWithByFusedOptimizers) {
  if (gradient().is_sparse() || gradient().is_complex()) return;
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    for (const bool clips : {false, true}) {
      const TwoParams params(gradient(), 4.);
      const auto fused = kind.fused({OptimizerParamGroup({params.lazy})});
      const auto plain = kind.plain({OptimizerParamGroup({params.plain})});
      params.plain.grad().div_(4.);
      torchamp::GradScaler scaler({.init_scale = 4.});
      scaler.scale(torch::ones({}));
      if (clips) {
        torchamp::clip_grad_norm_(scaler, *fused, 0.5);
        torchamp::clip_grad_norm_(*plain, 0.5);
      }
      EXPECT_TRUE(scaler.step(*fused).stepped());
      plain->step();
      EXPECT_TRUE(at::allclose(params.lazy, params.plain, 1e-5, 1e-6));
    }
    const TwoParams params(gradient());  // without a scaler
    const auto fused = kind.fused({OptimizerParamGroup({params.lazy})});
    const auto plain = kind.plain({OptimizerParamGroup({params.plain})});
    fused->step();
    plain->step();
    EXPECT_TRUE(at::allclose(params.lazy, params.plain, 1e-5, 1e-6));
  }
}

TEST(LazyGradientsOfAModel, AreTakenByMasterWeights) {
  torch::nn::Linear model(torch::nn::LinearOptions(4, 3).bias(false));
  torchamp::MasterWeights masters(model, {.dtype = torch::kBFloat16});
  const Tensor gradient = torch::randn({3, 4}, at::kBFloat16);
  for (int i = 1; i <= 2; ++i) {  // the first is copied, the second added
    model->weight.mutable_grad() = at::_neg_view(gradient).detach();
    masters.take_gradients();
    EXPECT_TRUE(torch::equal(masters.parameters()[0].grad(), -i * gradient.to(at::kFloat)));
  }
}

TEST(NegativeParameters, AreRefusedByFusedOptimizers) {
  const Tensor param = at::_neg_view(torch::ones({3})).detach().requires_grad_();
  param.mutable_grad() = torch::ones({3});
  torchamp::FusedSGD optimizer(Params{param}, SGDOptions(1.));
  EXPECT_ERROR(optimizer.step(), "parameter 0 of group 0 has the negative bit");
  EXPECT_TRUE(torch::equal(param, torch::full({3}, -1.)));
}
