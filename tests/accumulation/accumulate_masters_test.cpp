// SPDX-License-Identifier: BSD-3-Clause
// Accumulation of the gradients of master weights.
#include <torchamp/accumulate.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/leaf.h"
#include "support/non_finite.h"
#include "support/optimizers.h"

using torchamp::Accumulation;
using torchamp::GradScaler;

namespace {

/// One weight of 1 in bf16, with its master.
struct Narrow {
  explicit Narrow(const torchamp::MasterWeightsOptions& options = {.dtype = at::kBFloat16}) {
    torch::nn::init::ones_(net->weight);
    masters.emplace(net, options);
  }
  at::Tensor loss(float x) {
    return net->forward(torch::full({1, 1}, x, at::kBFloat16)).to(at::kFloat).sum();
  }
  float master() const { return masters->parameters()[0].item<float>(); }

  torch::nn::Linear net{torch::nn::LinearOptions(1, 1).bias(false)};
  std::optional<torchamp::MasterWeights> masters;
};

TEST(AccumulationOfMasterWeights, StepsWithWhatIsTakenBeforeUnscaling) {
  for (const bool fused : {false, true}) {
    Narrow narrow;
    const auto optimizer = plain_or_fused_sgd({narrow.masters->parameters()[0]}, fused);
    GradScaler scaler({.init_scale = 1024.});
    Accumulation accumulation(scaler, *optimizer, 2);
    accumulation.before_unscale([&] { narrow.masters->take_gradients(); });
    accumulation.before_step([&] { torchamp::clip_grad_norm_(narrow.masters->parameters(), 0.5); });
    for (int i = 0; i < 4; ++i) {
      if (auto result = accumulation.backward(narrow.loss(8))) {
        EXPECT_TRUE(result->stepped());
        narrow.masters->copy_to_model();
      }
    }
    EXPECT_NEAR(narrow.master(), 0.F, 1e-5);
    EXPECT_NEAR(narrow.net->weight.item<float>(), 0.F, 1e-5);
  }
}

/// 256 + 1 is 256 in bf16.
TEST(AccumulationOfMasterWeights, AddsMicroBatchesInFp32) {
  constexpr int parts = 64;
  for (const torchamp::MasterStorage storage :
       {torchamp::MasterStorage::full, torchamp::MasterStorage::split}) {
    for (const bool is_flushed : {false, true}) {
      Narrow narrow({.dtype = at::kBFloat16, .storage = storage});
      torchamp::FusedSGD optimizer(narrow.masters->parameters(), torch::optim::SGDOptions(1.));
      GradScaler scaler({.init_scale = parts});
      Accumulation accumulation(scaler, optimizer, is_flushed ? parts + 1 : parts);
      float sum = 0;
      accumulation.before_unscale([&] {
        narrow.masters->take_gradients();
        sum = narrow.masters->parameters()[0].grad().item<float>();
      });
      for (int i = 0; i < parts; ++i) accumulation.backward(narrow.loss(i == 0 ? 256 : 1));
      if (is_flushed) accumulation.flush();
      const float exact = is_flushed ? 319.F * parts / (parts + 1) : 319.F;
      EXPECT_NEAR(sum, exact, is_flushed ? 1.F : 0.F);
    }
  }
}

TEST(AccumulationOfMasterWeights, AreNotTakenIfTheyWouldStayScaled) {
  for (const bool others : {false, true}) {  // with a further fp32 parameter
    Narrow narrow;
    const at::Tensor beside = zero();
    std::vector<at::Tensor> parameters = narrow.masters->parameters();
    if (others) parameters.push_back(beside);
    auto optimizer = sgd(parameters);
    GradScaler scaler({.init_scale = 1024.});
    Accumulation accumulation(scaler, optimizer, 1);
    accumulation.before_step([&] { narrow.masters->take_gradients(); });
    for (int i = 0; i < 2; ++i) {
      EXPECT_ERROR(accumulation.backward(narrow.loss(1) + beside.sum()),
                   "gradients came after unscale_");
      EXPECT_ERROR(accumulation.flush(), "with an Accumulation in before_unscale");
      accumulation.discard();
    }
    EXPECT_EQ(narrow.master(), 1.F);
    accumulation.before_step(nullptr);
    accumulation.before_unscale([&] { narrow.masters->take_gradients(); });
    EXPECT_TRUE(accumulation.backward(narrow.loss(1))->stepped());
    EXPECT_EQ(narrow.master(), 0.F);
  }
}

TEST(AccumulationOfMasterWeights, AreNotTakenIntoTheMeanOfMicroBatches) {
  Narrow narrow;
  const at::Tensor beside = zero();
  auto optimizer = sgd({narrow.masters->parameters()[0], beside});
  GradScaler scaler({.init_scale = 1024.});
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.backward(narrow.loss(1) + beside.sum());
  EXPECT_ERROR(accumulation.step([&] { narrow.masters->take_gradients(); }),
               "gradients came after unscale_");
  EXPECT_EQ(narrow.master(), 1.F);
}

/// The program's own gradients may come after unscaling, and gradients of other masters may be
/// taken.
TEST(AccumulationOfMasterWeights, RaiseNoFalseAlarm) {
  Narrow narrow;
  const at::Tensor w = zero(), unused = zero();
  auto optimizer = sgd({w, unused});
  GradScaler scaler({.init_scale = 1024.});
  Accumulation accumulation(scaler, optimizer, 1);
  accumulation.before_step([&] { unused.mutable_grad() = torch::ones({1}); });
  EXPECT_TRUE(accumulation.backward(w.sum())->stepped());
  EXPECT_EQ(unused.item<float>(), -1.F);
  accumulation.before_step([&] {
    narrow.loss(1).backward();
    narrow.masters->take_gradients();
  });
  EXPECT_TRUE(accumulation.backward(w.sum())->stepped());
  EXPECT_EQ(w.item<float>(), -2.F);
}

TEST(AccumulationOfMasterWeights, AreTakenAnywhereWithoutAScale) {
  Narrow narrow;
  auto optimizer = sgd(narrow.masters->parameters());
  GradScaler scaler({.enabled = false});
  Accumulation accumulation(scaler, optimizer, 1);
  accumulation.before_step([&] { narrow.masters->take_gradients(); });
  accumulation.backward(narrow.loss(1));
  EXPECT_EQ(narrow.master(), 0.F);
}

TEST(AccumulationOfMasterWeights, DropsTheModelsGradientsWithTheWindow) {
  Narrow narrow;
  auto optimizer = sgd(narrow.masters->parameters());
  GradScaler scaler({.init_scale = 1024.});
  Accumulation accumulation(scaler, optimizer, 2);
  accumulation.before_unscale([&] { narrow.masters->take_gradients(); });
  accumulation.backward(narrow.loss(8));
  accumulation.discard();
  EXPECT_FALSE(narrow.net->weight.grad().defined());
  for (int i = 0; i < 2; ++i) accumulation.backward(narrow.loss(1));
  EXPECT_EQ(narrow.master(), 0.F);
}

TEST(AccumulationOfMasterWeights, AddsNothingThatAnExceptionHasLeft) {
  for (const bool discards : {false, true}) {
    Narrow narrow;
    auto optimizer = sgd(narrow.masters->parameters());
    GradScaler scaler({.init_scale = 1024.});
    DroppingAccumulation accumulation(scaler, optimizer);
    accumulation.before_unscale([] { throw std::runtime_error("out of luck"); });
    EXPECT_THROW(accumulation.backward(narrow.loss(8)), std::runtime_error);
    EXPECT_TRUE(narrow.net->weight.grad().defined());
    if (discards) {
      accumulation.discard();
      EXPECT_FALSE(narrow.net->weight.grad().defined());
    }
    accumulation.before_unscale([&] { narrow.masters->take_gradients(); });
    accumulation.backward(narrow.loss(1));
    EXPECT_EQ(accumulation.step().kept(), 1);
    EXPECT_EQ(narrow.master(), 0.F);
  }
}

/// Dropped after the step, they would not be missed by copy_to_model().
TEST(AccumulationOfMasterWeights, LeavesGradientsThatWereForgotten) {
  for (const bool safe : {false, true}) {
    Narrow narrow;
    const at::Tensor beside = zero();
    auto optimizer = sgd({narrow.masters->parameters()[0], beside});
    GradScaler scaler({.init_scale = 1024.});
    if (safe) {
      DroppingAccumulation accumulation(scaler, optimizer);
      accumulation.backward(narrow.loss(1) + beside.sum());
      EXPECT_TRUE(accumulation.step().stepped());
    } else {
      Accumulation accumulation(scaler, optimizer, 1);
      EXPECT_TRUE(accumulation.backward(narrow.loss(1) + beside.sum())->stepped());
    }
    EXPECT_ERROR(narrow.masters->copy_to_model(), "Call take_gradients() after backward()");
  }
}

TEST(AccumulationOfMasterWeights, DropsBadMicroBatches) {
  Narrow narrow;
  auto optimizer = sgd(narrow.masters->parameters());
  GradScaler scaler({.init_scale = 1024.});
  DroppingAccumulation accumulation(scaler, optimizer);
  accumulation.before_unscale([&] { narrow.masters->take_gradients(); });
  for (const float x : {1.F, kInf, 3.F}) accumulation.backward(narrow.loss(x));
  EXPECT_EQ(accumulation.step().kept(), 2);
  EXPECT_EQ(narrow.master(), -1.F);
}

}  // namespace
