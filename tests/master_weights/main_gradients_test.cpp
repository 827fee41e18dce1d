// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/serialize.h>

#include <cstdint>
#include <sstream>
#include <string>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/masters_training.h"
#include "support/memory_meter.h"
#include "support/temporary_folder.h"
#include "support/warnings.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"

namespace {

using at::Tensor;
using torchamp::MasterStorage;
using torchamp::MasterWeights;
using torchamp::MasterWeightsOptions;

constexpr auto storages = {MasterStorage::full, MasterStorage::split};

MasterWeightsOptions options(MasterStorage storage, bool main_gradients = true) {
  return {.dtype = at::kBFloat16, .storage = storage, .main_gradients = main_gradients};
}

struct WeightImpl : torch::nn::Module {
  explicit WeightImpl(at::Device device = at::kCPU)
      : weight(register_parameter("weight", at::ones({3, 2}, device))),
        frozen(register_parameter("frozen", at::ones({2}, device), /*requires_grad=*/false)) {}
  void pass(float gradient) const {
    (weight * at::full({3, 2}, gradient, weight.options().requires_grad(false))).sum().backward();
  }
  Tensor weight, frozen;
};
TORCH_MODULE(Weight);

class MainGradientsOnDevices : public testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Optim, MainGradientsOnDevices, all_devices(), device_name);

// In bf16 the sum would be 256.
TEST_P(MainGradientsOnDevices, AddUpInFp32AsBackwardMakesThem) {
  for (const MasterStorage storage : storages) {
    const Weight model{at::Device(GetParam())};
    MasterWeights masters(model, options(storage));
    for (const float gradient : {256.F, 1.F}) {
      model->pass(gradient);
      masters.take_gradients();  // finds nothing
    }
    const Tensor gradient = masters.parameters()[0].grad();
    EXPECT_EQ(gradient.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(gradient.cpu(), at::full({3, 2}, 257.F))) << gradient;
    EXPECT_EQ(model->weight.grad().defined(), storage == MasterStorage::split);
  }
}

TEST(MainGradients, LowerThePeakByTheModelsSixteenBitGradients) {
  constexpr std::int64_t layers = 8, size = 128 * 128;
  for (const MasterStorage storage : storages) {
    const auto peak = [&](bool main_gradients) {
      torch::nn::Sequential net;
      for (int i = 0; i < layers; ++i) {
        net->push_back(torch::nn::Linear(torch::nn::LinearOptions(128, 128).bias(false)));
      }
      MasterWeights masters(net, options(storage, main_gradients));
      const Tensor x = at::ones({1, 128}, at::kBFloat16);
      std::int64_t bytes = 0;
      for (int batch = 0; batch < 2; ++batch) {
        const MemoryMeter memory;
        net->forward(x).sum().backward();
        masters.take_gradients();
        if (batch == 0) bytes = memory.peak_bytes();
      }
      return bytes;
    };
    const std::int64_t saved = peak(false) - peak(true);
    EXPECT_GE(saved, (layers - 2) * size * 2) << "all but one, and what its product needs";
    EXPECT_LE(saved, layers * size * 2);
  }
}

TEST(MainGradients, TrainAsTakenOnesDoWithScalerClippingAccumulationAndRecomputation) {
  const auto train = [](MasterWeightsOptions how) {
    at::manual_seed(4);
    torch::nn::Sequential net = masters_training::make_net();
    MasterWeights masters(net, how);
    masters_training::train(net, masters, {.takes_gradients = !how.main_gradients});
    return net->parameters();
  };
  for (const MasterStorage storage : storages) {
    const auto with = train(options(storage)), without = train(options(storage, false));
    for (std::size_t i = 0; i < with.size(); ++i) EXPECT_TRUE(at::equal(with[i], without[i])) << i;
  }
}

TEST(MainGradients, TakeSparseOnes) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  MasterWeights masters(table, options(MasterStorage::full));
  for (const float gradient : {256.F, 1.F}) {
    (table->forward(at::tensor({1, 3})) * gradient).sum().backward();
  }
  const Tensor gradient = masters.parameters()[0].grad();
  EXPECT_TRUE(gradient.is_sparse());
  EXPECT_TRUE(
      at::equal(gradient.to_dense().select(1, 0), at::tensor({0.F, 257.F, 0.F, 257.F, 0.F})));
}

TEST(MainGradients, SayThatTheModelWasNotGivenTheNewValues) {
  const Weight model;
  MasterWeights masters(model, options(MasterStorage::full));
  torch::optim::Adam optimizer(masters.parameters());
  model->pass(1.F);
  optimizer.step();
  EXPECT_ERROR(model->pass(1.F), "Call MasterWeights::copy_to_model() after each step");
  model->weight.mutable_grad().reset();
  masters.copy_to_model();
  model->pass(1.F);
}

TEST(MainGradients, SayOnceThatTheModelsZeroGradDoesNotClearThem) {
  for (int form = 0; form < 4; ++form) {
    SCOPED_TRACE(form);
    Weight model;
    MasterWeights masters(model, options(MasterStorage::full));
    torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1));
    const CollectedWarnings warnings;
    for (int i = 0; i < 3; ++i) {
      for (int part = 0; part < 2; ++part) model->pass(1.F);
      optimizer.step();
      masters.copy_to_model();
      if (form == 0) model->zero_grad();
      if (form == 1) masters.zero_grad();
      if (form == 2) optimizer.zero_grad(/*set_to_none=*/true);
      if (form == 3) optimizer.zero_grad(/*set_to_none=*/false);
    }
    const std::string text = warnings.text(), told = "does not clear main gradients";
    EXPECT_EQ(text.find(told) != std::string::npos, form == 0);
    EXPECT_EQ(text.find(told), text.rfind(told)) << "once";
  }
}

TEST(MainGradients, SayItStillAfterALoadThatFailed) {
  const TemporaryFolder folder;
  const Weight model;
  MasterWeights masters(model, options(MasterStorage::full));
  std::string text = "no number";
  std::int64_t number = 1;
  torchamp::TrainingCheckpoint saved(folder / "run.pt"), checkpoint(folder / "run.pt");
  saved.add("masters", masters).add("number", text).save();
  checkpoint.add("masters", masters).add("number", number);
  torch::optim::Adam optimizer(masters.parameters());
  model->pass(1.F);
  optimizer.step();
  EXPECT_ERROR((void)checkpoint.load(), "'number' in ");
  EXPECT_ERROR(model->pass(1.F), "Call MasterWeights::copy_to_model() after each step");
  model->weight.mutable_grad().reset();
  masters.copy_to_model();
  model->pass(1.F);
}

TEST(MainGradients, SayThatAnOptimizerSeesHalfAWeight) {
  const Weight model;
  MasterWeights masters(model, options(MasterStorage::split));
  torch::optim::Adam optimizer(masters.parameters());
  model->pass(1.F);
  optimizer.step();
  optimizer.zero_grad();
  EXPECT_ERROR(model->pass(1.F), "backward: the weight 'weight' was written to");
}

TEST(MainGradients, SayThatAParameterWasUnfrozenTooLate) {
  for (const MasterStorage storage : storages) {
    const Weight model;
    const MasterWeights masters(model, options(storage));
    model->frozen.set_requires_grad(true);
    EXPECT_ERROR(model->frozen.sum().backward(),
                 "the weight 'frozen' has a gradient but no master");
  }
}

TEST(MainGradients, RefuseAWeightThatHasAHookAlready) {
  struct Hook final : torch::autograd::PostAccumulateGradHook {
    void operator()(const Tensor&) override {}
  };
  const Weight model;
  torch::autograd::impl::set_post_acc_grad_hooks(model->weight, std::make_unique<Hook>());
  EXPECT_ERROR(MasterWeights(model, options(MasterStorage::full)), "'weight' has a hook");
  EXPECT_EQ(model->weight.scalar_type(), at::kFloat);
}

TEST(MainGradients, AreLeftToTheMastersThatWereMadeLast) {
  const Weight model;
  { const MasterWeights gone(model, options(MasterStorage::full)); }
  MasterWeights masters(model, options(MasterStorage::full, false));
  model->pass(1.F);
  EXPECT_EQ(model->weight.grad().scalar_type(), at::kBFloat16);
  masters.take_gradients();
  EXPECT_TRUE(masters.parameters()[0].grad().defined());
}

}  // namespace
