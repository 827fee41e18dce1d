// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/optim.h"

#include <torch/torch.h>
#include <torchamp/grad_scaler.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "support/devices.h"
#include "support/fused_optimizers.h"
#include "support/numbers.h"
#include "support/tolerances.h"

namespace {

// ---- The same steps as LibTorch's own -----------------------------------------------------------

TEST_P(FusedOptimizers, StepLikeLibTorchsOwn) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Pair pair(kind(), params(dtype), /*two_groups=*/true);
    for (int i = 0; i < 15; ++i) {
      pair.new_gradients(1.);
      pair.plain->step();
      pair.fused->step();
      pair.expect_equal();
    }
  }
}

TEST_P(FusedOptimizers, DivideAndSkipOnTheDevice) {
  for (int walk = 0; walk < 4; ++walk) {
    const Pair pair(kind(), params(), /*two_groups=*/true);
    for (int i = 0; i < 15; ++i) {
      pair.random_step();
      pair.expect_equal();
    }
  }
}

/// The same values with strides in the other order.
Tensor reversed(const Tensor& tensor) {
  std::vector<int64_t> order(static_cast<std::size_t>(tensor.dim()));
  for (std::size_t i = 0; i < order.size(); ++i)
    order[i] = tensor.dim() - 1 - static_cast<int64_t>(i);
  return tensor.permute(order).contiguous().permute(order);
}

/// As contiguous parameters in fp64 are stepped by LibTorch's own.
TEST_P(FusedOptimizers, StepAtFarScalesWhateverTheLayouts) {
  const auto options = at::TensorOptions(device());
  for (const double scale : {0x1p-126, 0x1p120}) {
    SCOPED_TRACE(scale);
    const Tensor image = torch::randn({2, 3, 4, 5}, options);
    Params params{torch::randn({}, options), torch::randn({0, 3}, options),
                  torch::randn({5, 4}, options).t(), torch::randn({9}, options).narrow(0, 2, 5),
                  image.contiguous(at::MemoryFormat::ChannelsLast)};
    Params wide;
    for (Tensor& p : params) {
      p = p.detach().requires_grad_();
      wide.push_back(p.detach().cpu().to(at::kDouble).contiguous().requires_grad_());
    }
    const auto plain = kind().plain({OptimizerParamGroup(wide)});
    const auto fused = kind().fused({OptimizerParamGroup(params)});
    torchamp::GradScaler scaler({.init_scale = scale});
    (void)scaler.scale(torch::ones({}, options));
    for (int step = 0; step < 3; ++step) {
      for (std::size_t i = 0; i < params.size(); ++i) {
        const double size = scale < 1. ? 0x1p10 : 0x1p-10;  // so that scaled ones are normal
        const Tensor scaled = torch::randn(params[i].sizes(), options) * (size * scale);
        params[i].mutable_grad() = step == 1 ? reversed(scaled) : scaled;
        wide[i].mutable_grad() = scaled.cpu().to(at::kDouble) / scale;
      }
      if (step == 2) scaler.unscale_(*fused);
      EXPECT_TRUE(scaler.step(*fused).stepped());
      scaler.update();
      plain->step();
      for (std::size_t i = 0; i < params.size(); ++i) {
        const Tensor actual = params[i].detach().cpu().to(at::kDouble), expected = wide[i].detach();
        if (expected.numel() == 0) continue;
        EXPECT_LE((actual - expected).abs().max().item<double>(),
                  1e-5 * expected.abs().max().item<double>());
      }
    }
  }
}

TEST_P(FusedOptimizers, SkipForAnyFlagButZero) {
  const Pair pair(kind(), params());
  const Params before = copies(pair.fused_params);
  for (const double flag : {1., 2., 0.5}) {
    pair.new_gradients(1., 1000);
    as_fused(*pair.fused).step_scaled({}, number(flag, device()));
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(torch::equal(pair.fused_params[i], before[i]));
  }
}

TEST_P(FusedOptimizers, LeaveNoTraceOfSkippedFirstSteps) {
  const Pair pair(kind(), params());
  for (int i = 0; i < 3; ++i) {
    pair.new_gradients(2.);
    as_fused(*pair.fused).step_scaled(number(2., device()), number(1., device()));
  }
  // What LibTorch's own makes of the archive is what it makes of a first step.
  through_archive(*pair.fused, *pair.plain);
  for (int i = 0; i < 3; ++i) {
    pair.new_gradients(2., 1000);
    pair.plain->step();
    as_fused(*pair.fused).step_scaled(number(2., device()), number(0., device()));
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, TakeScaleAndFlagEachAlone) {
  const Pair pair(kind(), params());
  for (int i = 0; i < 6; ++i) {
    pair.new_gradients(4.);
    pair.plain->step();
    as_fused(*pair.fused).step_scaled(number(4., device()), {});
    pair.new_gradients(1.);
    as_fused(*pair.fused).step_scaled({}, number(1., device()));
    pair.new_gradients(1.);
    pair.plain->step();
    as_fused(*pair.fused).step_scaled({}, number(0., device()));
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, FollowLearningRateSchedulers) {
  const Pair pair(kind(), params(), /*two_groups=*/true);
  torch::optim::StepLR plain_rate(*pair.plain, 2, 0.5), fused_rate(*pair.fused, 2, 0.5);
  for (int i = 0; i < 8; ++i) {
    pair.new_gradients(1.);
    pair.plain->step();
    plain_rate.step();
    pair.fused->step();
    fused_rate.step();
    pair.expect_equal();
  }
  EXPECT_LT(pair.fused->param_groups()[0].options().get_lr(), 0.02);
}

TEST_P(FusedOptimizers, StepWhatIsAddedLater) {
  Pair pair(kind(), params());
  pair.random_step();
  pair.random_step();
  // LibTorch's own Adagrad makes its states at construction and throws for what is added.
  if (kind().name.starts_with("adagrad")) return;
  for (const bool into_the_first : {false, true}) {
    const Tensor plain = param({3}, device());
    const Tensor fused = copies({plain})[0];
    if (into_the_first) {
      pair.plain->param_groups()[0].params().push_back(plain);
      pair.fused->param_groups()[0].params().push_back(fused);
    } else {
      pair.plain->add_param_group(OptimizerParamGroup({plain}));
      pair.fused->add_param_group(OptimizerParamGroup({fused}));
    }
    pair.plain_params.push_back(plain);
    pair.fused_params.push_back(fused);
  }
  for (int i = 0; i < 6; ++i) {
    pair.random_step();
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, RunClosures) {
  const auto closure = [](Optimizer& optimizer, const Params& params) {
    return [&optimizer, params] {
      optimizer.zero_grad();
      Tensor loss = torch::zeros({}, params[0].options().requires_grad(false));
      for (const Tensor& p : params) loss = loss + (p * p).sum();
      loss.backward();
      return loss.detach();
    };
  };
  const Pair pair(kind(), params());
  for (int i = 0; i < 3; ++i) {
    const torch::NoGradGuard no_grad;
    const Tensor plain = pair.plain->step(closure(*pair.plain, pair.plain_params));
    const Tensor fused = pair.fused->step(closure(*pair.fused, pair.fused_params));
    ::expect_close(fused, plain);
    pair.expect_equal();
  }
  EXPECT_FALSE(pair.fused->step().defined());
}

// Different experts of a mixture get gradients in each step.
TEST_P(FusedOptimizers, CountStepsForEachParameterApart) {
  Params experts;
  for (int i = 0; i < 12; ++i) experts.push_back(param({2}, device()));
  const Pair pair(kind(), experts);
  for (int i = 0; i < 20; ++i) {
    const bool skipped = dice(4) == 0;
    pair.new_gradients(1., 2);
    if (!skipped) pair.plain->step();
    as_fused(*pair.fused).step_scaled({}, number(skipped ? 1. : 0., device()));
    pair.expect_equal();
  }
}

// ---- Devices, dtypes, layouts -------------------------------------------------------------------

TEST_P(FusedOptimizers, KeepDtypesApart) {
  const auto options = at::TensorOptions(device());
  Params mixed, wide;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kDouble, at::kBFloat16, at::kFloat}) {
    mixed.push_back(param({33}, options.dtype(dtype)));
    wide.push_back(mixed.back().detach().to(at::kDouble).requires_grad_());
  }
  const auto plain = kind().plain({OptimizerParamGroup(wide)});
  const auto fused = kind().fused({OptimizerParamGroup(mixed)});
  for (int i = 0; i < 2; ++i) {  // few steps: 16 bits drift
    for (std::size_t p = 0; p < mixed.size(); ++p) {
      mixed[p].mutable_grad() = torch::randn_like(mixed[p]) * 64.;
      wide[p].mutable_grad() = mixed[p].grad().to(at::kDouble) / 64.;
    }
    plain->step();
    as_fused(*fused).step_scaled(number(64., device()), number(0., device()));
  }
  for (std::size_t p = 0; p < mixed.size(); ++p) {
    SCOPED_TRACE(p);
    const at::ScalarType dtype = mixed[p].scalar_type();
    ::expect_close(mixed[p], wide[p], dtype == at::kDouble ? at::kFloat : dtype);
  }
}

TEST_P(FusedOptimizers, TakeGradientsOfAnyLayout) {
  const auto options = at::TensorOptions(device());
  const Tensor channels_last =
      torch::randn({2, 3, 4, 5}, options).contiguous(at::MemoryFormat::ChannelsLast);
  const Pair pair(kind(), {param({4, 3}, options), param({4, 3}, options), param({7}, options),
                           channels_last.clone().requires_grad_()});
  ASSERT_FALSE(pair.fused_params[3].is_contiguous());
  for (int i = 0; i < 3; ++i) {
    const std::vector<Tensor> gradients{
        torch::randn({3, 4}, options).t(), torch::randn({4, 1}, options).expand({4, 3}),
        torch::randn({14}, options).slice(0, 0, 14, 2), torch::randn({2, 3, 4, 5}, options)};
    for (std::size_t p = 0; p < gradients.size(); ++p) {
      pair.plain_params[p].mutable_grad() = gradients[p].clone();
      pair.fused_params[p].mutable_grad() = gradients[p];
    }
    pair.plain->step();
    pair.fused->step();
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, FollowParametersToAnotherLayoutAndDtype) {
  const auto options = at::TensorOptions(device());
  const Pair pair(kind(), {param({2, 3, 4, 5}, options), param({6}, options)});
  pair.random_step();
  pair.random_step();
  const Tensor moved = pair.fused_params[0];
  moved.set_data(moved.detach().contiguous(at::MemoryFormat::ChannelsLast));
  for (int i = 0; i < 3; ++i) {
    pair.random_step();
    pair.expect_equal();
  }
  for (const Tensor& p : pair.fused_params) {
    p.mutable_grad().reset();
    p.set_data(p.detach().to(at::kDouble));
  }
  for (int i = 0; i < 3; ++i) {
    for (std::size_t p = 0; p < pair.plain_params.size(); ++p) {
      pair.plain_params[p].mutable_grad() = torch::randn_like(pair.plain_params[p]);
      pair.fused_params[p].mutable_grad() = pair.plain_params[p].grad().to(at::kDouble);
    }
    pair.plain->step();
    pair.fused->step();
  }
  for (std::size_t p = 0; p < pair.plain_params.size(); ++p) {
    ::expect_close(pair.fused_params[p], pair.plain_params[p], at::kFloat);
  }
}

TEST_P(FusedOptimizers, StepEmptyParametersAndNone) {
  const auto options = at::TensorOptions(device());
  const Pair pair(kind(), {param({0}, options), param({3}, options), param({2, 0}, options)});
  pair.fused->step();
  pair.plain->step();
  pair.expect_equal();
  for (int i = 0; i < 4; ++i) {
    pair.random_step();
    pair.expect_equal();
  }
}

TEST(FusedOptimizersOnTwoDevices, StepBoth) {
  SKIP_WITHOUT(at::kCUDA);
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const Pair pair(kind, {param({3}), param({4}, at::kCUDA), param({2}, at::kCUDA)});
    for (int i = 0; i < 8; ++i) {
      const bool skipped = dice(3) == 0;
      pair.new_gradients(8.);
      if (!skipped) pair.plain->step();
      const at::Device home = i % 2 == 0 ? at::kCPU : at::kCUDA;
      as_fused(*pair.fused).step_scaled(number(8., home), number(skipped ? 1. : 0., home));
      pair.expect_equal();
    }
  }
}

// ---- With a GradScaler --------------------------------------------------------------------------

TEST_P(FusedOptimizers, TrainUnderAScalerAsLibTorchsOwnDo) {
  const Pair pair(kind(), params());
  torchamp::GradScaler plain_scaler({.init_scale = 256., .growth_interval = 3});
  torchamp::GradScaler fused_scaler({.init_scale = 256., .growth_interval = 3});
  for (int i = 0; i < 16; ++i) {
    std::vector<Tensor> factors;
    for (const Tensor& p : pair.plain_params) factors.push_back(torch::randn_like(p));
    if (dice(4) == 0) factors[1].fill_(std::numeric_limits<float>::infinity());
    const bool unscaled = dice(3) == 0;
    const auto iterate = [&](torchamp::GradScaler& scaler, Optimizer& optimizer,
                             const Params& params) {
      optimizer.zero_grad();
      Tensor loss = torch::zeros({}, params[0].options().requires_grad(false));
      for (std::size_t p = 0; p < params.size(); ++p) {
        loss = loss + (params[p] * factors[p]).sum();
      }
      scaler.scale(loss).backward();
      if (unscaled) scaler.unscale_(optimizer);
      const bool stepped = scaler.step(optimizer).stepped();
      scaler.update();
      return stepped;
    };
    const bool plain_stepped = iterate(plain_scaler, *pair.plain, pair.plain_params);
    EXPECT_EQ(iterate(fused_scaler, *pair.fused, pair.fused_params), plain_stepped);
    EXPECT_EQ(fused_scaler.get_scale(), plain_scaler.get_scale());
    pair.expect_equal();
  }
}

// ---- Python's steps -----------------------------------------------------------------------------

TEST_P(FusedOptimizers, StepLikePythons) {
  std::ifstream file("parity/optim.txt");
  ASSERT_TRUE(file) << "run the test in the folder tests/";
  std::map<int64_t, std::vector<Tensor>> walks;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t walk = 0, step = 0;
    words >> name >> walk >> step;
    if (name != kind().name) continue;
    std::vector<float> values;
    for (float value = 0.F; words >> value;) values.push_back(value);
    walks[walk].push_back(torch::tensor(values));
  }
  if (!kind().is_in_libtorch && walks.empty()) GTEST_SKIP() << "compared with a plain optimizer";
  ASSERT_FALSE(walks.empty());
  for (const auto& [walk, rows] : walks) {
    Numbers numbers(walk);
    Params params;
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5}, {2, 3}, {}}) {
      params.push_back(numbers.tensor(sizes).to(device()).requires_grad_());
    }
    const auto optimizer = kind().fused({OptimizerParamGroup(params)});
    for (const Tensor& row : rows) {
      const double power = std::ldexp(1., static_cast<int>(numbers.below(8)));
      const double scale = power * (1. + static_cast<double>(numbers.below(3)) / 4.);
      const bool skipped = numbers.below(3) == 0;
      for (const Tensor& p : params) {
        const bool absent = numbers.below(4) == 0;
        const Tensor gradient = numbers.tensor(p.sizes()).to(device()) * scale;
        p.mutable_grad() = absent ? Tensor() : gradient;
      }
      as_fused(*optimizer)
          .step_scaled(number(scale, device()), number(skipped ? 1. : 0., device()));
      std::vector<Tensor> flat;
      for (const Tensor& p : params) flat.push_back(p.detach().reshape({-1}).cpu());
      ::expect_close(torch::cat(flat), row);
    }
  }
}

}  // namespace
