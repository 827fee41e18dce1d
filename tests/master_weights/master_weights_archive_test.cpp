// SPDX-License-Identifier: BSD-3-Clause
// Archives of master weights, and models that stay as they are where memory runs out.
#include "torchamp/master_weights.h"

#include <ATen/ATen.h>
#include <c10/util/complex.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <sstream>
#include <vector>

#include "simulated_device/device.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/master_nets.h"
#include "support/out_of_memory.h"

namespace {

using at::Tensor;
using master_nets::clones;
using master_nets::expect_equal;
using master_nets::Net;
using torchamp::MasterWeights;

TEST(MasterWeights, AreSavedInFp32AndReadBackWhole) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  const auto values = clones(masters.parameters());
  const auto model_values = clones(net->parameters());
  std::stringstream file;
  torch::save(masters, file);
  expect_equal(net->parameters(), model_values);

  Net full;  // a plain fp32 model reads the masters
  torch::load(full, file);
  std::vector<Tensor> trainable;
  for (const Tensor& parameter : full->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), at::kFloat);
    if (parameter.requires_grad()) trainable.push_back(parameter);
  }
  expect_equal(trainable, values);

  Net other;
  MasterWeights others(other, {.dtype = at::kBFloat16});
  const auto tensors = others.parameters();
  net->batch->running_mean.fill_(3);
  std::stringstream again;
  torch::save(masters, again);
  torch::load(others, again);
  expect_equal(others.parameters(), values);
  expect_equal(other->parameters(), model_values);
  EXPECT_TRUE(at::equal(other->batch->running_mean, at::full({4}, 3.f)));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(others.parameters()[i].is_same(tensors[i]));
  }
  others.take_gradients();  // counts as copied
}

TEST(MasterWeights, AreSavedInAChosenDtypeAndReadFromAPlainModel) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  torch::serialize::OutputArchive out;
  masters.save(out, at::kHalf);
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in, body;
  in.load_from(file);
  in.read("body", body);
  Tensor weight;
  body.read("weight", weight);
  const Tensor rounded = masters.named_parameters()[0].second.detach().to(at::kHalf);
  EXPECT_EQ(weight.scalar_type(), at::kHalf);
  EXPECT_TRUE(at::equal(weight, rounded));
  torch::serialize::InputArchive half;
  file.seekg(0);
  half.load_from(file);
  masters.load(half);
  EXPECT_TRUE(at::equal(masters.named_parameters()[0].second, rounded.to(at::kFloat)));

  Net plain;
  std::stringstream plain_file;
  torch::save(plain, plain_file);
  torch::load(masters, plain_file);
  EXPECT_TRUE(at::equal(masters.named_parameters()[0].second, plain->body->weight));
  EXPECT_TRUE(at::equal(net->body->weight, plain->body->weight.to(at::kBFloat16)));
}

TEST(MasterWeights, RefuseAFileThatHoldsMoreWeightsThanTheModel) {
  using torch::nn::LinearOptions;
  torch::nn::Linear with_bias(2, 2), without(LinearOptions(2, 2).bias(false));
  MasterWeights masters(without, {.dtype = at::kBFloat16});
  const auto values = clones(masters.parameters());
  std::stringstream file;
  torch::save(with_bias, file);
  EXPECT_ERROR(torch::load(masters, file),
               "MasterWeights::load: the archive has entries that the program's model lacks: bias");
  EXPECT_TRUE(at::equal(masters.parameters()[0], values[0]));
}

/// One tensor of any dtype.
struct OneTensor : torch::nn::Module {
  explicit OneTensor(const Tensor& value)
      : tensor(register_parameter("tensor", value, value.is_floating_point())) {}
  Tensor tensor;
};

TEST(MasterWeights, RefuseAFileOfNumbersThatTheModelCannotHold) {
  const auto real = std::make_shared<OneTensor>(at::ones({2}));
  const auto whole = std::make_shared<OneTensor>(at::ones({2}, at::kLong));
  const auto complex =
      std::make_shared<OneTensor>(at::full({2}, c10::complex<float>(2.F, 3.F), at::kComplexFloat));
  const auto half = std::make_shared<OneTensor>(at::full({2}, 1.5));
  std::stringstream of_complex, of_half;
  torch::save(complex, of_complex);
  torch::save(half, of_half);
  MasterWeights masters(real, {.dtype = at::kBFloat16}), of_whole(whole, {.dtype = at::kBFloat16});
  EXPECT_ERROR(torch::load(masters, of_complex), "'tensor' is ComplexFloat in the archive");
  EXPECT_ERROR(torch::load(of_whole, of_half),
               "MasterWeights::load: 'tensor' is Float in the archive and Long in the model, "
               "which cannot hold such numbers.");
  EXPECT_TRUE(at::equal(masters.parameters()[0], at::ones({2})));
  EXPECT_TRUE(at::equal(whole->tensor, at::ones({2}, at::kLong)));
}

TEST(MasterWeights, StayUnchangedWhenLoadingFails) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  const auto values = clones(masters.parameters());
  const auto model_values = clones(net->parameters());

  torch::nn::Linear small(2, 2);
  std::stringstream missing;
  torch::save(small, missing);
  EXPECT_ERROR(torch::load(masters, missing), "MasterWeights::load: the archive has no 'frozen'");

  Net wide;
  wide->head->weight.set_data(at::randn({3, 4}));
  std::stringstream shapes;
  torch::save(wide, shapes);
  EXPECT_ERROR(
      torch::load(masters, shapes),
      "MasterWeights::load: 'head.weight' is [3, 4] in the archive and [2, 4] in the model");
  expect_equal(masters.parameters(), values);
  expect_equal(net->parameters(), model_values);
}

TEST(MasterWeights, RefuseToFillATensorOfWhichManyElementsAreOne) {
  struct Masked : torch::nn::Module {
    Tensor weight = register_parameter("weight", at::randn({3, 2}));
    Tensor mask = register_buffer("mask", at::ones({1}).expand({4}));
  };
  const auto model = std::make_shared<Masked>();
  MasterWeights masters(model, {.dtype = at::kBFloat16});
  std::stringstream file;
  torch::save(masters, file);
  const auto values = clones(masters.parameters());
  {
    const at::NoGradGuard no_grad;
    masters.parameters()[0].fill_(3.);
  }
  masters.copy_to_model();
  EXPECT_ERROR(
      torch::load(masters, file),
      "MasterWeights::load: several elements of 'mask' (sizes [4], strides [0]) share memory");
  EXPECT_TRUE(at::equal(masters.parameters()[0], at::full({3, 2}, 3.F)));
  EXPECT_TRUE(at::equal(model->weight, at::full({3, 2}, 3., at::kBFloat16)));

  model->mask.set_data(model->mask.contiguous());
  file.seekg(0);
  torch::load(masters, file);
  expect_equal(masters.parameters(), values);
}

/// How masters are kept, and whether backward takes gradients.
std::vector<torchamp::MasterWeightsOptions> all_options() {
  using torchamp::MasterStorage;
  return {{.dtype = at::kBFloat16},
          {.dtype = at::kBFloat16, .main_gradients = true},
          {.dtype = at::kBFloat16, .storage = MasterStorage::split},
          {.dtype = at::kBFloat16, .storage = MasterStorage::split, .main_gradients = true}};
}

/// What a plain model reads from the masters' file.
std::vector<Tensor> saved_values_of(const MasterWeights& masters) {
  std::stringstream file;
  torch::save(masters, file);
  torch::nn::Linear plain(3, 2);
  torch::load(plain, file, at::Device(at::kCPU));
  return clones(plain->parameters());
}

TEST(MasterWeightsSimulated, LeaveTheModelUnchangedIfMemoryRunsOut) {
  SKIP_WITHOUT(at::kPrivateUse1);
  for (const auto& options : all_options()) {
    const auto model = to_device(torch::nn::Linear(3, 2), simulated::sim0);
    model->weight.mutable_grad() = at::ones_like(model->weight);
    const Tensor gradient = model->weight.grad(), memory = model->weight.detach();
    std::vector<Tensor> values;
    for (const Tensor& parameter : model->parameters()) values.push_back(parameter.detach().cpu());
    std::optional<MasterWeights> masters;
    const int failures =
        until_memory_suffices([&] { masters.emplace(model, options); },
                              [&] {
                                EXPECT_TRUE(model->weight.is_alias_of(memory));
                                EXPECT_TRUE(model->weight.grad().is_same(gradient));
                                for (std::size_t p = 0; p < values.size(); ++p) {
                                  EXPECT_EQ(model->parameters()[p].scalar_type(), at::kFloat);
                                  EXPECT_TRUE(at::equal(model->parameters()[p].cpu(), values[p]));
                                }
                              });
    EXPECT_GE(failures, 2);
    expect_equal(saved_values_of(*masters), values);
  }
}

TEST(MasterWeightsSimulated, LoadAllOrNothingIfMemoryRunsOut) {
  SKIP_WITHOUT(at::kPrivateUse1);
  for (const auto& options : all_options()) {
    const auto model = to_device(torch::nn::Linear(3, 2), simulated::sim0);
    MasterWeights masters(model, options);
    const auto before = saved_values_of(masters);
    const torch::nn::Linear other(3, 2);
    std::stringstream file;
    torch::save(other, file);
    const int failures = until_memory_suffices(
        [&] {
          file.seekg(0);
          torch::load(masters, file);
        },
        [&] { expect_equal(saved_values_of(masters), before); });
    EXPECT_GE(failures, 2);
    expect_equal(saved_values_of(masters), clones(other->parameters()));
  }
}

}  // namespace
