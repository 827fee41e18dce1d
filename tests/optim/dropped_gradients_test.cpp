// SPDX-License-Identifier: BSD-3-Clause
// FusedOptimizer::drop_gradients_after_step.
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "support/expect_error.h"
#include "support/fused_optimizers.h"
#include "torchamp/clip_grad.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"

namespace {

constexpr int64_t large = 1 << 18;

/// Small and large ones, and one in another layout.
Params of_all_sizes(at::TensorOptions options) {
  Params all{param({7}, options), param({8, 3, 2, 2}, options)};
  if (options.device().is_cpu()) {
    all.push_back(param({2 * large + 4097}, options));
    all.push_back(param({65, 64, 8, 8}, options));
  }
  for (Tensor& p : all) {
    if (p.dim() == 4) {
      p = p.detach().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
    }
  }
  return all;
}

bool have_same_bits(const Params& a, const Params& b) {
  bool same = true;
  for (std::size_t i = 0; i < a.size(); ++i) same = same && at::equal(a[i], b[i]);
  return same;
}

bool have_gradients(const Params& params) {
  bool any = false;
  for (const Tensor& p : params) any = any || p.grad().defined();
  return any;
}

TEST_P(FusedOptimizers, StepTheSameBitsWhenTheyDropGradients) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const Params dropping = of_all_sizes(at::TensorOptions(device()).dtype(dtype));
    const Params keeping = copies(dropping);
    const auto drops = kind().fused(Pair::groups(dropping, kind(), true));
    const auto keeps = kind().fused(Pair::groups(keeping, kind(), true));
    as_fused(*drops).drop_gradients_after_step();
    for (const double skipped : {1., 0., 0.}) {
      for (std::size_t i = 0; i < keeping.size(); ++i) {
        const Tensor gradient = torch::randn_like(keeping[i]) * 1000.;
        keeping[i].mutable_grad() = gradient;
        dropping[i].mutable_grad() = gradient.detach().clone();
      }
      for (Optimizer* const optimizer : {drops.get(), keeps.get()}) {
        as_fused(*optimizer).step_scaled(number(1000. / 3., device()), number(skipped, device()));
      }
      EXPECT_FALSE(have_gradients(dropping));
      EXPECT_TRUE(have_same_bits(dropping, keeping)) << dtype;
    }
    drops->step();  // nothing to step with
    EXPECT_TRUE(have_same_bits(dropping, keeping));
  }
}

TEST_P(FusedOptimizers, DropGradientsThatAreClippedUnderAScaler) {
  const Params dropping = of_all_sizes(device()), keeping = copies(dropping);
  for (const Params& params : {dropping, keeping}) {
    torch::manual_seed(2);
    const auto optimizer = kind().fused({OptimizerParamGroup(params)});
    as_fused(*optimizer).drop_gradients_after_step(params[0].is_same(dropping[0]));
    torchamp::GradScaler scaler({.init_scale = 1024.});
    for (int i = 0; i < 2; ++i) {
      for (const Tensor& p : params) {
        const Tensor noise = torch::rand(p.sizes()).to(p.options());  // seeded on each LibTorch
        Tensor loss = (p.pow(2) * noise).sum();
        scaler.scale(i == 0 ? loss * INFINITY : loss).backward();
      }
      torchamp::clip_grad_norm_(scaler, *optimizer, 0.5);
      EXPECT_EQ(scaler.step(*optimizer).stepped(), i != 0);
      scaler.update();
      EXPECT_EQ(have_gradients(params), params[0].is_same(keeping[0]));
      optimizer->zero_grad();
    }
  }
  EXPECT_TRUE(have_same_bits(dropping, keeping));
}

TEST_P(FusedOptimizers, KeepTheGradientsOfAStepThatFails) {
  const Tensor p = param({5}, device());
  const auto optimizer = kind().fused({OptimizerParamGroup({p})});
  as_fused(*optimizer).drop_gradients_after_step();
  p.mutable_grad() = torch::ones_like(p);
  EXPECT_ERROR(as_fused(*optimizer).step_scaled(torch::ones({2}), Tensor()), "grad_scale");
  EXPECT_TRUE(p.grad().defined());
  as_fused(*optimizer).drop_gradients_after_step(false);
  optimizer->step();
  EXPECT_TRUE(p.grad().defined());
}

TEST_P(FusedOptimizers, DropGradientsThatAreViews) {
  const Tensor p = param({5}, device());
  const auto optimizer = kind().fused({OptimizerParamGroup({p})});
  as_fused(*optimizer).drop_gradients_after_step();
  p.mutable_grad() = torch::ones({7}, device()).narrow(0, 1, 5);
  optimizer->step();
  EXPECT_FALSE(p.grad().defined());
}

}  // namespace
