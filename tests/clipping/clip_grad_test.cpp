// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/clip_grad.h"

#include <torch/torch.h>
#include <torchamp/optim.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "support/call_counter.h"
#include "support/clipping.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/numbers.h"
#include "support/optimizer_kinds.h"
#include "support/optimizers.h"
#include "support/skips.h"
#include "support/tolerances.h"

namespace {

using clipping::backward;
using clipping::ClipGrad;
using clipping::inf;
using clipping::nan;
using clipping::with_gradient;
using clipping::with_gradients;

/// Clips one gradient after the other in fp64, in the plainest way; returns the norm.
double clip_slowly(const Params& params, double max_norm, double norm_type) {
  double sum = 0., largest = 0.;
  for (const Tensor& p : params) {
    if (!p.grad().defined()) continue;
    const Tensor magnitudes = p.grad().to_dense().abs().to(at::kDouble).cpu().reshape({-1});
    for (int64_t i = 0; i < magnitudes.numel(); ++i) {
      const double magnitude = magnitudes[i].item<double>();
      sum += std::pow(magnitude, norm_type);
      largest = std::isnan(magnitude) ? magnitude : std::max(largest, magnitude);
    }
  }
  const double norm = std::isinf(norm_type) ? largest : std::pow(sum, 1. / norm_type);
  const double coefficient = max_norm / (norm + 1e-6);
  for (const Tensor& p : params) {
    if (!p.grad().defined() || coefficient >= 1.) continue;
    p.mutable_grad() = p.grad() * coefficient;
  }
  return norm;
}

INSTANTIATE_TEST_SUITE_P(Devices, ClipGrad, all_devices(), device_name);

void expect_same_gradients(const Params& actual, const Params& expected) {
  for (std::size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_EQ(actual[i].grad().defined(), expected[i].grad().defined());
    if (actual[i].grad().defined()) {
      expect_close(actual[i].grad().to_dense(), expected[i].grad().to_dense());
    }
  }
}

// ---- Gradients that are not scaled --------------------------------------------------------------

TEST_P(ClipGrad, ClipsAsThePlainestCodeDoes) {
  for (const double norm_type : {2., 1., inf, 3., 0.5}) {
    for (const double max_norm : {0., 0.5, 1e6}) {
      const Params fast =
          with_gradients({torch::randn({5}, options()), torch::randn({2, 3}, options()),
                          torch::randn({}, options())});
      const Params slow = with_gradients({fast[0].grad(), fast[1].grad(), fast[2].grad()});
      const Tensor norm = torchamp::clip_grad_norm_(fast, max_norm, norm_type);
      expect_close(norm, torch::full({}, clip_slowly(slow, max_norm, norm_type), options()));
      expect_same_gradients(fast, slow);
      EXPECT_EQ(norm.device().type(), GetParam());
    }
  }
}

TEST_P(ClipGrad, ClipsAsPythonDoes) {
  std::ifstream file("parity/clip_grad.txt");
  ASSERT_TRUE(file) << "run the test in the folder tests/";
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    SCOPED_TRACE(line.substr(0, 40));
    std::istringstream stream(line);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    const at::ScalarType dtype = words[1] == "fp64"   ? at::kDouble
                                 : words[1] == "fp16" ? at::kHalf
                                 : words[1] == "bf16" ? at::kBFloat16
                                                      : at::kFloat;
    Numbers numbers(3);
    Params params;
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5}, {2, 3}, {}}) {
      params.push_back(with_gradient(numbers.tensor(sizes).to(options(dtype))));
    }
    if (words[2] != "-") params[0].grad()[1] = std::stod(words[2]);
    const double limit = std::stod(words[3]);
    if (words[0] == "norm") {
      const Tensor norm = torchamp::clip_grad_norm_(params, limit, std::stod(words[4]));
      expect_close(norm.cpu(), torch::tensor(std::stod(words[5]), norm.scalar_type()), dtype);
    } else {
      torchamp::clip_grad_value_(params, limit);
    }
    std::vector<double> expected;
    for (std::size_t i = 6; i < words.size(); ++i) expected.push_back(std::stod(words[i]));
    std::vector<Tensor> flat;
    for (const Tensor& p : params) flat.push_back(p.grad().reshape({-1}));
    expect_close(torch::cat(flat), torch::tensor(expected, at::kDouble), dtype);
  }
  EXPECT_GT(lines, 80);
}

TEST_P(ClipGrad, TakesAVectorAListATensorOrAnOptimizer) {
  const auto fresh = [&] {
    return with_gradients({torch::full({4}, 3., options()), torch::full({7}, 2., options())});
  };
  const Tensor both = torch::full({}, 8., options()), first = torch::full({}, 6., options());
  Params p = fresh();
  expect_close(torchamp::clip_grad_norm_(p, 1.), both);
  p = fresh();
  expect_close(torchamp::clip_grad_norm_({p[0], p[1]}, 1.), both);
  p = fresh();
  expect_close(torchamp::clip_grad_norm_(p[0], 1.), first);
  expect_close(p[0].grad(), torch::full({4}, 0.5, options()));
  expect_close(p[1].grad(), torch::full({7}, 2., options()));
  p = fresh();
  Groups groups{OptimizerParamGroup({p[0]}), OptimizerParamGroup({p[1]})};
  torch::optim::SGD optimizer(groups, SGDOptions(1.));
  expect_close(torchamp::clip_grad_norm_(optimizer, 1.), both);
  expect_close(p[1].grad(), torch::full({7}, 0.25, options()));
}

TEST_P(ClipGrad, PassesOverWhatHasNoGradient) {
  const Params params{torch::zeros({3}, options()).requires_grad_(),
                      with_gradient(torch::full({4}, 2., options())), Tensor(),
                      with_gradient(torch::zeros({0}, options()))};
  for (const double norm_type : {2., inf}) {
    params[1].grad().fill_(norm_type == 2. ? 2. : 4.);
    expect_close(torchamp::clip_grad_norm_(params, 1., norm_type), torch::full({}, 4., options()));
  }
  EXPECT_FALSE(params[0].grad().defined());
  const Tensor none = torchamp::clip_grad_norm_(Params{params[0]}, 1.);
  expect_close(none, torch::zeros({}));
  torchamp::clip_grad_value_(Params{params[0]}, 1.);
}

TEST_P(ClipGrad, TakesSeveralDtypesAndLayouts) {
  const Params fast = with_gradients(
      {torch::randn({5}, options()), torch::randn({4, 3}, options(at::kBFloat16)),
       torch::randn({6}, options(at::kDouble)), torch::randn({8}, options(at::kHalf)),
       torch::randn({3}, options(at::kComplexFloat)), torch::randn({2}, options())});
  fast[1].mutable_grad() = torch::randn({3, 4}, options(at::kBFloat16)).t();
  Params slow;
  for (const Tensor& p : fast) slow.push_back(with_gradient(p.grad().clone()));
  for (const double norm_type : {2., 1., inf}) {
    const Tensor norm = torchamp::clip_grad_norm_(fast, 1.5, norm_type);
    EXPECT_EQ(norm.scalar_type(), at::kDouble);
    expect_close(norm.cpu(), torch::tensor(clip_slowly(slow, 1.5, norm_type), at::kDouble),
                 at::kBFloat16);
    for (std::size_t i = 0; i < fast.size(); ++i) {
      const bool complex = fast[i].is_complex();
      const Tensor actual = complex ? at::view_as_real(fast[i].grad()) : fast[i].grad();
      const Tensor expected = complex ? at::view_as_real(slow[i].grad()) : slow[i].grad();
      expect_close(actual, expected, at::kBFloat16);
    }
  }
}

TEST_P(ClipGrad, TakesSmallAndLargeGradientsTogether) {
  for (const double norm_type : {2., 1., inf, 3.}) {
    const Params fast = with_gradients(
        {torch::randn({1024}, options()), torch::randn({1025}, options()),
         torch::randn({30, 40}, options()).t(), torch::randn({8, 4}, options()).slice(1, 0, 4, 3)});
    Params slow;
    for (const Tensor& p : fast) slow.push_back(with_gradient(p.grad().clone()));
    const Tensor norm = torchamp::clip_grad_norm_(fast, 2., norm_type);
    expect_close(norm, torch::full({}, clip_slowly(slow, 2., norm_type), options()));
    expect_same_gradients(fast, slow);
  }
}

TEST_P(ClipGrad, CountsGradientsThatAreNotZeroForTheZeroNorm) {
  const Params params = with_gradients({torch::ones({3}, options()), torch::zeros({2}, options())});
  const Tensor norms =
      torch::tensor({3., 0.}, options());  // and, as PyTorch does, the norm of these
  expect_close(torchamp::clip_grad_norm_(params, 9., 0.), at::linalg_vector_norm(norms, 0.));
}

TEST_P(ClipGrad, FindsNormsThat16BitsCannotHold) {
  const Params params = with_gradients({torch::full({100}, 30000., options(at::kHalf))});
  const Tensor norm = torchamp::clip_grad_norm_(params, 100.);
  expect_close(norm, torch::full({}, 300000., options()));
  expect_close(params[0].grad(), torch::full({100}, 10., options(at::kHalf)));
}

TEST_P(ClipGrad, ClipsSparseGradients) {
  SKIP_WITHOUT_SPARSE(GetParam());
  const Tensor indices = torch::tensor({{0, 2, 0}}, options(at::kLong));
  const Tensor values = torch::tensor({1., 4., 2.}, options());  // the first row adds up to 3
  const Params params{with_gradient(torch::sparse_coo_tensor(indices, values, {5}))};
  expect_close(torchamp::clip_grad_norm_(params, 1.), torch::full({}, 5., options()));
  EXPECT_TRUE(params[0].grad().is_sparse());
  expect_close(params[0].grad().to_dense(), torch::tensor({.6, 0., .8, 0., 0.}, options()));
  torchamp::clip_grad_value_(params, 0.7);
  expect_close(params[0].grad().to_dense(), torch::tensor({.6, 0., .7, 0., 0.}, options()));
}

TEST(ClipGradErrors, SayWhatIsWrong) {
  const Params params = with_gradients({torch::ones({3})});
  EXPECT_ERROR(torchamp::clip_grad_norm_(params, -1.), "max_norm is -1. It must be 0 or more.");
  EXPECT_ERROR(torchamp::clip_grad_norm_(params, nan), "max_norm is nan");
  EXPECT_ERROR(torchamp::clip_grad_value_(params, -2.), "the value is -2. It must be 0 or more.");
  const Tensor expanded = torch::zeros({3}).requires_grad_();
  expanded.mutable_grad() = torch::ones({1}).expand({3});
  EXPECT_ERROR(
      torchamp::clip_grad_norm_({params[0], expanded}, 1.),
      "clip_grad_norm_: the gradient of parameter 1 [3] has the layout Strided and strides "
      "[0]");
  expect_close(params[0].grad(), torch::ones({3}));
  torchamp::FusedSGD optimizer(params, SGDOptions(1.));
  torchamp::GradScaler scaler;
  EXPECT_ERROR(torchamp::clip_grad_norm_(scaler, optimizer, 1.),
               "clip_grad_norm_: nothing has been scaled yet. Call scale(loss).backward() first.");
}

TEST_P(ClipGrad, CallsNoMoreForMoreGradientsAndReadsNothing) {
  const auto calls = [&](int64_t number_of_params, const std::function<void(Optimizer&)>& clip) {
    Params params;
    for (int64_t i = 0; i < number_of_params; ++i) {
      params.push_back(with_gradient(torch::ones({2}, options())));
    }
    torchamp::FusedSGD fused(params, SGDOptions(1.));
    const CallCounter counter;
    clip(fused);
    EXPECT_EQ(counter.reads(), 0);
    return counter.called();
  };
  const std::vector<std::function<void(Optimizer&)>> clips{
      [](Optimizer& o) { torchamp::clip_grad_norm_(o.param_groups()[0].params(), 1.); },
      [](Optimizer& o) { torchamp::clip_grad_norm_(o.param_groups()[0].params(), 1., inf); },
      [](Optimizer& o) { torchamp::clip_grad_norm_(o, 1.); },
      [](Optimizer& o) { torchamp::clip_grad_value_(o, 1.); }};
  for (const auto& clip : clips) {
    const int few = calls(3, clip);
    EXPECT_EQ(calls(300, clip), few);
    EXPECT_LE(few, 16);
  }
}

// ---- Gradients that are scaled ------------------------------------------------------------------

TEST_P(ClipGrad, IsRightBeforeAndAfterUnscaling) {
  const std::vector<Tensor> gradients{torch::full({4}, 3., options()),
                                      torch::full({7}, 2., options())};
  for (const bool fused : {false, true}) {
    for (const bool unscaled : {false, true}) {
      const Params params{torch::zeros({4}, options()).requires_grad_(),
                          torch::zeros({7}, options()).requires_grad_()};
      const auto either = plain_or_fused_sgd(params, fused);
      Optimizer& optimizer = *either;
      torchamp::GradScaler scaler({.init_scale = 1024.});
      backward(scaler, optimizer, params, gradients);
      if (unscaled) scaler.unscale_(optimizer);
      const Tensor before = params[0].grad().clone();
      expect_close(torchamp::clip_grad_norm_(scaler, optimizer, 4.),
                   torch::full({}, 8., options()));
      if (fused) {  // left to the step
        EXPECT_TRUE(torch::equal(params[0].grad(), before));
      }
      scaler.step(optimizer);
      scaler.update();
      expect_close(params[0], torch::full({4}, -1.5, options()));
      expect_close(params[1], torch::full({7}, -1., options()));
    }
  }
}

TEST_P(ClipGrad, RefusesToClipAfterTheStep) {
  for (const bool fused : {false, true}) {
    const Params params{torch::zeros({2}, options()).requires_grad_()};
    const auto either = plain_or_fused_sgd(params, fused);
    Optimizer& optimizer = *either;
    torchamp::GradScaler scaler({.init_scale = 64.});
    const Tensor gradient = torch::full({2}, 3., options());
    backward(scaler, optimizer, params, {gradient});
    EXPECT_FALSE(scaler.is_stepped(optimizer));
    scaler.step(optimizer);
    EXPECT_TRUE(scaler.is_stepped(optimizer));
    EXPECT_ERROR(torchamp::clip_grad_norm_(scaler, optimizer, 1.),
                 "clip_grad_norm_: this optimizer has been stepped already in this iteration. Clip "
                 "between backward() and step(), and call update() after the last step().");
    EXPECT_ERROR(torchamp::clip_grad_value_(scaler, optimizer, 1.), "Clip between backward()");
    scaler.update();
    EXPECT_FALSE(scaler.is_stepped(optimizer));
    backward(scaler, optimizer, params, {gradient});
    scaler.step(optimizer);  // with nothing left of the refused clipping
    expect_close(params[0], torch::full({2}, -6., options()));
  }
}

TEST_P(ClipGrad, ClipsTwice) {
  for (const bool fused : {false, true}) {
    const Params params{torch::zeros({4}, options()).requires_grad_()};
    const auto either = plain_or_fused_sgd(params, fused);
    Optimizer& optimizer = *either;
    torchamp::GradScaler scaler({.init_scale = 64.});
    backward(scaler, optimizer, params, {torch::tensor({4., 3., 0., 0.}, options())});
    const auto norm = [&](double limit, double kind) {
      return torchamp::clip_grad_norm_(scaler, optimizer, limit, kind).item<double>();
    };
    EXPECT_NEAR(norm(2.5, 2.), 5., 1e-5);
    EXPECT_NEAR(norm(10., 2.), 2.5, 1e-5);
    EXPECT_NEAR(norm(1., inf), 2., 1e-5);
    torchamp::clip_grad_value_(scaler, optimizer, 0.875);
    scaler.step(optimizer);
    scaler.update();
    expect_close(params[0], torch::tensor({-0.875, -0.75, 0., 0.}, options()));
  }
}

TEST_P(ClipGrad, LeavesOfInfsAndNaNsInAFusedStepWhatPlainClippingLeaves) {
  for (const double poison : {inf, -inf, nan}) {
    for (const double norm_type : {2., 1., inf}) {
      for (const double max_norm : {0., 1.}) {
        SCOPED_TRACE(c10::str(poison, ' ', norm_type, ' ', max_norm));
        Params plain = with_gradients({torch::randn({4}, options()), torch::randn({}, options())});
        plain[0].grad()[1] = poison;
        const Params fused = with_gradients({plain[0].grad(), plain[1].grad()});
        torch::optim::SGD plain_optimizer(plain, SGDOptions(1.));
        torchamp::FusedSGD fused_optimizer(fused, SGDOptions(1.));
        expect_close(torchamp::clip_grad_norm_(fused_optimizer, max_norm, norm_type),
                     torchamp::clip_grad_norm_(plain, max_norm, norm_type));
        plain_optimizer.step();
        fused_optimizer.step();
        expect_close(fused, plain);
      }
    }
  }
}

TEST_P(ClipGrad, KeepsThePrecisionOfFp64) {
  const Params params{torch::zeros({3}, options(at::kDouble)).requires_grad_()};
  torchamp::FusedSGD optimizer(params, SGDOptions(1.));
  params[0].mutable_grad() = torch::ones({3}, options(at::kDouble));
  torchamp::clip_grad_norm_(optimizer, 1.);
  optimizer.step();
  const double expected = -1. / (std::sqrt(3.) + 1e-6);
  expect_close(params[0], torch::full({3}, expected, options(at::kDouble)));
}

TEST_P(ClipGrad, KeepsThePrecisionAndTheRangeOfComplex128) {
  const auto real = options(at::kDouble), complex = options(at::kComplexDouble);
  for (const double size : {1., 1e100}) {
    for (const double norm_type : {2., inf}) {
      const c10::complex<double> value(0.3 * size, 0.4 * size);
      const Params params = with_gradients({torch::full({3}, value, complex)});
      const double norm = 0.5 * size * (norm_type == 2. ? std::sqrt(3.) : 1.);
      const Tensor total = torchamp::clip_grad_norm_(params, 0.1, norm_type);
      EXPECT_EQ(total.scalar_type(), at::kDouble);
      expect_close(total / norm, torch::ones({}, real));
      const double left = 0.1 * size / (norm + 1e-6);
      const Tensor parts = at::view_as_real(params[0].grad());
      expect_close(parts.select(1, 0), torch::full({3}, 0.3 * left, real));
      expect_close(parts.select(1, 1), torch::full({3}, 0.4 * left, real));
    }
  }
}

TEST_P(ClipGrad, DoesNothingMoreUnderADisabledScaler) {
  const Params params = with_gradients({torch::full({4}, 2., options())});
  torchamp::FusedSGD fused(params, SGDOptions(1.));
  torchamp::GradScaler scaler({.enabled = false});
  expect_close(torchamp::clip_grad_norm_(scaler, fused, 2.), torch::full({}, 4., options()));
  torchamp::clip_grad_value_(scaler, fused, 0.5);
  scaler.step(fused);
  expect_close(params[0], torch::full({4}, -0.5, options()));
}

// Two optimizers, infs and NaNs, clipping in all ways, hand-set scales: as LibTorch's own
// optimizers with the plainest clipping.
TEST_P(ClipGrad, WalksAsThePlainestCodeDoes) {
  for (int walk = 0; walk < 6; ++walk) {
    std::vector<Params> slow{{param({3}, options()), param({2, 2}, options())},
                             {param({5}, options()), param({}, options())}};
    std::vector<Params> fast{copies(slow[0]), copies(slow[1])};
    torch::optim::Adam slow_adam(slow[0], AdamOptions(0.1));
    torch::optim::SGD slow_sgd(slow[1], SGDOptions(0.1).momentum(0.9).dampening(0.1));
    torchamp::FusedAdam fast_adam(fast[0], AdamOptions(0.1));
    torchamp::FusedSGD fast_sgd(fast[1], SGDOptions(0.1).momentum(0.9).dampening(0.1));
    const std::vector<Optimizer*> slow_optimizers{&slow_adam, &slow_sgd};
    const std::vector<Optimizer*> fast_optimizers{&fast_adam, &fast_sgd};
    torchamp::GradScaler slow_scaler({.init_scale = 128., .growth_interval = 2});
    torchamp::GradScaler fast_scaler({.init_scale = 128., .growth_interval = 2});
    for (int i = 0; i < 15; ++i) {
      for (std::size_t o = 0; o < 2; ++o) {
        std::vector<Tensor> gradients{torch::randn_like(slow[o][0].detach()),
                                      torch::randn_like(slow[o][1].detach())};
        const int64_t poison = dice(8);
        if (poison < 2) gradients[static_cast<std::size_t>(dice(2))].fill_(poison == 0 ? inf : nan);
        backward(slow_scaler, *slow_optimizers[o], slow[o], gradients);
        backward(fast_scaler, *fast_optimizers[o], fast[o], gradients);
        slow_scaler.unscale_(*slow_optimizers[o]);
        if (dice(2) == 0) fast_scaler.unscale_(*fast_optimizers[o]);
        if (dice(3) != 0) {
          const double norm_type = dice(2) == 0 ? 2. : inf;
          const double norm = clip_slowly(slow[o], 0.7, norm_type);
          expect_close(torchamp::clip_grad_norm_(fast_scaler, *fast_optimizers[o], 0.7, norm_type),
                       torch::full({}, norm, options()));
        }
        if (dice(4) == 0) {
          for (const Tensor& p : slow[o]) p.mutable_grad() = p.grad().clamp(-0.2, 0.2);
          torchamp::clip_grad_value_(fast_scaler, *fast_optimizers[o], 0.2);
        }
        EXPECT_EQ(fast_scaler.step(*fast_optimizers[o]).stepped(),
                  slow_scaler.step(*slow_optimizers[o]).stepped());
        expect_close(fast[o], slow[o]);
      }
      if (dice(6) == 0) {
        slow_scaler.update(32.);
        fast_scaler.update(32.);
      } else {
        slow_scaler.update();
        fast_scaler.update();
      }
      EXPECT_EQ(fast_scaler.get_scale(), slow_scaler.get_scale());
    }
  }
}

TEST(ClipGradOnTwoDevices, FindsOneNorm) {
  SKIP_WITHOUT(at::kCUDA);
  const Params params = with_gradients({torch::full({4}, 3.), torch::full({7}, 2., at::kCUDA)});
  const Tensor norm = torchamp::clip_grad_norm_(params, 4.);
  EXPECT_TRUE(norm.is_cpu());
  expect_close(norm, torch::full({}, 8.));
  expect_close(params[0].grad(), torch::full({4}, 1.5));
  expect_close(params[1].grad(), torch::full({7}, 1.));
}

TEST(ClipGradNorm, CountsAGradientThatIsGivenTwiceOnce) {
  for (const bool sparse : {false, true}) {
    const Tensor p =
        with_gradient(sparse ? torch::full({1}, 4.).to_sparse() : torch::full({1}, 4.));
    EXPECT_NEAR(torchamp::clip_grad_norm_({p, p}, 2.).item<float>(), 4.F, 1e-5);
    expect_close(p.grad().to_dense(), torch::full({1}, 2.));
    torch::optim::SGD optimizer({p, p}, 1.);
    torchamp::clip_grad_norm_(optimizer, 1.);
    expect_close(p.grad().to_dense(), torch::full({1}, 1.));
  }
}

}  // namespace
