// SPDX-License-Identifier: BSD-3-Clause
// Orders of calls that train wrongly are reported: by an error, or by one warning.
#include <torchamp/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/optimizers.h"
#include "support/seed.h"
#include "support/warnings.h"

namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using torchamp::GradScaler;

constexpr const char* without_scale = "nothing was scaled since the last update()";
constexpr const char* clipped_scaled = "clipped while scaled";
constexpr const char* added_late = "added to the gradients of this optimizer after unscale_";

std::size_t times_told(const std::string& text, const std::string& part) {
  std::size_t times = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++times;
  }
  return times;
}

at::Tensor loss_of(const at::Tensor& w) {
  return (w * w).sum() + w.sum();
}

}  // namespace

// On Windows, a torch::autograd::Function must be of a type with external linkage.
namespace step_order {

/// Calls what `in_backward` holds when its backward runs.
struct Interrupted : torch::autograd::Function<Interrupted> {
  static inline std::function<void()> in_backward;

  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    const at::AutoGradMode with_gradients(true);
    in_backward();
    return gradients;
  }
};

}  // namespace step_order

namespace {

using step_order::Interrupted;

/// Calls `answer` at each of LibTorch's warnings of the calling thread.
class AnsweredWarnings final : public c10::WarningHandler {
 public:
  explicit AnsweredWarnings(std::function<void()> answer) : answer_(std::move(answer)) {}
  void process(const c10::Warning& /*warning*/) override { answer_(); }

 private:
  std::function<void()> answer_;
  c10::WarningUtils::WarnAlways always_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

TEST(GradScalerStepOrder, AWarningHandlerMayEndTheIteration) {
  seed_all(1);  // a gradient that is by chance the limit of a clip would be warned of earlier
  const at::Tensor a = leaf({1, 2}), b = leaf({3, 4});
  torch::optim::SGD first({a}, 0.1), second({b}, 0.1);
  GradScaler scaler({.init_scale = 4.});
  scaler.scale(loss_of(a)).backward();
  scaler.scale(loss_of(b)).backward();
  torchamp::clip_grad_norm_({b}, 1.);  // scaled: a warning of the call that divides it
  scaler.unscale_(first);
  int answers = 0;
  {
    const AnsweredWarnings warnings([&] {
      if (answers++ == 0) scaler.update();
    });
    scaler.unscale_(second);
  }
  ASSERT_GT(answers, 0);
  EXPECT_FALSE(scaler.is_unscaled(first)) << "the iteration has ended";
  EXPECT_TRUE(scaler.is_unscaled(second));
  scaler.step(second);
  EXPECT_TRUE(scaler.is_stepped(second));
}

/// With LibTorch's SGD, and with torchamp's.
class StepOrder : public testing::TestWithParam<bool> {
 protected:
  void iterate() {
    optimizer->zero_grad();
    scaler.scale(loss_of(w)).backward();
    scaler.step(*optimizer);
    scaler.update();
  }

  at::Tensor w = leaf({3});
  std::unique_ptr<torch::optim::Optimizer> optimizer = plain_or_fused_sgd({w}, GetParam(), 1e-3);
  GradScaler scaler{{.init_scale = 64.}};
  CollectedWarnings warnings;
};
INSTANTIATE_TEST_SUITE_P(Sgd, StepOrder, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Fused" : "LibTorchs");
});

TEST_P(StepOrder, ABackwardWithoutScaleIsReportedOnceIfAnEarlierIterationHadIt) {
  iterate();
  EXPECT_THAT(warnings.text(), IsEmpty());
  for (int i = 0; i < 3; ++i) {
    optimizer->zero_grad();
    loss_of(w).backward();
    scaler.step(*optimizer);
    scaler.update();
  }
  EXPECT_EQ(times_told(warnings.text(), without_scale), 1U) << warnings.text();
}

TEST_P(StepOrder, AClipOfScaledGradientsIsReportedAfterAnyNumberOfSkippedIterations) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 6; ++i) {
    EXPECT_THAT(warnings.text(), IsEmpty()) << i;
    optimizer->zero_grad();
    scaler.scale((w * (i < 5 ? infinity : 1.)).sum()).backward();
    torchamp::clip_grad_norm_({w}, 1.);
    EXPECT_EQ(scaler.step(*optimizer).stepped(), i == 5);
    scaler.update();
  }
  EXPECT_THAT(warnings.text(), HasSubstr(clipped_scaled));
}

TEST_P(StepOrder, AScaledLossThatIsNotUsedIsReportedOnceFromTheFirstIterationOn) {
  for (int i = 0; i < 3; ++i) {
    optimizer->zero_grad();
    const at::Tensor loss = loss_of(w);
    if (i % 2 == 0) {
      scaler.scale(loss);
      loss.backward();
    } else {
      const at::Tensor scaled = scaler.scale(loss);
      loss.backward();
      EXPECT_TRUE(scaled.requires_grad());
    }
    scaler.step(*optimizer);
    scaler.update();
  }
  EXPECT_EQ(times_told(warnings.text(), "no backward() of what scale() returned"), 1U)
      << warnings.text();
}

TEST_P(StepOrder, AScaledLossThatIsUsedByASumOrAGradientIsRight) {
  for (int form = 0; form < 4; ++form) {
    optimizer->zero_grad();
    const at::Tensor scaled = scaler.scale(loss_of(w));
    if (form == 0) (scaled + scaler.scale(w.sum())).backward();
    if (form == 1) w.mutable_grad() = torch::autograd::grad({scaled}, {w}).front();
    if (form == 2) torch::autograd::backward({scaled}, {});
    if (form == 3) w.sum().backward(scaler.scale(at::ones({})));  // a gradient from elsewhere
    scaler.step(*optimizer);
    scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(StepOrder, ABackwardWithoutScaleIsReportedByUnscale) {
  iterate();
  optimizer->zero_grad();
  loss_of(w).backward();
  scaler.unscale_(*optimizer);
  EXPECT_THAT(warnings.text(), HasSubstr(without_scale));
}

TEST_P(StepOrder, AClipOfScaledGradientsIsReportedOnce) {
  for (int i = 0; i < 3; ++i) {
    optimizer->zero_grad();
    scaler.scale(loss_of(w)).backward();
    torchamp::clip_grad_norm_(*optimizer, 1.);
    scaler.step(*optimizer);
    scaler.update();
  }
  EXPECT_EQ(times_told(warnings.text(), clipped_scaled), 1U) << warnings.text();
}

TEST_P(StepOrder, AClipOfScaledGradientsIsReportedIfAClipWithTheScalerFollows) {
  scaler.scale(loss_of(w)).backward();
  torchamp::clip_grad_norm_(*optimizer, 1.);
  torchamp::clip_grad_norm_(scaler, *optimizer, 0.5);
  scaler.step(*optimizer);
  EXPECT_EQ(times_told(warnings.text(), clipped_scaled), 1U) << warnings.text();
}

TEST_P(StepOrder, AClipOfScaledParametersOrValuesIsReported) {
  for (int form = 0; form < 3; ++form) {
    GradScaler own({.init_scale = 64.});
    const CollectedWarnings of_form;
    optimizer->zero_grad();
    own.scale(loss_of(w)).backward();
    if (form == 0) torchamp::clip_grad_norm_({w}, 1.);
    if (form == 1) torchamp::clip_grad_value_({w}, 1.);
    if (form == 2) torchamp::clip_grad_value_(*optimizer, 1.);
    own.step(*optimizer);
    EXPECT_THAT(of_form.text(), HasSubstr(clipped_scaled)) << form;
  }
}

TEST_P(StepOrder, AClipOfScaledGradientsByLibTorchsFunctionsIsReportedOnce) {
  for (int form = 0; form < 3; ++form) {
    GradScaler own({.init_scale = 64.});
    const CollectedWarnings of_form;
    std::vector<at::Tensor> parameters{w};
    for (int i = 0; i < 2; ++i) {
      optimizer->zero_grad();
      own.scale(loss_of(w)).backward();
      const double norm = w.grad().norm().item<double>();
      if (form == 2) {
        torch::nn::utils::clip_grad_value_(parameters, 1.);
        EXPECT_EQ(w.grad().abs().max().item<double>(), 1.);
      } else {
        const double given = form == 0
                                 ? torch::nn::utils::clip_grad_norm_(std::vector<at::Tensor>{w}, 1.)
                                 : torch::nn::utils::clip_grad_norm_(parameters, 1., 2.);
        EXPECT_FLOAT_EQ(given, norm);
        EXPECT_NEAR(w.grad().norm().item<double>(), 1., 1e-4);
      }
      own.step(*optimizer);
      own.update();
    }
    EXPECT_EQ(times_told(of_form.text(), clipped_scaled), 1U) << form << of_form.text();
  }
}

TEST_P(StepOrder, AClipByHandOfScaledGradientsIsReported) {
  scaler.scale(loss_of(w)).backward();
  const at::Tensor norm = w.grad().norm();
  w.mutable_grad().mul_(1. / (norm + 1e-6));
  scaler.step(*optimizer);
  EXPECT_THAT(warnings.text(), HasSubstr(clipped_scaled));
}

TEST_P(StepOrder, AnAverageOfScaledGradientsIsNotAClip) {
  for (int i = 0; i < 3; ++i) {
    optimizer->zero_grad();
    scaler.scale(w.sum()).backward();  // gradients of 64
    w.mutable_grad().div_(2);          // a round norm, as a clip to 32 leaves
    scaler.step(*optimizer);
    scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(StepOrder, OnlyTheFirstIterationsAreChecked) {
  for (const int64_t checked : {0, 1, 3}) {
    GradScaler own({.init_scale = 64., .check_order = {.first_iterations = checked}});
    const CollectedWarnings of_own;
    for (int i = 0; i < 5; ++i) {
      optimizer->zero_grad();
      own.scale(loss_of(w)).backward();
      if (i >= checked) torchamp::clip_grad_norm_({w}, 1.);
      own.step(*optimizer);
      own.update();
    }
    EXPECT_THAT(of_own.text(), IsEmpty()) << checked;
  }
}

TEST_P(StepOrder, AClipBeforeBackwardIsReportedOnce) {
  constexpr const char* too_early = "a clip in this iteration found no gradients";
  for (int form = 0; form < 4; ++form) {
    GradScaler own({.init_scale = 64.});
    const CollectedWarnings of_form;
    for (int i = 0; i < 3; ++i) {
      optimizer->zero_grad();
      if (form == 0) torchamp::clip_grad_norm_({w}, 1.);
      if (form == 1) torchamp::clip_grad_norm_(*optimizer, 1.);
      if (form == 2) torchamp::clip_grad_value_({w}, 1.);
      if (form == 3 && GetParam() && i > 0) torchamp::clip_grad_norm_(own, *optimizer, 1.);
      own.scale(loss_of(w)).backward();
      own.step(*optimizer);
      own.update();
    }
    const std::size_t wanted = form != 3 || GetParam() ? 1 : 0;
    EXPECT_EQ(times_told(of_form.text(), too_early), wanted) << form << of_form.text();
  }
}

TEST_P(StepOrder, AClipBeforeBackwardIsNotReportedIfAnotherComesAfter) {
  for (int form = 0; form < 4; ++form) {
    optimizer->zero_grad();
    torchamp::clip_grad_norm_(*optimizer, 1.);
    scaler.scale(loss_of(w)).backward();
    if (form == 1) torchamp::clip_grad_norm_(scaler, *optimizer, 1.);
    if (form == 2) torchamp::clip_grad_value_(scaler, *optimizer, 1.);
    if (form != 1 && form != 2) {
      scaler.unscale_(*optimizer);
      torchamp::clip_grad_norm_({w}, 1.);
    }
    scaler.step(*optimizer);
    scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(StepOrder, AClipBeforeUnscaleIsReported) {
  scaler.scale(loss_of(w)).backward();
  torchamp::clip_grad_norm_(*optimizer, 1.);
  scaler.unscale_(*optimizer);
  EXPECT_THAT(warnings.text(), HasSubstr(clipped_scaled));
}

TEST_P(StepOrder, ABackwardAfterUnscaleIsAnErrorThatDiscardEnds) {
  scaler.scale(loss_of(w)).backward();
  scaler.unscale_(*optimizer);
  scaler.scale(loss_of(w)).backward();
  const at::Tensor before = w.detach().clone();
  EXPECT_ERROR(scaler.step(*optimizer), added_late);
  EXPECT_ERROR(scaler.step(*optimizer), added_late);
  EXPECT_TRUE(at::equal(w, before));
  optimizer->zero_grad();
  scaler.discard(*optimizer);
  iterate();
  EXPECT_FALSE(at::equal(w, before));
}

TEST_P(StepOrder, ABackwardAfterUnscaleOfALossThatWasScaledBeforeIsAnError) {
  const at::Tensor first = scaler.scale(loss_of(w)), second = scaler.scale(loss_of(w));
  first.backward();
  scaler.unscale_(*optimizer);
  second.backward();
  EXPECT_ERROR(scaler.step(*optimizer), added_late);
}

TEST_P(StepOrder, ABackwardAfterUnscaleOfASumOfScaledLossesIsAnError) {
  scaler.scale(loss_of(w)).backward();
  scaler.unscale_(*optimizer);
  const auto losses = scaler.scale({loss_of(w), loss_of(w)});
  (losses[0] + losses[1]).backward();
  EXPECT_ERROR(scaler.step(*optimizer), added_late);
}

TEST_P(StepOrder, ABackwardAfterUnscaleOfASumOfLossesThatWereScaledBeforeIsAnError) {
  scaler.scale(loss_of(w)).backward();
  const at::Tensor sum = scaler.scale(loss_of(w)) + scaler.scale(loss_of(w));
  scaler.unscale_(*optimizer);
  sum.backward();
  EXPECT_ERROR(scaler.step(*optimizer), added_late);
}

TEST_P(StepOrder, ABackwardAfterUnscaleWithinWhichAnotherRunsIsAnError) {
  const at::Tensor u = leaf({3}), v = leaf({3});
  scaler.scale(loss_of(w)).backward();
  scaler.unscale_(*optimizer);
  const at::Tensor unscaled = w.grad().clone(), inner = scaler.scale(loss_of(v));
  Interrupted::in_backward = [&] {
    EXPECT_FALSE(at::equal(w.grad(), unscaled));  // it has been added to
    inner.backward();
  };
  const at::Tensor first = Interrupted::apply(u * 1.).sum();
  scaler.scale(first + loss_of(w)).backward();
  EXPECT_TRUE(v.grad().defined());
  EXPECT_ERROR(scaler.step(*optimizer), added_late);
}

TEST_P(StepOrder, GradientsThatAreUnscaledWithinABackwardMayBeChangedThere) {
  at::Tensor u = leaf({3}), v = leaf({3});
  const auto other = plain_or_fused_sgd({v}, GetParam());
  scaler.scale(loss_of(w)).backward();
  scaler.unscale_(*optimizer);
  Interrupted::in_backward = [&] {
    scaler.unscale_(*other);
    const at::NoGradGuard no_grad;
    v.mutable_grad().mul_(0.5);
  };
  const at::Tensor first = Interrupted::apply(u * 1.).sum();
  scaler.scale(first + loss_of(v)).backward();
  EXPECT_TRUE(scaler.step(*other));
  EXPECT_TRUE(scaler.step(*optimizer));
}

TEST_P(StepOrder, DiscardForgetsScaledGradientsEvenIfTheyStay) {
  scaler.scale(loss_of(w)).backward();
  scaler.unscale_(*optimizer);
  scaler.scale(loss_of(w)).backward();
  optimizer->zero_grad(/*set_to_none=*/false);
  scaler.discard(*optimizer);
  for (int i = 0; i < 2; ++i) scaler.scale(loss_of(w)).backward();
  scaler.unscale_(*optimizer);
  EXPECT_TRUE(scaler.step(*optimizer));
}

TEST_P(StepOrder, ABackwardAfterUnscaleThatMakesAnotherGradientIsAnError) {
  scaler.scale(loss_of(w)).backward();
  scaler.unscale_(*optimizer);
  optimizer->zero_grad();
  scaler.scale(loss_of(w)).backward();
  EXPECT_ERROR(scaler.step(*optimizer), added_late);
}

TEST_P(StepOrder, ABackwardOfOneOptimizersLossThatReachesAnothersUnscaledGradientsIsAnError) {
  at::Tensor v = leaf({3});
  const auto other = plain_or_fused_sgd({v}, GetParam());
  scaler.scale(loss_of(w)).backward();
  scaler.unscale_(*optimizer);
  scaler.scale(loss_of(v * w)).backward();
  scaler.step(*other);
  EXPECT_ERROR(scaler.step(*optimizer), added_late);
}

TEST_P(StepOrder, AGroupThatIsAddedAfterUnscaleIsAnErrorIfItHasGradients) {
  const at::Tensor v = leaf({3}), u = leaf({3});
  scaler.scale(loss_of(w) + loss_of(v)).backward();
  scaler.unscale_(*optimizer);
  optimizer->add_param_group(std::vector<at::Tensor>{u});
  optimizer->add_param_group(std::vector<at::Tensor>{v});
  const at::Tensor before = v.detach().clone();
  EXPECT_ERROR(scaler.step(*optimizer), "a parameter with a gradient was added to this optimizer");
  EXPECT_TRUE(at::equal(v, before));
  v.mutable_grad().reset();
  EXPECT_TRUE(scaler.step(*optimizer).stepped());
}

TEST_P(StepOrder, ABackwardAfterAClipThatNamesTheScalerIsAnError) {
  scaler.scale(loss_of(w)).backward();
  torchamp::clip_grad_norm_(scaler, *optimizer, 1.);
  scaler.scale(loss_of(w)).backward();
  EXPECT_THROW(scaler.step(*optimizer), c10::Error);
}

}  // namespace
