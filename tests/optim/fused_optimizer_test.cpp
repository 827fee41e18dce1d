// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/optim.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "simulated_device/counts.h"
#include "support/call_counter.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/fused_optimizers.h"
#include "support/host_allocation_limit.h"
#include "support/tolerances.h"

namespace {

// ---- Moves, as LibTorch's optimizers do ---------------------------------------------------------

using torchamp::FusedAdam;

static_assert(std::is_move_constructible_v<FusedAdam>);
static_assert(!std::is_copy_constructible_v<FusedAdam> && !std::is_copy_assignable_v<FusedAdam>);
// Not with LibTorch 2.6, whose own cannot be assigned.
static_assert(std::is_move_assignable_v<FusedAdam> == std::is_move_assignable_v<Optimizer>);

TEST(FusedAdam, StepsAfterAMove) {
  torch::manual_seed(1);
  const Params params{param({3}), param({2, 2})};
  const Params plain_params = copies(params);
  torch::optim::Adam plain(plain_params, AdamOptions(0.1));
  const auto step = [&](FusedAdam& fused) {
    for (std::size_t i = 0; i < params.size(); ++i) {
      params[i].mutable_grad() = torch::randn_like(params[i]);
      plain_params[i].mutable_grad() = params[i].grad().clone();
    }
    plain.step();
    fused.step();
  };
  FusedAdam first(params, AdamOptions(0.1));
  step(first);
  FusedAdam second(std::move(first));
  step(second);
  expect_close(params, plain_params);
  EXPECT_EQ(second.state().size(), params.size());
}

// ---- What a step costs, and what it leaves alone ------------------------------------------------

TEST_P(FusedOptimizers, CallNoMoreForMoreParameters) {
  if (kind().op.empty()) GTEST_SKIP() << "ForeachStep counts the launches of such a step";
  const auto calls = [&](int64_t number_of_params, bool scaled) {
    Params many;
    for (int64_t i = 0; i < number_of_params; ++i) many.push_back(param({2}, device()));
    const auto optimizer = kind().fused({OptimizerParamGroup(many)});
    const Tensor scale = number(2., device()), found_inf = number(0., device());
    int called = 0;
    for (int i = 0; i < 3; ++i) {
      for (const Tensor& p : many) p.mutable_grad() = torch::ones_like(p);
      (void)found_inf.cpu();  // the host learns of first steps when the device has made them
      const CallCounter counter;
      if (scaled) {
        as_fused(*optimizer).step_scaled(scale, found_inf);
      } else {
        optimizer->step();
      }
      EXPECT_EQ(counter.reads(), 0);
      called = counter.called();
    }
    return called;
  };
  for (const bool scaled : {false, true}) {
    const int few = calls(3, scaled);
    EXPECT_EQ(calls(300, scaled), few);
    EXPECT_LE(few, kind().most_calls);
  }
}

TEST_P(FusedOptimizers, WriteTheirRatesForCapturedStepsOnlyIfTheyChange) {
  const Tensor p = param({3}, device());
  const auto optimizer = kind().fused({OptimizerParamGroup({p})});
  auto& captured = dynamic_cast<torchamp::CapturedStep&>(*optimizer);
  p.mutable_grad() = torch::ones_like(p);
  captured.prepare_captured_step();
  optimizer->step();
  const auto writes = [&] {
    const CallCounter counter;
    captured.prepare_captured_step();
    return counter.called("aten::fill_");
  };
  EXPECT_EQ(writes(), 0);
  auto& options = optimizer->param_groups()[0].options();
  options.set_lr(options.get_lr() * 0.5);
  EXPECT_EQ(writes(), 1);
  EXPECT_EQ(writes(), 0);
}

TEST_P(FusedOptimizers, RefuseAParameterThatIsNoLongerDense) {
  const Tensor p = param({3}, device());
  const auto optimizer = kind().fused({OptimizerParamGroup({p})});
  for (const bool is_dense : {true, false}) {
    if (!is_dense) Tensor(p).set_data(torch::zeros({3, 2}, device()).select(1, 0));
    p.mutable_grad() = torch::ones_like(p);
    if (is_dense) {
      optimizer->step();
    } else {
      EXPECT_ERROR(optimizer->step(), "has gaps or overlaps in memory");
    }
  }
}

TEST(FusedSGD, LaunchesNoMoreAfterDampeningThanWithout) {
  SKIP_WITHOUT(at::kPrivateUse1);
  const auto kernels = [](double dampening_before) {
    const Tensor p = param({3}, at::kPrivateUse1);
    torchamp::FusedSGD optimizer(
        {p}, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(dampening_before));
    const Tensor scale = number(2., at::kPrivateUse1), bad = number(1., at::kPrivateUse1);
    const auto step = [&] {
      p.mutable_grad() = torch::ones_like(p);
      const simulated::Counts counts;
      optimizer.step_scaled(scale, bad);  // so that a first step is still to come
      return counts.now().kernels;
    };
    step();
    static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).dampening(0.);
    step();
    return step();
  };
  EXPECT_EQ(kernels(0.5), kernels(0.));
}

TEST_P(FusedOptimizers, HoldNoGradients) {
  const Pair pair(kind(), params());
  pair.fused_params[0].mutable_grad() = torch::ones_like(pair.fused_params[0]);
  const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> gradient(
      pair.fused_params[0].grad().getIntrusivePtr());
  pair.fused->step();
  EXPECT_FALSE(gradient.expired());
  pair.fused->zero_grad();
  EXPECT_TRUE(gradient.expired());
}

TEST_P(FusedOptimizers, LetAutogradKnowThatTheyWriteToEachParameter) {
  for (const std::size_t written : {0, 1}) {
    const Params both{param({3}, device()), param({3}, device())};
    const auto optimizer = kind().fused({OptimizerParamGroup(both)});
    const Tensor loss = (both[written] * both[written]).sum();  // saves the parameter
    for (const Tensor& p : both) p.mutable_grad() = torch::ones_like(p);
    optimizer->step();
    EXPECT_ERROR(loss.backward(), "modified by an inplace operation");
  }
}

struct Trained {
  Params params;
  bool failed = false;
};

/// Two steps. The first one has memory for so many allocations, and is made again if they do not
/// suffice.
template <class Make>
Trained train_with_memory(const Make& make, int allocations) {
  torch::manual_seed(1);
  Trained trained{.params = {param({3, 4}), param({3, 4})}};
  const Params before = copies(trained.params);
  const std::unique_ptr<Optimizer> optimizer = make(trained.params);
  const Tensor found_inf = number(0., at::kCPU);
  const auto step = [&] { as_fused(*optimizer).step_scaled(Tensor(), found_inf); };
  for (const Tensor& p : trained.params) p.mutable_grad() = torch::randn_like(p);
  try {
    const HostAllocationLimit limit(allocations);
    step();
  } catch (const c10::OutOfMemoryError&) {
    trained.failed = true;
  }
  if (trained.failed) {
    expect_close(trained.params, before);
    step();
  }
  step();
  return trained;
}

template <class Make>
void expect_no_trace_of_steps_without_memory(const Make& make) {
  constexpr int enough = 500;
  const Params expected = train_with_memory(make, enough).params;
  for (int allocations = 0; allocations < enough; ++allocations) {
    SCOPED_TRACE(allocations);
    const Trained trained = train_with_memory(make, allocations);
    expect_close(trained.params, expected);
    if (!trained.failed) return;
  }
}

TEST_P(FusedOptimizers, AreUnchangedByAStepThatRunsOutOfMemory) {
  if (device() != at::kCPU) return;
  expect_no_trace_of_steps_without_memory(
      [&](const Params& both) { return kind().fused({OptimizerParamGroup(both)}); });
}

TEST(FusedMuon, IsUnchangedByAStepThatRunsOutOfMemory) {
  expect_no_trace_of_steps_without_memory([](const Params& both) {
    return std::make_unique<torchamp::FusedMuon>(both, torchamp::MuonOptions(0.1));
  });
}

TEST_P(FusedOptimizers, IgnoreAutocast) {
  const Pair pair(kind(), params());
  for (int i = 0; i < 3; ++i) {
    pair.new_gradients(1.);
    pair.plain->step();
    at::autocast::set_autocast_enabled(device(), true);
    as_fused(*pair.fused).divide_next_step(number(1., device()));
    pair.fused->step();
    at::autocast::set_autocast_enabled(device(), false);
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, CanBeMoved) {
  torchamp::FusedSGD first(params(), SGDOptions(0.5).momentum(0.9));
  const Params params = first.param_groups()[0].params();
  for (const Tensor& p : params) p.mutable_grad() = torch::ones_like(p);
  const Tensor before = params[0].detach().clone();
  first.step();
  first.divide_next_step(number(2., device()));
  torchamp::FusedSGD second(std::move(first));
  second.step();
  ::expect_close(params[0], before - 0.5 - 0.5 * (0.9 + 0.5));
}

// ---- A divisor for the next step ----------------------------------------------------------------

TEST_P(FusedOptimizers, DivideTheNextStepOnce) {
  const Pair pair(kind(), params());
  for (int i = 0; i < 3; ++i) {
    pair.new_gradients(32., 1000);
    as_fused(*pair.fused).divide_next_step(number(4., device()));
    as_fused(*pair.fused).divide_next_step(number(2., at::kCPU));
    EXPECT_EQ(as_fused(*pair.fused).next_step_divisor().item<float>(), 8.F);
    pair.plain->step();
    as_fused(*pair.fused).step_scaled(number(4., device()), number(0., device()));
    EXPECT_FALSE(as_fused(*pair.fused).next_step_divisor().defined());
    pair.new_gradients(1.);
    pair.plain->step();
    pair.fused->step();
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, SpendADivisorOnASkippedStep) {
  const Pair pair(kind(), params());
  pair.new_gradients(2., 1000);
  as_fused(*pair.fused).divide_next_step(number(2., device()));
  as_fused(*pair.fused).step_scaled({}, number(1., device()));
  EXPECT_FALSE(as_fused(*pair.fused).next_step_divisor().defined());
}

TEST(FusedOptimizer, ForgetsADivisorWithItsGradients) {
  const Tensor p = param({3});
  torchamp::FusedSGD optimizer(Params{p}, SGDOptions(1.));
  p.mutable_grad() = torch::ones({3});
  optimizer.divide_next_step(number(4., at::kCPU));
  optimizer.zero_grad();
  EXPECT_FALSE(optimizer.next_step_divisor().defined());
  p.mutable_grad() = torch::ones({3});
  EXPECT_FALSE(optimizer.next_step_divisor().defined());
  const Tensor before = p.detach().clone();
  optimizer.step();
  ::expect_close(p, before - 1.);

  optimizer.divide_next_step(number(4., at::kCPU));
  EXPECT_EQ(optimizer.take_next_step_divisor().item<float>(), 4.F);
  EXPECT_FALSE(optimizer.next_step_divisor().defined());
}

// ---- Errors -------------------------------------------------------------------------------------

TEST(FusedOptimizer, NamesTheParameterThatItCannotStepAndChangesNothing) {
  const Params params{param({3}), param({4, 2})};
  torchamp::FusedAdam optimizer(params, AdamOptions(0.1));
  for (const Tensor& p : params) p.mutable_grad() = torch::ones_like(p);
  optimizer.step();
  const Params before = copies(params);

  params[1].mutable_grad() = torch::ones({4, 2}).to_sparse();
  EXPECT_ERROR(optimizer.step(),
               "FusedAdam::step: parameter 1 of group 0 has a gradient of layout Sparse");
  params[1].mutable_grad() = torch::ones({4, 2});

  const Tensor complex = torch::zeros({2}, at::kComplexFloat).requires_grad_();
  complex.mutable_grad() = torch::ones_like(complex);
  optimizer.add_param_group(OptimizerParamGroup({complex}));
  EXPECT_ERROR(optimizer.step(), "parameter 0 of group 1 is of dtype ComplexFloat");
  optimizer.param_groups().pop_back();

  const Tensor gaps = torch::zeros({4, 4}).slice(1, 0, 4, 2).detach().requires_grad_();
  gaps.mutable_grad() = torch::ones({4, 2});
  optimizer.add_param_group(OptimizerParamGroup({gaps}));
  EXPECT_ERROR(optimizer.step(), "parameter 0 of group 1 has gaps or overlaps in memory");
  optimizer.param_groups().pop_back();

  optimizer.param_groups()[0].params().push_back(params[0]);
  EXPECT_ERROR(optimizer.step(), "parameter 2 of group 0 is in the optimizer twice");
  optimizer.param_groups()[0].params().pop_back();

  params[0].mutable_grad().reset();
  params[0].set_data(torch::zeros({5}));
  params[0].mutable_grad() = torch::ones({5});
  EXPECT_ERROR(optimizer.step(),
               "parameter 0 of group 0 is of shape [5], its state of [3]. Make a new optimizer");
  params[0].mutable_grad().reset();
  params[0].set_data(before[0].detach().clone());
  params[0].mutable_grad() = torch::ones({3});

  EXPECT_TRUE(torch::equal(params[1], before[1]));
  optimizer.step();
  const auto& states = std::as_const(optimizer).state();
  for (const Tensor& p : params) {
    const auto& state = *states.at(p.unsafeGetTensorImpl());
    EXPECT_EQ(static_cast<const torch::optim::AdamParamState&>(state).step(), 2);
  }
}

TEST(FusedOptimizer, ChecksOptionsAsLibTorchDoes) {
  const Params params{param({3})};
  EXPECT_ERROR(torchamp::FusedAdam(params, AdamOptions(-1.)), "Invalid learning rate: -1");
  EXPECT_ERROR(torchamp::FusedAdamW(params, AdamWOptions().betas(Betas(0.9, 1.))),
               "Invalid beta parameter at index 1: 1");
  EXPECT_ERROR(torchamp::FusedSGD(params, SGDOptions(0.1).nesterov(true)),
               "Nesterov momentum requires a momentum and zero dampening");
  EXPECT_ERROR(torchamp::FusedAdagrad(params, AdagradOptions().eps(-1.)), "Invalid epsilon value");
  Groups groups{OptimizerParamGroup(params)};
  groups[0].set_options(std::make_unique<AdamOptions>(AdamOptions().weight_decay(-1.)));
  EXPECT_ERROR(torchamp::FusedAdam{groups}, "Invalid weight_decay value: -1");
  const Groups of_another{OptimizerParamGroup(params, std::make_unique<SGDOptions>(0.1))};
  EXPECT_ERROR(torchamp::FusedAdam{of_another},
               "FusedAdam: the options of group 0 belong to another optimizer");
  torchamp::FusedAdamW optimizer(params);
  EXPECT_ERROR(optimizer.add_param_group(of_another[0]),
               "FusedAdamW: the options of group 1 belong to another optimizer");
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
  optimizer.param_groups()[0].set_options(std::make_unique<AdamOptions>());
  EXPECT_ERROR(optimizer.step(), "FusedAdamW: the options of group 0 belong to another optimizer");
}

TEST_P(FusedOptimizers, RefuseOptionsOutOfRange) {
  if (kind().is_in_libtorch) GTEST_SKIP() << "ChecksOptionsAsLibTorchDoes tests such options";
  ASSERT_FALSE(kind().refused.empty()) << "add options out of range to the kind";
  for (const auto& [options, error] : kind().refused) {
    const Groups groups{OptimizerParamGroup({param({3}, device())}, options->clone())};
    EXPECT_ERROR(kind().fused(groups), error);
  }
}

TEST(FusedOptimizer, WantsZeroDimFp32Scalars) {
  torchamp::FusedAdam optimizer(Params{param({3})});
  EXPECT_ERROR(optimizer.step_scaled(torch::ones({}, at::kDouble), {}),
               "grad_scale is of dtype Double and shape []. It must be a 0-dim fp32 tensor.");
  EXPECT_ERROR(optimizer.step_scaled({}, torch::zeros({1})), "found_inf is of dtype Float and");
  EXPECT_ERROR(optimizer.divide_next_step({}), "no divisor was given");
}

}  // namespace
