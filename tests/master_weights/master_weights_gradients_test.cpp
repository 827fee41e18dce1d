// SPDX-License-Identifier: BSD-3-Clause
// The gradients of models with master weights: taken, dropped, forgotten.
#include "torchamp/master_weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "simulated_device/device.h"
#include "simulated_device/memory.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/master_nets.h"
#include "support/tolerances.h"
#include "torchamp/closure_step.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"

namespace {

using at::Tensor;
using master_nets::clones;
using master_nets::loss_of;
using master_nets::Net;
using torchamp::MasterWeights;

TEST(MasterWeights, FreeTheModelsGradientsButNotOfFp32Parameters) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  loss_of(net, at::randn({8, 4})).backward();
  const Tensor of_norm = net->own->gain.grad();
  masters.take_gradients();
  EXPECT_FALSE(net->body->weight.grad().defined());
  EXPECT_TRUE(net->own->gain.grad().is_same(of_norm));
  for (const Tensor& parameter : masters.parameters()) {
    EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  }
}

TEST(MasterWeightsSimulated, TakeAllGradientsOrNoneIfMemoryRunsOut) {
  SKIP_WITHOUT(at::kPrivateUse1);
  for (const auto storage : {torchamp::MasterStorage::full, torchamp::MasterStorage::split}) {
    const auto model = to_device(torch::nn::Linear(3, 2), simulated::sim0);
    MasterWeights masters(model, {.dtype = at::kBFloat16, .storage = storage});
    const Tensor input = at::ones({2, 3}, simulated::on(simulated::sim0, at::kBFloat16));
    for (int passes = 1; passes <= 2; ++passes) {
      at::linear(input, model->weight, model->bias).sum().backward();
      int failures = 0;
      for (bool fails = true; fails; failures += fails ? 1 : 0) {
        ASSERT_LT(failures, 20);
        const Tensor of_weight = model->weight.grad(), of_bias = model->bias.grad();
        const simulated::AllocationLimit limit(failures);
        try {
          masters.take_gradients();
          fails = false;
        } catch (const c10::OutOfMemoryError&) {
          EXPECT_TRUE(model->weight.grad().is_same(of_weight));
          EXPECT_TRUE(model->bias.grad().is_same(of_bias));
        }
      }
      EXPECT_TRUE(failures > 0 || passes > 1);
      for (const Tensor& parameter : masters.parameters()) {
        EXPECT_TRUE(parameter.grad().eq(2. * passes).all().item<bool>());
      }
    }
  }
}

TEST(MasterWeights, TakeSparseGradients) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  MasterWeights masters(table, {.dtype = at::kBFloat16});
  for (int batch = 0; batch < 2; ++batch) {
    table->forward(at::tensor({1, 3})).sum().backward();
    masters.take_gradients();
  }
  const Tensor gradient = masters.parameters()[0].grad();
  EXPECT_TRUE(gradient.is_sparse());
  EXPECT_EQ(gradient.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(gradient.to_dense().select(1, 0), at::tensor({0.f, 2.f, 0.f, 2.f, 0.f})));
}

// Added in bf16 they were 256, in fp16 2,048.
TEST(MasterWeights, GetTheSumOfTheGradientsOfAWordThatOccursOften) {
  constexpr int64_t many = 5000;
  using torchamp::MasterStorage;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const MasterStorage storage : {MasterStorage::full, MasterStorage::split}) {
      if (storage == MasterStorage::split && dtype == at::kHalf) continue;
      for (const bool main_gradients : {false, true}) {
        torch::nn::Embedding table(5, 2);
        MasterWeights masters(
            table, {.dtype = dtype, .storage = storage, .main_gradients = main_gradients});
        Tensor loss;
        {
          const torchamp::AutocastGuard guard(at::kCPU, dtype);
          loss = table->forward(at::full({many}, 3, at::kLong)).sum();
        }
        loss.backward();
        masters.take_gradients();
        const Tensor gradient = masters.parameters()[0].grad();
        ASSERT_EQ(gradient.scalar_type(), at::kFloat);
        EXPECT_NEAR(gradient[3][1].item<double>(), many, many / 256.);
        EXPECT_EQ(gradient[2][1].item<double>(), 0.);
      }
    }
  }
}

/// fp32 gradients of before cannot be added to, and masters begin without any.
TEST(MasterWeights, DropOldGradientsOfTheParametersThatTheyTakeOver) {
  Net net;
  net->forward(at::randn({8, 4})).sum().backward();
  net->frozen.mutable_grad() = at::ones({4});
  const Tensor of_norm = net->own->gain.grad();
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  for (const auto& item : net->named_parameters()) {
    const bool fp32 = item.key().starts_with("batch") || item.key().starts_with("own");
    EXPECT_EQ(item.value().grad().defined(), fp32) << item.key();
  }
  EXPECT_TRUE(net->own->gain.grad().is_same(of_norm)) << "not taken over";
  for (const auto& [name, tensor] : masters.named_parameters()) {
    if (tensor.dtype() != net->named_parameters()[name].dtype()) {
      EXPECT_FALSE(tensor.grad().defined()) << name;
    }
  }

  Net fresh;
  std::stringstream file;
  torch::save(masters, file);
  torch::load(fresh, file);
  MasterWeights expected(fresh, {.dtype = at::kBFloat16});
  const Tensor x = at::randn({8, 4});
  for (Net* each : {&net, &fresh}) {
    (*each)->own->gain.mutable_grad().reset();
    (*each)->batch->zero_grad();
    loss_of(*each, x).backward();
  }
  masters.take_gradients();
  expected.take_gradients();
  for (std::size_t i = 0; i < masters.parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(masters.parameters()[i].grad(), expected.parameters()[i].grad())) << i;
  }
}

TEST(MasterWeights, SayThatTheModelWasNotGivenTheNewValues) {
  for (const bool fused : {false, true}) {
    Net net;
    MasterWeights masters(net, {.dtype = at::kBFloat16});
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (fused) {
      optimizer = std::make_unique<torchamp::FusedAdamW>(masters.parameters());
    } else {
      optimizer = std::make_unique<torch::optim::Adam>(masters.parameters());
    }
    const auto pass = [&] { loss_of(net, at::randn({8, 4})).backward(); };
    pass();
    masters.take_gradients();
    optimizer->step();
    pass();
    EXPECT_ERROR(masters.take_gradients(), "Call copy_to_model() after each step");
    masters.copy_to_model();
    masters.take_gradients();
  }
}

TEST(MasterWeights, SayThatTheModelWasNotGivenTheValuesOfASGDThatAScalerHasStepped) {
  for (const bool main_gradients : {false, true}) {
    for (const bool enabled : {false, true}) {
      for (const bool with_closure : {false, true}) {
        Net net;
        MasterWeights masters(net, {.dtype = at::kBFloat16, .main_gradients = main_gradients});
        torch::optim::SGD optimizer(masters.parameters(), 0.1);
        torchamp::GradScaler scaler({.init_scale = 2., .enabled = enabled});
        const auto pass = [&] {
          masters.zero_grad();
          scaler.scale(loss_of(net, at::ones({8, 4}))).backward();
          masters.take_gradients();
        };
        pass();
        if (with_closure) {
          // The masters are the closure's parameters.
          step(scaler, optimizer, [&] {
            Tensor sum = at::zeros({});
            for (const Tensor& master : masters.parameters()) sum = sum + master.sum();
            return sum;
          });
        } else {
          scaler.step(optimizer);
        }
        scaler.update();
        EXPECT_ERROR(pass(), "Call");
        masters.copy_to_model();
        pass();
      }
    }
  }
}

TEST(MasterWeights, SayThatTheModelsGradientsWereForgotten) {
  for (const bool scaled : {false, true}) {
    Net net;
    MasterWeights masters(net, {.dtype = at::kBFloat16});
    torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1));
    torchamp::GradScaler scaler({.enabled = scaled});
    const auto step = [&](bool takes) {
      optimizer.zero_grad();
      scaler.scale(loss_of(net, at::randn({8, 4}))).backward();
      if (takes) masters.take_gradients();
      EXPECT_TRUE(scaler.step(optimizer).stepped());  // the norms' gradients are there
      scaler.update();
    };
    for (int i = 0; i < 2; ++i) {
      step(/*takes=*/true);
      masters.copy_to_model();
    }
    const auto before = clones(masters.parameters());
    step(/*takes=*/false);
    EXPECT_ERROR(masters.copy_to_model(), "Call take_gradients() after backward()");
    const Tensor pending = net->body->weight.grad();
    EXPECT_TRUE(pending.defined());
    EXPECT_ERROR(masters.copy_to_model(), "the weight 'body.weight' has a gradient");
    EXPECT_TRUE(at::equal(masters.parameters()[0], before[0]));
    net->zero_grad();
    masters.copy_to_model();
    step(/*takes=*/true);
    masters.copy_to_model();
    EXPECT_FALSE(at::equal(masters.parameters()[0], before[0]));
  }
}

TEST(MasterWeights, MissNoGradientsIfNoneAreToBeTaken) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.1));
  const auto pass = [&] { loss_of(net, at::randn({8, 4})).backward(); };
  masters.copy_to_model();
  pass();
  masters.take_gradients();  // and a step that is skipped
  masters.copy_to_model();
  pass();
  net->zero_grad();
  masters.copy_to_model();
  net->own->forward(at::randn({8, 4})).sum().backward();  // narrow weights have no part in it
  optimizer.step();
  masters.copy_to_model();
  pass();
  masters.take_gradients();
  optimizer.step();
  pass();  // with weights of before
  masters.copy_to_model();
  masters.parameters()[0].detach().zero_();  // an average that is tried out, say
  masters.copy_to_model();
  EXPECT_EQ(net->body->weight.count_nonzero().item<int64_t>(), 0);
  std::stringstream file;
  torch::save(masters, file);
  torch::load(masters, file);
  masters.copy_to_model();
}

TEST(MasterWeights, DropTheirGradientsAndTheModels) {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  const auto pass = [&](float x) { net->forward(at::full({1, 1}, x, at::kBFloat16)).backward(); };
  std::optional<MasterWeights> masters(std::in_place, net,
                                       torchamp::MasterWeightsOptions{.dtype = at::kBFloat16});
  pass(8);
  masters->take_gradients();
  pass(8);
  masters->zero_grad();
  EXPECT_FALSE(net->weight.grad().defined());
  EXPECT_FALSE(masters->parameters()[0].grad().defined());

  masters.reset();
  MasterWeights direct(net, {.dtype = at::kBFloat16, .main_gradients = true});
  pass(2);
  net->zero_grad();  // leaves the masters'
  pass(2);
  EXPECT_EQ(direct.parameters()[0].grad().item<float>(), 4.F);
  direct.zero_grad();
  pass(2);
  EXPECT_EQ(direct.parameters()[0].grad().item<float>(), 2.F);
}

TEST(MasterWeights, SayThatAParameterWasUnfrozenTooLate) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  net->frozen.set_requires_grad(true);
  loss_of(net, at::randn({8, 4})).backward();
  EXPECT_ERROR(masters.take_gradients(), "the parameter 'frozen' has a gradient but no master");
}

TEST(MasterWeights, AddADenseGradientToASparseOne) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  MasterWeights masters(table, {.dtype = at::kBFloat16});
  for (const bool sparse : {true, false, true}) {
    (sparse ? table->forward(torch::tensor({1, 1})) : table->weight * 1).sum().backward();
    masters.take_gradients();
  }
  const Tensor gradient = masters.parameters()[0].grad();
  const Tensor expected = torch::tensor({{1.F, 1.F}, {5.F, 5.F}, {1.F, 1.F}, {1.F, 1.F}});
  EXPECT_TRUE(at::equal(gradient.to_dense(), expected)) << gradient;
}

}  // namespace
