// SPDX-License-Identifier: BSD-3-Clause
// Mistakes with master weights: each is reported. Correct programs cause no report.
#include "torchamp/master_weights.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>
#include <string>
#include <thread>

#include "support/expect_error.h"
#include "support/master_nets.h"
#include "support/optimizers.h"
#include "support/warnings.h"
#include "torchamp/clip_grad.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"

namespace {

using at::Tensor;
using master_nets::clones;
using master_nets::loss_of;
using master_nets::Net;
using testing::HasSubstr;
using testing::IsEmpty;
using torchamp::MasterWeights;

/// With LibTorch's SGD, and with torchamp's.
class MasterMistakes : public testing::TestWithParam<bool> {
 protected:
  Net net;
  MasterWeights masters{net, {.dtype = at::kBFloat16}};
  std::unique_ptr<torch::optim::Optimizer> optimizer =
      plain_or_fused_sgd(masters.parameters(), GetParam(), 0.1);
  torchamp::GradScaler scaler{{.init_scale = 64.}};
  CollectedWarnings warnings;

  void backward() { scaler.scale(loss_of(net, at::randn({8, 4}))).backward(); }
  void iterate() {
    masters.zero_grad();
    backward();
    masters.take_gradients();
    scaler.step(*optimizer);
    scaler.update();
    masters.copy_to_model();
  }
};
INSTANTIATE_TEST_SUITE_P(Sgd, MasterMistakes, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Fused" : "LibTorchs");
});

TEST_P(MasterMistakes, AFileThatIsLoadedOnlyIntoTheModelIsReportedOnce) {
  constexpr const char* text = "was written to since the last call";
  std::stringstream file;
  torch::save(net, file);
  iterate();
  EXPECT_THAT(warnings.text(), IsEmpty());
  torch::load(net, file);
  iterate();
  EXPECT_THAT(warnings.text(), HasSubstr(text));
  net->head->weight.detach().clamp_(-0.1, 0.1);
  iterate();
  EXPECT_EQ(warnings.text().find(text), warnings.text().rfind(text));
}

TEST_P(MasterMistakes, WeightsThatAreMadeOthersAloneAreTold) {
  iterate();
  net->head->weight.set_data(at::zeros({2, 4}, at::kBFloat16));
  masters.copy_to_model();
  EXPECT_THAT(warnings.text(), HasSubstr("the model's weight 'head.weight' was written to"));
}

TEST_P(MasterMistakes, WeightsThatAreTriedAndRestoredAreNotReported) {
  const auto averages = clones(net->parameters());
  for (int i = 0; i < 3; ++i) {
    iterate();
    const auto own = clones(net->parameters());
    const at::NoGradGuard no_grad;
    for (std::size_t p = 0; p < own.size(); ++p) net->parameters()[p].copy_(averages[p]);
    loss_of(net, at::randn({8, 4}));
    for (std::size_t p = 0; p < own.size(); ++p) net->parameters()[p].copy_(own[p]);
  }
  std::stringstream file;
  torch::save(masters, file);
  torch::load(masters, file);
  const auto put_back = masters.keep();
  iterate();
  put_back();
  iterate();
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(MasterMistakes, AnOptimizerOfTheModelsOwnWeightsIsAnError) {
  constexpr const char* text = "belongs to a model under master weights";
  const auto wrong = plain_or_fused_sgd(net->parameters(), GetParam(), 0.1);
  backward();
  EXPECT_ERROR(scaler.step(*wrong), text);
  EXPECT_ERROR(scaler.unscale_(*wrong), text);
  net->zero_grad();
  iterate();
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST(MasterMistakesOfSplitMasters, AnOptimizerOfTheModelsOwnWeightsIsRight) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16, .storage = torchamp::MasterStorage::split});
  const auto optimizer = plain_or_fused_sgd(masters.parameters(), /*fused=*/true, 0.1);
  torchamp::GradScaler scaler({.init_scale = 64.});
  scaler.scale(loss_of(net, at::randn({8, 4}))).backward();
  scaler.unscale_(*optimizer);
  masters.take_gradients();
  EXPECT_TRUE(scaler.step(*optimizer).stepped());
}

TEST_P(MasterMistakes, AnOptimizerOfAModelWhoseMastersAreGoneIsRight) {
  torch::nn::Linear other(2, 2);
  { const MasterWeights gone(other, {.dtype = at::kBFloat16}); }
  const auto own = plain_or_fused_sgd(other->parameters(), GetParam(), 0.1);
  scaler.scale(other(at::ones({1, 2}, at::kBFloat16)).to(at::kFloat).sum()).backward();
  EXPECT_TRUE(scaler.step(*own).stepped());
}

TEST_P(MasterMistakes, GradientsThatAreTakenAfterUnscaleIntoOnesThatWereThereAreAnError) {
  backward();
  masters.take_gradients();
  scaler.unscale_(*optimizer);
  backward();
  masters.take_gradients();
  EXPECT_ERROR(scaler.step(*optimizer), "gradients came after unscale_");
  masters.zero_grad();
  scaler.discard(*optimizer);
  iterate();
}

TEST_P(MasterMistakes, GradientsThatAreTakenAfterUnscaleAreAnErrorWhicheverThreadTakesThem) {
  const auto on_another_thread = [](const auto& call) { std::thread(call).join(); };
  backward();
  masters.take_gradients();
  on_another_thread([&] { scaler.unscale_(*optimizer); });
  EXPECT_TRUE(scaler.step(*optimizer).stepped()) << "which were taken before";
  scaler.update();
  masters.copy_to_model();

  masters.zero_grad();
  backward();
  masters.take_gradients();
  scaler.unscale_(*optimizer);
  backward();
  on_another_thread([&] { masters.take_gradients(); });
  EXPECT_ERROR(scaler.step(*optimizer), "gradients came after unscale_");
  masters.zero_grad();
  scaler.discard(*optimizer);
  iterate();
}

TEST_P(MasterMistakes, GradientsThatAreTakenByOthersAfterUnscaleAreNone) {
  Net other;
  MasterWeights others(other, {.dtype = at::kBFloat16});
  const auto second = plain_or_fused_sgd(others.parameters(), GetParam(), 0.1);
  for (int i = 0; i < 2; ++i) {
    optimizer->zero_grad();
    second->zero_grad();
    backward();
    masters.take_gradients();
    scaler.unscale_(*optimizer);
    scaler.scale(loss_of(other, at::randn({8, 4}))).backward();
    others.take_gradients();
    EXPECT_TRUE(scaler.step(*optimizer).stepped());
    EXPECT_TRUE(scaler.step(*second).stepped());
    scaler.update();
    masters.copy_to_model();
    others.copy_to_model();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

/// LibTorch's zero_grad() leaves no trace where masters have no gradients.
TEST(MasterMistakesOfFusedOptimizers, GradientsThatOutliveZeroGradAreReportedOnce) {
  constexpr const char* text = "when the optimizer's zero_grad() was called";
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1));
  const CollectedWarnings warnings;
  const auto iterate = [&](bool fails) {
    optimizer.zero_grad();
    loss_of(net, at::randn({8, 4})).backward();
    if (fails) return;  // as an exception does
    masters.take_gradients();
    optimizer.step();
    masters.copy_to_model();
  };
  iterate(false);
  iterate(true);
  EXPECT_THAT(warnings.text(), IsEmpty());
  iterate(false);
  EXPECT_THAT(warnings.text(), HasSubstr(text));
  iterate(true);
  iterate(false);
  EXPECT_EQ(warnings.text().find(text), warnings.text().rfind(text));
}

TEST(MasterMistakesOfFusedOptimizers,
     GradientsThatAreDroppedOrLeftAloneAfterZeroGradAreNotReported) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1));
  const CollectedWarnings warnings;
  const auto backward = [&] { loss_of(net, at::randn({8, 4})).backward(); };
  for (int order = 0; order < 4; ++order) {
    backward();
    backward();  // micro-batches that add up in 16 bits
    optimizer.zero_grad();
    if (order == 1) masters.zero_grad();
    if (order == 2) net->zero_grad();
    if (order == 3) net->zero_grad(/*set_to_none=*/false);
    if (order > 0) backward();
    masters.take_gradients();
    optimizer.step();
    masters.copy_to_model();
  }
  EXPECT_THAT(warnings.text(), IsEmpty());
}

TEST_P(MasterMistakes, AModelThatIsNotGivenTheMastersOfAScalersStepIsAnError) {
  masters.zero_grad();
  backward();
  masters.take_gradients();
  scaler.step(*optimizer);
  scaler.update();
  masters.zero_grad();
  backward();
  EXPECT_ERROR(masters.take_gradients(), "Call copy_to_model() after each step");
}

}  // namespace
