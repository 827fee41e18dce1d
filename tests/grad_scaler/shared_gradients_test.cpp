// SPDX-License-Identifier: BSD-3-Clause
// Gradients that two optimizers share are divided once.
#include <torchamp/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/optim.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/optimizers.h"
#include "support/tolerances.h"
#include "support/warnings.h"

namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using torchamp::GradScaler;

constexpr const char* divided_twice = "would be divided by the scale twice";
constexpr const char* two_parts = "a part that a later backward() of a scaled loss has added";

/// Two heads on one encoder. Each head has its own optimizer, which also has the encoder:
/// LibTorch's SGD or torchamp's.
class SharedGradients : public testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<torch::optim::Optimizer> optimizer_of(const at::Tensor& head) const {
    return plain_or_fused_sgd({head, encoder}, GetParam(), 1e-3);
  }
  at::Tensor loss(const at::Tensor& head) const { return (encoder * head).pow(2).sum(); }
  void clear() {
    for (const at::Tensor& one : {encoder, a, b}) one.mutable_grad().reset();
  }
  /// Where `call` throws that the gradient of the encoder, the second one, is shared, and leaves
  /// the gradients as they are.
  void expect_shared(const std::function<void()>& call, const char* text) {
    const at::Tensor before = encoder.grad().clone(), weight = b.detach().clone();
    EXPECT_ERROR(call(), text);
    EXPECT_ERROR(call(), "the gradient of parameter 1 [3] of this optimizer, ");
    EXPECT_TRUE(at::equal(encoder.grad(), before));
    EXPECT_TRUE(at::equal(b, weight));
  }

  const at::Tensor encoder = leaf({3}), a = leaf({3}), b = leaf({3});
  const std::unique_ptr<torch::optim::Optimizer> of_a = optimizer_of(a), of_b = optimizer_of(b);
  GradScaler scaler{{.init_scale = 64.}};
  const CollectedWarnings warnings{};
};
INSTANTIATE_TEST_SUITE_P(Sgd, SharedGradients, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Fused" : "LibTorchs");
});

}  // namespace

TEST_P(SharedGradients, OfOneBackwardAreAnErrorOfTheSecondStep) {
  for (const bool unscales : {false, true}) {
    clear();
    scaler.scale(loss(a) + loss(b)).backward();
    if (unscales) scaler.unscale_(*of_a);
    scaler.step(*of_a);
    expect_shared([&] { scaler.step(*of_b); }, divided_twice);
    expect_shared([&] { scaler.unscale_(*of_b); }, divided_twice);
    scaler.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(SharedGradients, AreAnErrorThatNamesBothOptimizers) {
  torch::optim::Adam adam(std::vector<at::Tensor>{encoder}, torch::optim::AdamOptions(1e-3));
  scaler.scale(loss(a)).backward();
  scaler.unscale_(adam);
  try {
    scaler.step(*of_a);
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const std::string name = GetParam() ? "FusedSGD" : "torch::optim::SGD";
    EXPECT_THAT(text, HasSubstr("of this optimizer, " + name + ", was unscaled"));
    EXPECT_THAT(text, HasSubstr("for another optimizer, torch::optim::Adam, and would"));
  }
}

TEST_P(SharedGradients, OfAnOptimizerAndItsWrapperAreAnError) {
  struct Wrapper : torch::optim::SGD {
    using SGD::SGD;
  };
  for (int form = 0; form < 6; ++form) {
    SCOPED_TRACE(form);
    Wrapper wrapper({b, encoder}, torch::optim::SGDOptions(1e-3));
    clear();
    scaler.scale(loss(b)).backward();
    std::vector<at::Tensor> parameters{b, encoder};
    if (form != 1) scaler.unscale_(*of_b);
    if (form == 1) torchamp::clip_grad_value_(scaler, *of_b, 1e-3);
    if (form == 2) torchamp::clip_grad_norm_(parameters, 1e-3);
    if (form == 3) torch::nn::utils::clip_grad_norm_(parameters, 1e-3);
    if (form == 4) torchamp::clip_grad_value_(*of_b, 1e-3);
    if (form == 5 && !GetParam()) torchamp::clip_grad_norm_(scaler, *of_b, 1e-3);
    EXPECT_ERROR(scaler.step(wrapper), divided_twice);
    scaler.discard(*of_b);
    scaler.update(64.);
  }
}

TEST_P(SharedGradients, OfTwoLossesThatAddUpAreAnErrorOfTheSecondStep) {
  for (int form = 0; form < 3; ++form) {
    clear();
    scaler.scale(loss(a)).backward();
    if (form == 1) torchamp::clip_grad_norm_(scaler, *of_a, 1e-3);
    scaler.step(*of_a);
    if (form == 2) {
      scaler.scale(loss(b)).backward({}, /*retain_graph=*/false, /*create_graph=*/true);
    } else {
      scaler.scale(loss(b)).backward();
    }
    expect_shared([&] { scaler.step(*of_b); }, two_parts);
    clear();
    scaler.update();
  }
}

TEST_P(SharedGradients, AreNoneOnceTheyAreCleared) {
  for (const bool set_to_none : {false, true}) {
    for (const bool unscales : {false, true}) {
      for (int i = 0; i < 2; ++i) {
        of_a->zero_grad();
        of_b->zero_grad();
        scaler.scale(loss(a)).backward();
        if (unscales) scaler.unscale_(*of_a);
        scaler.step(*of_a);
        of_a->zero_grad(set_to_none);
        scaler.scale(loss(b)).backward();
        if (unscales) torchamp::clip_grad_norm_(scaler, *of_b, 1e6);
        const at::Tensor expected = 2 * encoder.detach() * b.detach().pow(2);
        if (!scaler.is_unscaled(*of_b)) scaler.unscale_(*of_b);
        expect_close(encoder.grad(), expected);
        EXPECT_TRUE(scaler.step(*of_b));
        scaler.update();
      }
    }
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(SharedGradients, AreNoneInTheNextIterationOrAfterDiscard) {
  scaler.scale(loss(a) + loss(b)).backward();
  scaler.step(*of_a);
  scaler.discard(*of_a);
  EXPECT_NO_THROW(scaler.unscale_(*of_b));
  scaler.update();
  clear();
  scaler.scale(loss(b)).backward();
  EXPECT_TRUE(scaler.step(*of_b));
}

TEST_P(SharedGradients, AreNoneIfTheScaleStaysAtOne) {
  GradScaler one(torchamp::GradScalerOptions::skip_non_finite());
  for (int i = 0; i < 2; ++i) {
    clear();
    one.scale(loss(a) + loss(b)).backward();
    EXPECT_TRUE(one.step(*of_a));
    EXPECT_TRUE(one.step(*of_b));
    one.update();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}
