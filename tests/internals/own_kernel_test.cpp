// SPDX-License-Identifier: BSD-3-Clause
// An optimizer for which ATen has no fused kernel, made by the way that the library's own are.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/rmsprop.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <sstream>
#include <vector>

#include "support/optimizer_kinds.h"
#include "support/tolerances.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"

namespace {

struct RMSpropKernel
    : torchamp::detail::KernelBase<torch::optim::RMSprop, torch::optim::RMSpropOptions,
                                   torch::optim::RMSpropParamState> {
  static constexpr const char* name = "FusedRMSprop";

  static std::size_t kinds(const Options&) { return 1; }
  static Tensor& tensor(State& s, std::size_t) { return s.square_avg(); }

  static void step(const Options& o, const torchamp::detail::StepList& list,
                   const torchamp::detail::StepScalars& scalars) {
    const auto& scale = scalars.grad_scale();
    const Params grads = scale ? at::_foreach_div(list.grads, *scale) : list.grads;
    const Params averages = at::_foreach_mul(list.state[0], o.alpha());
    at::_foreach_addcmul_(averages, grads, grads, 1. - o.alpha());
    const Params roots = at::_foreach_sqrt(averages);
    at::_foreach_add_(roots, o.eps());
    const Params stepped = at::_foreach_addcdiv(list.params, grads, roots, -o.lr());
    take(list.state[0], averages, scalars);
    take(list.params, stepped, scalars);
  }

 private:
  static void take(const Params& to, const Params& from,
                   const torchamp::detail::StepScalars& scalars) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      const auto& found_inf = scalars.found_inf();
      to[i].copy_(found_inf ? torch::where(*found_inf != 0, to[i], from[i]) : from[i]);
    }
  }
};

using FusedRMSprop = torchamp::FusedOptimizerOf<RMSpropKernel>;

Params parameters() {
  torch::manual_seed(1);
  return {param({5}), param({2, 3})};
}

void give_gradients(const Params& params, double factor, double first = 0.) {
  for (const Tensor& p : params) {
    p.mutable_grad() = torch::cos(p.detach() + factor);
    p.grad().view(-1)[0] += first;
  }
}

TEST(OwnKernel, StepsSkipsAndExchangesStateAsTheCounterpartInLibTorch) {
  const auto options = torch::optim::RMSpropOptions(0.1).alpha(0.9);
  const Params params = parameters(), expected = parameters();
  FusedRMSprop fused(params, options);
  torch::optim::RMSprop plain(expected, options);
  torchamp::GradScaler scaler({.init_scale = 8.});
  for (int i = 0; i < 6; ++i) {
    const bool bad = i == 0 || i == 3;
    const double scale = scaler.get_scale();
    scaler.scale(torch::ones({}));
    give_gradients(params, i, bad ? std::numeric_limits<double>::infinity() : 0.);
    for (const Tensor& p : params) p.grad().mul_(scale);
    EXPECT_EQ(scaler.step(fused).stepped(), !bad);
    scaler.update();
    if (bad) continue;
    give_gradients(expected, i);
    plain.step();
  }
  expect_close(params, expected);

  std::stringstream saved;
  torch::save(fused, saved);
  torch::optim::RMSprop loaded(expected, options);
  torch::load(loaded, saved);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto& state = static_cast<const torch::optim::RMSpropParamState&>(
        *loaded.state().at(expected[i].unsafeGetTensorImpl()));
    EXPECT_EQ(state.step(), 4);
    expect_close(state.square_avg(), static_cast<const torch::optim::RMSpropParamState&>(
                                         *plain.state().at(expected[i].unsafeGetTensorImpl()))
                                         .square_avg());
  }
}

/// Steps by the norm of each gradient.
struct NormedKernel : RMSpropKernel {
  static void step(const Options& o, const torchamp::detail::StepList& list,
                   const torchamp::detail::StepScalars& scalars) {
    const auto& scale = scalars.grad_scale();
    const Params grads = scale ? at::_foreach_div(list.grads, *scale) : list.grads;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      list.params[i].sub_(grads[i].div(grads[i].norm()), o.lr());
    }
  }
};

TEST(OwnKernel, StepsWholeParametersAlsoWhenGradientsAreDropped) {
  const int64_t size = 1 << 19;
  const Tensor p = torch::zeros({size}).requires_grad_();
  torchamp::FusedOptimizerOf<NormedKernel> optimizer({p}, torch::optim::RMSpropOptions(1.));
  optimizer.drop_gradients_after_step();
  p.mutable_grad() = torch::ones({size});
  optimizer.step_scaled(number(4., at::kCPU), number(0., at::kCPU));
  expect_close(p.detach().norm(), torch::ones({}));
  EXPECT_FALSE(p.grad().defined());
}

TEST(OwnKernel, StepsWholeParametersOfSplitMasters) {
  const torch::nn::Linear model(torch::nn::LinearOptions(300, 250).bias(false));
  torch::nn::init::zeros_(model->weight);
  const torchamp::MasterWeights masters(
      model, {.dtype = at::kBFloat16, .storage = torchamp::MasterStorage::split});
  torchamp::FusedOptimizerOf<NormedKernel> optimizer(masters.parameters(),
                                                     torch::optim::RMSpropOptions(1.));
  model->weight.mutable_grad() = torch::ones({250, 300});
  optimizer.step();
  expect_close(model->weight.detach().to(at::kFloat).norm(), torch::ones({}), at::kBFloat16);
}

}  // namespace
