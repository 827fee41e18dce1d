// SPDX-License-Identifier: BSD-3-Clause
// The fused optimizers' states: in archives, and changed under way.
#include <torch/torch.h>
#include <torchamp/optim.h>

#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/damaged.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/fused_optimizers.h"
#include "support/tolerances.h"

namespace {

using torch::optim::AdamParamState;

AdamParamState& adam_state(const auto& states, const Tensor& p) {
  return static_cast<AdamParamState&>(*states.at(p.unsafeGetTensorImpl()));
}

// ---- Archives -----------------------------------------------------------------------------------

TEST_P(FusedOptimizers, ExchangeArchivesWithLibTorchsOwn) {
  const Pair pair(kind(), params(), /*two_groups=*/true);
  for (int i = 0; i < 5; ++i) pair.random_step();
  // Each goes on from the other's archive, and then both from their own.
  const Pair swapped(kind(), copies(pair.fused_params), /*two_groups=*/true);
  const Pair again(kind(), copies(pair.fused_params), /*two_groups=*/true);
  through_archive(*pair.plain, *swapped.fused);
  through_archive(*pair.fused, *swapped.plain);
  through_archive(*pair.fused, *again.fused);
  through_archive(*pair.plain, *again.plain);
  for (int i = 0; i < 6; ++i) {
    swapped.random_step();
    swapped.expect_equal();
    again.random_step();
    again.expect_equal();
  }
}

TEST_P(FusedOptimizers, RestoreOptionsOfGroups) {
  const Pair pair(kind(), params(), /*two_groups=*/true);
  pair.fused->param_groups()[0].options().set_lr(0.75);
  pair.fused->param_groups()[1].options().set_lr(0.5);
  const Pair other(kind(), params(), /*two_groups=*/true);
  torch::optim::OptimizerOptions& options = other.fused->param_groups()[0].options();
  through_archive(*pair.fused, *other.fused);
  EXPECT_EQ(options.get_lr(), 0.75);  // the same object, as schedulers may hold it
  EXPECT_EQ(other.fused->param_groups()[1].options().get_lr(), 0.5);
}

TEST_P(FusedOptimizers, StepWithTheRestoredOptionsOfEachGroup) {
  const Pair saved(kind(), params(), /*two_groups=*/true);
  for (int i = 0; i < 3; ++i) saved.random_step();
  // The options that the loading program gives to the groups are replaced.
  const Params loaded = copies(saved.fused_params);
  Groups groups = Pair::groups(loaded, kind(), /*two=*/true);
  groups[0].set_options(kind().other_options());
  groups[1] = OptimizerParamGroup(groups[1].params());
  const auto optimizer = kind().fused(groups);
  through_archive(*saved.fused, *optimizer);
  for (int i = 0; i < 3; ++i) {
    saved.new_gradients(1., 1000);
    for (std::size_t p = 0; p < loaded.size(); ++p) {
      loaded[p].mutable_grad() = saved.plain_params[p].grad().clone();
    }
    saved.plain->step();
    optimizer->step();
    expect_close(loaded, saved.plain_params);
  }
}

// Rates that LibTorch 2.15 would take for unset in a group that is added.
TEST_P(FusedOptimizers, StoreLearningRatesThatAreLibTorchsDefaults) {
  for (const double rate : {1e-3, 1e-2}) {
    const Pair saved(kind(), params());
    const Pair other(kind(), params());
    saved.fused->param_groups()[0].options().set_lr(rate);
    through_archive(*saved.fused, *other.fused);
    through_archive(*saved.fused, *other.plain);
    EXPECT_EQ(other.fused->param_groups()[0].options().get_lr(), rate);
    EXPECT_EQ(other.plain->param_groups()[0].options().get_lr(), rate);
  }
}

TEST_P(FusedOptimizers, LoadOtherDtypesAndReplaceAllState) {
  const Pair saved(kind(), params(at::kDouble));
  for (int i = 0; i < 3; ++i) saved.random_step();
  const Pair loaded(kind(), params(at::kFloat));
  loaded.random_step();
  loaded.random_step();
  for (std::size_t p = 0; p < loaded.fused_params.size(); ++p) {
    loaded.fused_params[p].set_data(saved.plain_params[p].detach().to(at::kFloat));
  }
  through_archive(*saved.plain, *loaded.fused);
  for (int i = 0; i < 3; ++i) {
    for (std::size_t p = 0; p < saved.plain_params.size(); ++p) {
      saved.plain_params[p].mutable_grad() = torch::randn_like(saved.plain_params[p]);
      loaded.fused_params[p].mutable_grad() = saved.plain_params[p].grad().to(at::kFloat);
    }
    saved.plain->step();
    loaded.fused->step();
  }
  for (std::size_t p = 0; p < saved.plain_params.size(); ++p) {
    ::expect_close(loaded.fused_params[p], saved.plain_params[p], at::kFloat);
  }
}

TEST_P(FusedOptimizers, SaveAndLoadWithAFrozenParameterThatIsNoLeafNow) {
  const Pair pair(kind(), params());
  const Tensor x = torch::ones({1}, torch::device(device()).requires_grad(true));
  pair.random_step();
  const Pair other(kind(), copies(pair.fused_params));
  for (const Pair* const one : {&pair, &other}) {
    Tensor& param = one->fused->param_groups()[0].params()[0];
    param = param.detach().mul_(x);
    EXPECT_FALSE(param.is_leaf());
  }
  through_archive(*pair.fused, *other.fused);
}

TEST(FusedAdam, SavesNoGroupWithoutOptionsAsLibTorchsOwnDoesNot) {
  torchamp::FusedAdam optimizer({param({5}, {})});
  optimizer.param_groups().emplace_back(Params{param({2}, {})});
  torch::serialize::OutputArchive archive;
  EXPECT_ERROR(optimizer.save(archive), "has_options()");
}

TEST_P(FusedOptimizers, RefuseForeignArchivesAndStayUnchanged) {
  const Pair pair(kind(), params());
  for (int i = 0; i < 3; ++i) pair.random_step();
  const char* const not_ours = "::load: the archive does not hold what ";

  // LibTorch's Adam and AdamW load each other's archives.
  const auto is_adam = [](const Kind& one) { return one.op.starts_with("_fused_adam"); };
  for (const Kind& other : kinds()) {
    if (other.optimizer == kind().optimizer || (is_adam(other) && is_adam(kind()))) continue;
    SCOPED_TRACE(other.name);
    const Pair of_another(other, params());
    of_another.random_step();
    EXPECT_ERROR(through_archive(*of_another.plain, *pair.fused), not_ours);
    try {
      through_archive(*of_another.plain, *pair.fused);
    } catch (const c10::Error& error) {
      EXPECT_EQ(std::string(error.what_without_backtrace()).find("INTERNAL ASSERT"),
                std::string::npos);
    }
  }

  const Pair fewer(kind(), {param({5}, device())});
  fewer.random_step();
  EXPECT_ERROR(through_archive(*fewer.plain, *pair.fused), not_ours);

  torch::serialize::OutputArchive empty;
  std::stringstream file;
  empty.write("anything", torch::ones({1}));
  empty.save_to(file);
  EXPECT_ERROR(torch::load(*pair.fused, file), not_ours);

  if (kind().has_state) {
    Params shapes = params();
    shapes[3] = param({41}, device());
    const Pair other_shapes(kind(), shapes);
    other_shapes.new_gradients(1., 1000);
    other_shapes.plain->step();
    EXPECT_ERROR(through_archive(*other_shapes.plain, *pair.fused),
                 "the archive's state of parameter 3 of group 0 has the shape [41], the parameter "
                 "[40]");
  }
  for (int i = 0; i < 4; ++i) {
    pair.random_step();
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, SurviveDamagedArchives) {
  const Pair pair(kind(), params(), /*two_groups=*/true);
  for (int i = 0; i < 3; ++i) pair.random_step();
  const auto saved = [&](const Optimizer& optimizer) {
    std::ostringstream archive;
    torch::save(optimizer, archive);
    return archive.str();
  };
  const std::string whole = saved(*pair.fused);
  const double rate = pair.fused->param_groups()[0].options().get_lr();
  std::mt19937 random(3);
  int errors = 0;
  for (int i = 0; i < 60; ++i) {
    SCOPED_TRACE(i);
    const Pair other(kind(), copies(pair.plain_params), /*two_groups=*/true);
    other.new_gradients(1., 1000);
    other.plain->step();
    other.fused->step();
    std::istringstream archive(damaged(whole, random));
    try {
      torch::load(*other.fused, archive);
    } catch (const std::exception&) {
      ++errors;
      EXPECT_EQ(other.fused->param_groups()[0].options().get_lr(), rate);
      other.random_step();
      other.expect_equal();
    }
  }
  EXPECT_GT(errors, 15);
}

TEST(FusedAdam, StoresTheNumberOfStepsThatWereTaken) {
  const Params params{param({2}), param({3}), param({4})};
  torchamp::FusedAdam optimizer(params);
  const auto step = [&](bool skipped, const std::vector<std::size_t>& stepped) {
    for (const Tensor& p : params) p.mutable_grad().reset();
    for (const std::size_t p : stepped) params[p].mutable_grad() = torch::randn_like(params[p]);
    optimizer.step_scaled({}, number(skipped ? 1. : 0., at::kCPU));
  };
  step(true, {0, 1});
  step(false, {0, 1});
  step(false, {1});
  step(true, {0, 1, 2});
  step(false, {0, 1});

  torch::optim::Adam plain(params);
  through_archive(optimizer, plain);
  EXPECT_EQ(adam_state(plain.state(), params[0]).step(), 2);
  EXPECT_EQ(adam_state(plain.state(), params[1]).step(), 3);
  EXPECT_EQ(plain.state().size(), 2);  // as if the third had never been tried

  step(false, {0, 2});
  const Optimizer& base = optimizer;
  EXPECT_EQ(adam_state(base.state(), params[0]).step(), 2);  // not brought up to date
  const torchamp::FusedAdam& looked_at = optimizer;
  EXPECT_EQ(adam_state(looked_at.state(), params[0]).step(), 3);
  EXPECT_EQ(adam_state(looked_at.state(), params[1]).step(), 3);
  EXPECT_EQ(adam_state(looked_at.state(), params[2]).step(), 1);
}

// ---- States and options changed by hand ---------------------------------------------------------

TEST(FusedAdam, GoesOnFromAStateChangedByHand) {
  const Pair pair(kind_named("adam"), {param({3}), param({4})});
  for (int i = 0; i < 3; ++i) {
    pair.new_gradients(1., 1000);
    pair.plain->step();
    pair.fused->step();
  }
  auto& fused = dynamic_cast<torchamp::FusedAdam&>(*pair.fused);
  for (std::size_t p = 0; p < 2; ++p) {
    for (AdamParamState* state : {&adam_state(pair.plain->state(), pair.plain_params[p]),
                                  &adam_state(fused.state(), pair.fused_params[p])}) {
      state->step(7);
      state->exp_avg(torch::ones_like(state->exp_avg()));
    }
  }
  pair.random_step();
  pair.expect_equal();
  pair.plain->state().clear();
  fused.state().clear();
  for (int i = 0; i < 3; ++i) {
    pair.random_step();
    pair.expect_equal();
  }
}

/// Steps with a gradient for each parameter, so that a plan is kept from one to the next.
void step_with_all(const Pair& pair, int times) {
  for (int i = 0; i < times; ++i) {
    pair.new_gradients(1., 1000000);
    pair.plain->step();
    pair.fused->step();
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, StartAgainIfTheirStatesWereClearedAsLibTorchsOwnDo) {
  Pair pair(kind(), params(), /*two_groups=*/true);
  step_with_all(pair, 3);
  if (kind().name.starts_with("adagrad")) {  // LibTorch's makes states in its constructor alone
    pair.plain = kind().plain(pair.plain->param_groups());
    pair.fused->state().clear();
    return step_with_all(pair, 3);
  }
  for (Optimizer* optimizer : {pair.plain.get(), pair.fused.get()}) optimizer->state().clear();
  step_with_all(pair, 3);
  for (const std::size_t p : {std::size_t(0), std::size_t(3)}) {
    pair.plain->state().erase(pair.plain_params[p].unsafeGetTensorImpl());
    pair.fused->state().erase(pair.fused_params[p].unsafeGetTensorImpl());
  }
  std::stringstream archive;
  torch::save(*pair.fused, archive);  // which counts what is left
  step_with_all(pair, 3);
  // Of a parameter that has no gradient meanwhile, too.
  pair.plain_params[1].mutable_grad().reset();
  pair.fused_params[1].mutable_grad().reset();
  pair.plain->step();
  pair.fused->step();
  pair.plain->state().erase(pair.plain_params[1].unsafeGetTensorImpl());
  pair.fused->state().erase(pair.fused_params[1].unsafeGetTensorImpl());
  step_with_all(pair, 3);
}

TEST_P(FusedOptimizers, FollowTheirParametersToAnotherLayoutWithoutAPause) {
  const auto options = at::TensorOptions(device());
  const Pair pair(kind(), {param({3, 4}, options), param({3, 4}, options)});
  step_with_all(pair, 2);
  for (const Tensor& p : pair.fused_params) {
    p.set_data(p.detach().t().contiguous().t());  // and its gradients are of that layout, too
  }
  for (int i = 0; i < 2; ++i) {
    pair.new_gradients(1., 1000000);
    for (const Tensor& p : pair.fused_params) {
      p.mutable_grad() = p.grad().t().contiguous().t();
    }
    pair.plain->step();
    pair.fused->step();
    pair.expect_equal();
  }
}

TEST_P(FusedOptimizers, SaveTheStateOfParametersOfAnyLayout) {
  const auto options = at::TensorOptions(device());
  const Tensor channels_last =
      torch::randn({2, 3, 4, 5}, options).contiguous(at::MemoryFormat::ChannelsLast);
  const Pair pair(kind(), {torch::randn({3, 4}, options).t().requires_grad_(),
                           channels_last.requires_grad_(), param({5}, options)});
  step_with_all(pair, 3);
  const Params params = copies(pair.fused_params);
  const auto loaded = kind().plain({OptimizerParamGroup(params)});
  through_archive(*pair.fused, *loaded);
  for (int i = 0; i < 2; ++i) {
    pair.new_gradients(1., 1000000);
    for (std::size_t p = 0; p < params.size(); ++p) {
      params[p].mutable_grad() = pair.plain_params[p].grad();
    }
    pair.plain->step();
    loaded->step();
    expect_close(params, pair.plain_params);
  }
}

TEST(FusedAdam, GoesOnFromAStateChangedThroughLibTorchsInterface) {
  const std::vector<std::function<void(std::unique_ptr<torch::optim::OptimizerParamState>&)>>
      changes{[](auto& state) {  // another one
                const auto& before = static_cast<const AdamParamState&>(*state);
                auto other = std::make_unique<AdamParamState>();
                other->step(7);
                other->exp_avg(torch::ones_like(before.exp_avg()));
                other->exp_avg_sq(torch::ones_like(before.exp_avg()));
                state = std::move(other);
              },
              [](auto& state) {
                auto& adam = static_cast<AdamParamState&>(*state);
                adam.exp_avg(torch::ones_like(adam.exp_avg()));
              },
              [](auto& state) {
                auto& adam = static_cast<AdamParamState&>(*state);
                adam.exp_avg_sq(torch::ones_like(adam.exp_avg()));
              },
              [](auto& state) { static_cast<AdamParamState&>(*state).exp_avg().fill_(2.); },
              [](auto& state) { static_cast<AdamParamState&>(*state).step(9); }};
  for (std::size_t c = 0; c < changes.size(); ++c) {
    for (const bool saves : {false, true}) {
      SCOPED_TRACE(c10::str(c, ' ', saves));
      const Pair pair(kind_named("adam"), {param({3}), param({4})});
      step_with_all(pair, 3);
      for (const auto& [optimizer, params] : {std::pair(pair.plain.get(), pair.plain_params),
                                              std::pair(pair.fused.get(), pair.fused_params)}) {
        changes[c](optimizer->state().at(params[1].unsafeGetTensorImpl()));
      }
      if (saves) {
        const Pair loaded(kind_named("adam"), copies(pair.fused_params));
        through_archive(*pair.fused, *loaded.fused);
        through_archive(*pair.plain, *loaded.plain);
        step_with_all(loaded, 2);
      }
      step_with_all(pair, 3);
    }
  }
}

TEST(FusedAdam, ReportsStatesChangedThroughLibTorchsInterfaceToACapture) {
  const Params params{param({3}), param({4}), param({2})};
  torchamp::FusedAdam optimizer(params);
  Optimizer& base = optimizer;
  const auto state = [&](std::size_t p) {
    return base.state().find(params[p].unsafeGetTensorImpl());
  };
  const std::vector<std::function<void()>> changes{
      [&] { base.state().clear(); },
      [&] { base.state().erase(state(0)); },
      [&] { base.state().erase(state(2)); },  // whose parameter has no gradient
      [&] { state(1)->second = state(1)->second->clone(); },
      [&] {
        auto& adam = static_cast<AdamParamState&>(*state(1)->second);
        adam.exp_avg_sq(adam.exp_avg_sq().clone());
      },
      [&] { static_cast<AdamParamState&>(*state(0)->second).step(100); }};
  for (std::size_t c = 0; c < changes.size(); ++c) {
    SCOPED_TRACE(c);
    for (const Tensor& p : params) p.mutable_grad() = torch::ones_like(p);
    optimizer.step();
    params[2].mutable_grad().reset();
    optimizer.prepare_captured_step();
    optimizer.step();
    EXPECT_TRUE(optimizer.prepare_captured_step());
    changes[c]();
    EXPECT_FALSE(optimizer.prepare_captured_step());
    optimizer.step();
    EXPECT_TRUE(optimizer.prepare_captured_step());
  }
}

TEST(FusedAdam, KeepsStateOnTheParametersDeviceInItsDtype) {
  for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
    if (device == at::kCUDA && !at::hasCUDA()) continue;
    const Tensor p = param({3}, at::TensorOptions(device).dtype(at::kBFloat16));
    torchamp::FusedAdam optimizer(Params{p});
    p.mutable_grad() = torch::ones_like(p);
    optimizer.step();
    const AdamParamState& state = adam_state(optimizer.state(), p);
    for (const Tensor& tensor : {state.exp_avg(), state.exp_avg_sq()}) {
      EXPECT_EQ(tensor.device(), p.device());
      EXPECT_EQ(tensor.scalar_type(), at::kBFloat16);
    }
  }
}

TEST(FusedAdam, TakesUpAmsgradLater) {
  const Params params{param({4})};
  torchamp::FusedAdam optimizer(params);
  const auto step = [&] {
    params[0].mutable_grad() = torch::ones_like(params[0]);
    optimizer.step();
  };
  step();
  static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).amsgrad(true);
  step();
  EXPECT_GT(adam_state(optimizer.state(), params[0]).max_exp_avg_sq().min().item<double>(), 0.);
}

TEST(FusedAdam, TakesNoStateForOneThatWasAtItsAddress) {
  const Tensor p = param({3});
  torchamp::FusedAdam optimizer({p});
  auto& states = static_cast<Optimizer&>(optimizer).state();
  std::unique_ptr<torch::optim::OptimizerParamState>* slot = nullptr;
  bool same_address = false;
  for (int i = 0; i < 100 && !same_address; ++i) {
    p.mutable_grad() = torch::ones({3});
    for (int s = 0; s < 3; ++s) optimizer.step();
    slot = &states.at(p.unsafeGetTensorImpl());
    const void* const before = slot->get();
    // The memory may be handed out again after other blocks of its size only.
    std::vector<std::unique_ptr<AdamParamState>> others;
    others.reserve(64);
    *slot = nullptr;
    while (others.size() < 64 && !same_address) {
      others.push_back(std::make_unique<AdamParamState>());
      same_address = others.back().get() == before;
    }
    *slot = std::move(others.back());
  }
  ASSERT_TRUE(same_address);
  optimizer.step();
  EXPECT_EQ(adam_state(optimizer.state(), p).step(), 1);
}

TEST(FusedSGD, MakesAFirstStepAfterSkippedOnesWhateverWasSetMeanwhile) {
  for (const bool asks_for_state : {false, true}) {
    for (const double dampening_before : {0., 0.5}) {
      const Pair pair(kind_named("sgd"), {param({4}), param({3})});
      const auto set = [&](double dampening) {
        for (Optimizer* optimizer : {pair.plain.get(), pair.fused.get()}) {
          static_cast<SGDOptions&>(optimizer->param_groups()[0].options())
              .momentum(0.9)
              .dampening(dampening);
        }
      };
      set(dampening_before);
      auto& fused = static_cast<torchamp::FusedSGD&>(*pair.fused);
      for (const Tensor& p : pair.fused_params) p.mutable_grad() = torch::ones_like(p);
      for (int i = 0; i < 2; ++i) fused.step_scaled({}, torch::ones({}));  // skipped
      if (asks_for_state) (void)fused.state();
      set(0.5);
      for (int i = 0; i < 3; ++i) {
        pair.random_step();
        pair.expect_equal();
      }
    }
  }
}

TEST(FusedSGD, TakesUpMomentumAndDampeningLater) {
  const Pair pair(kind_named("sgd"), {param({4}), param({3})});
  pair.random_step();
  for (Optimizer* optimizer : {pair.plain.get(), pair.fused.get()}) {
    static_cast<SGDOptions&>(optimizer->param_groups()[0].options()).momentum(0.9).dampening(0.5);
  }
  for (int i = 0; i < 8; ++i) {
    pair.random_step();
    pair.expect_equal();
  }
}

}  // namespace
