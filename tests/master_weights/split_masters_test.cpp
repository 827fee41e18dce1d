// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>

#include "support/devices.h"
#include "support/dropping_accumulation.h"
#include "support/expect_error.h"
#include "support/host_allocation_limit.h"
#include "support/masters_training.h"
#include "support/memory_meter.h"
#include "support/optimizer_kinds.h"
#include "support/out_of_memory.h"
#include "support/seed.h"
#include "torchamp/accumulate.h"
#include "torchamp/closure_step.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"
#include "torchamp/optim.h"

namespace {

using torchamp::MasterStorage;
using torchamp::MasterWeights;
using torchamp::MasterWeightsOptions;

const MasterWeightsOptions split{.dtype = at::kBFloat16, .storage = MasterStorage::split};

/// A module with the given parameters.
struct WeightsImpl : torch::nn::Module {
  explicit WeightsImpl(const Params& values) {
    for (const Tensor& value : values) {
      weights.push_back(register_parameter(std::to_string(weights.size()), value.detach().clone()));
    }
  }
  Params weights;
};
TORCH_MODULE(Weights);

/// The masters' values, as they are saved, of a Weights.
Params values_of(const MasterWeights& masters) {
  std::stringstream file;
  torch::save(masters, file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  Params values(masters.parameters().size());
  for (std::size_t i = 0; i < values.size(); ++i) archive.read(std::to_string(i), values[i]);
  return values;
}

Tensor bits_of(const Tensor& t) {
  return t.detach().contiguous().view(t.element_size() == 4 ? at::kInt : at::kShort);
}

void expect_same_bits(const Params& a, const Params& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(bits_of(a[i]).cpu(), bits_of(b[i]).cpu())) << i;
  }
}

/// With NaNs as masters store them, up to their sign.
Tensor usual(const Tensor& numbers) {
  return numbers.masked_fill(numbers.isnan(), std::numeric_limits<double>::quiet_NaN());
}

/// To the nearest bf16, ties away from zero.
Tensor rounded(const Tensor& wide) {
  const Tensor bits =
      wide.detach().contiguous().view(at::kInt).to(at::kLong).bitwise_and(0xffffffff);
  return bits.add(0x8000).bitwise_right_shift(16).to(at::kShort).view(at::kBFloat16);
}

Tensor numbers_of(const std::vector<uint32_t>& bits) {
  Tensor t = at::empty({static_cast<int64_t>(bits.size())}, at::kInt);
  std::copy(bits.begin(), bits.end(), reinterpret_cast<uint32_t*>(t.data_ptr<int32_t>()));
  return t.view(at::kFloat);
}

/// Random patterns; each upper half with the lower halves at which rounding turns; the numbers at
/// the ends of their ranges.
Tensor telling_numbers() {
  std::vector<uint32_t> bits{0,          0x80000000, 1,          0x80000001, 0x007fffff,
                             0x00800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                             0x7f800001, 0x7fc00000, 0xffc00000, 0x7fffffff, 0xffffffff};
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0U, 0x7fffU, 0x8000U, 0x8001U}) bits.push_back(high << 16 | low);
  }
  at::manual_seed(1);
  const Tensor random = at::randint(0, int64_t{1} << 32, {1'000'000}, at::kLong).to(at::kInt);
  return at::cat({numbers_of(bits), random.view(at::kFloat)});
}

class SplitMastersOnDevices : public testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(device()); }
  static at::DeviceType device() { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Optim, SplitMastersOnDevices, all_devices(), device_name);

TEST_P(SplitMastersOnDevices, GiveEveryNumberBackBitForBit) {
  const Tensor numbers = telling_numbers();
  const Weights model(Params{numbers.to(device())});
  const MasterWeights masters(model, split);
  EXPECT_EQ(model->weights[0].scalar_type(), at::kBFloat16);
  const Tensor narrow = usual(model->weights[0].detach().cpu());
  EXPECT_TRUE(at::equal(bits_of(narrow), bits_of(rounded(usual(numbers)))));
  expect_same_bits({usual(values_of(masters)[0])}, {usual(numbers)});
}

TEST_P(SplitMastersOnDevices, AreTheModelsWeightsWithGradientsInFp32) {
  const Weights model(Params{at::randn({3, 2}, device())});
  MasterWeights masters(model, split);
  ASSERT_EQ(masters.parameters().size(), 1u);
  const Tensor weight = masters.parameters()[0];
  EXPECT_TRUE(weight.is_same(model->weights[0]));
  for (const float gradient : {256.F, 1.F}) {
    (weight * at::full({3, 2}, gradient, weight.options())).sum().backward();
    masters.take_gradients();
  }
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(weight.grad().cpu(), at::full({3, 2}, 257.F))) << weight.grad();
}

/// Masters, and the same values as fp32 parameters, under optimizers of the same kind.
struct Twins {
  Twins(const Kind& kind, const Params& values, bool two_groups = false)
      : model(values), masters(model, split), full(copies(values)) {
    of_split = kind.fused(Pair::groups(masters.parameters(), kind, two_groups));
    of_full = kind.fused(Pair::groups(full, kind, two_groups));
  }

  /// Gradients that depend on what the model computes with.
  void new_gradients(double scale) const {
    for (std::size_t i = 0; i < full.size(); ++i) {
      const Tensor noise = torch::randn_like(full[i]);
      const auto from = [&](const Tensor& narrow) {
        return (noise + narrow.to(at::kFloat)).mul_(scale).detach();
      };
      full[i].mutable_grad() = from(rounded(full[i].cpu()).to(full[i].device()).view_as(full[i]));
      model->weights[i].mutable_grad() = from(model->weights[i]);
    }
  }

  void expect_equal() const {
    Params wide;
    for (const Tensor& p : full) wide.push_back(p.detach());
    expect_same_bits(values_of(masters), wide);
  }

  Weights model;
  MasterWeights masters;
  Params full;
  std::unique_ptr<Optimizer> of_split, of_full;
};

/// Small ones that go together, one that a CPU's pieces cut, one of another layout, an empty one.
Params weights_to_cut(at::Device device) {
  const at::TensorOptions options(device);
  const int64_t many = device.is_cpu() ? 70'001 : 3'001;
  return {torch::randn({5}, options), torch::randn({many}, options),
          torch::randn({3, 4}, options).t(), torch::randn({0}, options), torch::randn({}, options)};
}

TEST_P(SplitMastersOnDevices, AreSteppedByEachOptimizerAsWholeOnesAre) {
  seed_all(3);
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const Twins twins(kind, weights_to_cut(device()), /*two_groups=*/true);
    for (int step = 0; step < 5; ++step) {
      const bool skipped = step == 0 || step == 2;
      as_fused(*twins.of_split).drop_gradients_after_step(step > 2);
      const bool scaled = step % 2 == 1;
      twins.new_gradients(scaled ? 1024. : 1.);
      for (Optimizer* optimizer : {twins.of_split.get(), twins.of_full.get()}) {
        as_fused(*optimizer)
            .step_scaled(scaled ? number(1024., device()) : Tensor(),
                         number(skipped ? 1. : 0., device()));
      }
    }
    twins.expect_equal();
  }
}

TEST_P(SplitMastersOnDevices, KeepTheirStateInFp32AndReadItBack) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const Twins twins(kind, {torch::randn({40}, device())});
    const auto both = {twins.of_split.get(), twins.of_full.get()};
    twins.new_gradients(1.);
    for (Optimizer* optimizer : both) optimizer->step();
    through_archive(*twins.of_full, *twins.of_split);
    twins.new_gradients(1.);
    for (Optimizer* optimizer : both) optimizer->step();
    twins.expect_equal();
  }
}

TEST(SplitMasters, TakeAThousandStepsOfAdamWAsFullOnesDo) {
  torch::manual_seed(2);
  const Twins twins(kind_named("adamw"), {torch::randn({300}), torch::randn({1021})});
  for (int step = 0; step < 1000; ++step) {
    twins.new_gradients(1.);
    twins.of_split->step();
    twins.of_full->step();
  }
  twins.expect_equal();
}

TEST_P(SplitMastersOnDevices, StayUnchangedWhenAStepIsSkipped) {
  const Tensor numbers = telling_numbers();
  Twins twins(kind_named("adamw"), {numbers.to(device())});
  const Tensor high = bits_of(twins.model->weights[0]).clone();
  twins.model->weights[0].mutable_grad() = at::ones_like(numbers, device());
  as_fused(*twins.of_split).step_scaled(number(2., device()), number(1., device()));
  EXPECT_TRUE(at::equal(bits_of(twins.model->weights[0]), high));
  expect_same_bits({usual(values_of(twins.masters)[0])}, {usual(numbers)});
}

TEST_P(SplitMastersOnDevices, ShowTheModelEveryNaNThatTheyAreGiven) {
  const Tensor numbers = numbers_of({0x7fffffff, 0xffffffff, 0x7f800001, 0x7fc00000, 0x3f800000});
  const Weights model(Params{numbers.to(device())});
  const Tensor given = model->weights[0].detach();
  const MasterWeights masters(model, split);
  EXPECT_TRUE(at::equal(model->weights[0].isnan().cpu(), numbers.isnan())) << model->weights[0];
  EXPECT_TRUE(at::equal(values_of(masters)[0].isnan().cpu(), numbers.isnan()));
  EXPECT_TRUE(at::equal(bits_of(given).cpu(), bits_of(numbers))) << "what the program has";
}

// CUDA's NaN has all bits but the sign set. Rounded up it would be a bf16 of 0.
TEST_P(SplitMastersOnDevices, ShowTheModelEveryNaNThatAStepLeaves) {
  const Tensor numbers =
      numbers_of({0x7fffffff, 0xffffffff, 0x7f800001, 0x7fc00000, 0x3f800000, 0x7f800000});
  Twins twins(kind_named("sgd"), {numbers.to(device())});
  twins.model->weights[0].mutable_grad() = at::ones_like(numbers, device());
  twins.of_split->step();
  const Tensor after = twins.model->weights[0].detach().cpu();
  EXPECT_TRUE(at::equal(after.isnan(), numbers.isnan())) << after;
  EXPECT_TRUE(at::equal(values_of(twins.masters)[0].cpu().isnan(), numbers.isnan()));
}

TEST(SplitMasters, TakeFourBytesAWeightWithTheModel) {
  constexpr std::int64_t weights = 1 << 20;
  const auto bytes = [](MasterStorage storage) {
    const MemoryMeter memory;
    Weights model(Params{at::zeros({weights})});
    const MasterWeights masters(model, {.dtype = at::kBFloat16, .storage = storage});
    return memory.bytes();
  };
  EXPECT_EQ(bytes(MasterStorage::split), 4 * weights);
  EXPECT_EQ(bytes(MasterStorage::full), 6 * weights);
}

TEST(SplitMasters, AreSteppedInPiecesOfBoundedSize) {
  constexpr std::int64_t weights = 1 << 22;
  Weights model(Params{at::zeros({weights})});
  MasterWeights masters(model, split);
  torchamp::FusedSGD optimizer(masters.parameters(), SGDOptions(0.1));
  for (int step = 0; step < 2; ++step) {
    model->weights[0].mutable_grad() = at::ones({weights});
    const MemoryMeter memory;
    optimizer.step();
    EXPECT_LE(memory.peak_bytes(), 1 << 20);
  }
}

TEST(SplitMasters, TrainAsFullOnesDoWithScalerClippingAccumulationAndRecomputation) {
  const auto train = [](MasterStorage storage) {
    at::manual_seed(4);
    torch::nn::Sequential net = masters_training::make_net();
    MasterWeights masters(net, {.dtype = at::kBFloat16, .storage = storage});
    masters_training::train(net, masters, {.unscales = true});
    std::stringstream file;
    torch::save(masters, file);
    torch::nn::Sequential plain = masters_training::make_net();
    torch::load(plain, file);
    return plain->parameters();
  };
  expect_same_bits(train(MasterStorage::split), train(MasterStorage::full));
}

TEST(SplitMasters, SumUpInFp32WhatADroppingAccumulationKeeps) {
  Weights model(Params{at::zeros({2})});
  MasterWeights masters(model, split);
  torchamp::FusedSGD optimizer(masters.parameters(), SGDOptions(1.));
  torchamp::GradScaler scaler({.init_scale = 1.});
  DroppingAccumulation window(scaler, optimizer);
  for (const float gradient : {256.F, 1.F}) {
    window.backward((model->weights[0] * at::full({2}, gradient, at::kBFloat16)).sum());
  }
  window.step();
  EXPECT_TRUE(at::equal(values_of(masters)[0], at::full({2}, -128.5F)));
}

TEST(SplitMasters, AreSavedInFp32AndReadBackWhole) {
  const Params values{at::randn({5}), at::randn({2, 3})};
  const MasterWeights masters(Weights(values), split);
  const Weights model(Params{at::zeros({5}), at::zeros({2, 3})});
  MasterWeights others(model, split);
  through_archive(masters, others);
  expect_same_bits(values_of(others), values);
  expect_same_bits(model->weights, {rounded(values[0]), rounded(values[1]).view({2, 3})});
}

TEST(SplitMasters, GiveTheirValuesToMastersThatAreMadeOfTheModelLater) {
  const Params values{at::randn({5})};
  for (const MasterStorage storage : {MasterStorage::split, MasterStorage::full}) {
    Weights model(values);
    { const MasterWeights first(model, split); }
    const MasterWeights masters(model, {.dtype = at::kBFloat16, .storage = storage});
    expect_same_bits(values_of(masters), values);
  }
}

TEST(SplitMasters, RefuseFp16) {
  EXPECT_ERROR(MasterWeights(Weights(Params{at::ones({2})}), {.storage = MasterStorage::split}),
               "Pass .dtype = torch::kBFloat16 with MasterStorage::split");
}

/// One iteration with an optimizer that knows nothing of split masters.
struct WrongOptimizer {
  explicit WrongOptimizer(bool adam) : model(Params{at::ones({4})}), masters(model, split) {
    if (adam) {
      optimizer = std::make_unique<torch::optim::Adam>(masters.parameters());
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(masters.parameters(), 0.1);
    }
  }
  void pass() {
    optimizer->zero_grad();
    model->weights[0].sum().backward();
  }
  Weights model;
  MasterWeights masters;
  std::unique_ptr<Optimizer> optimizer;
};

TEST(SplitMasters, RefuseOtherOptimizersWithAScaler) {
  for (const bool adam : {false, true}) {
    WrongOptimizer wrong(adam);
    torchamp::GradScaler scaler;
    const Tensor before = wrong.model->weights[0].detach().clone();
    for (const bool taken : {false, true}) {
      wrong.optimizer->zero_grad();
      scaler.scale(wrong.model->weights[0].sum()).backward();
      if (taken) wrong.masters.take_gradients();
      EXPECT_ERROR(scaler.unscale_(*wrong.optimizer), "and this optimizer is not fused");
      EXPECT_ERROR(scaler.step(*wrong.optimizer), "and this optimizer is not fused");
    }
    EXPECT_TRUE(at::equal(wrong.model->weights[0], before));
  }
}

TEST(SplitMasters, RefuseOtherOptimizersWithoutAScaler) {
  for (const bool adam : {false, true}) {
    WrongOptimizer wrong(adam);
    wrong.pass();
    wrong.masters.take_gradients();
    wrong.optimizer->step();
    const char* const what = adam ? "the weight '0' was written to"
                                  : "the weight '0' was given a gradient that no fused optimizer";
    EXPECT_ERROR(wrong.masters.copy_to_model(), what);
    wrong.pass();
    EXPECT_ERROR(wrong.masters.take_gradients(), what);
  }
}

TEST(SplitMasters, RefuseOtherOptimizersOfWeightsThatAFusedOneHasOrHad) {
  for (const bool main_gradients : {false, true}) {
    for (const bool is_gone : {false, true}) {
      SCOPED_TRACE(c10::str(main_gradients, ' ', is_gone));
      const Weights model(Params{at::ones({4})});
      torchamp::MasterWeightsOptions options = split;
      options.main_gradients = main_gradients;
      MasterWeights masters(model, options);
      std::optional<torchamp::FusedAdam> fused(std::in_place, masters.parameters());
      torch::optim::SGD sgd(masters.parameters(), 0.1);
      const auto pass = [&] {
        sgd.zero_grad();
        model->weights[0].sum().backward();
        masters.take_gradients();
      };
      pass();
      fused->step();
      masters.copy_to_model();
      if (is_gone) fused.reset();
      pass();
      sgd.step();
      EXPECT_ERROR(masters.copy_to_model(), "that no fused optimizer has stepped with");
      EXPECT_ERROR(pass(), "that no fused optimizer has stepped with");
      masters.zero_grad();
      pass();  // one is to be made again
    }
  }
}

TEST(SplitMasters, MayLoseGradientsWithoutAStepAndBeSteppedInGroupsAddedThroughTheBaseClass) {
  const Weights model(Params{at::ones({4}), at::ones({3})});
  MasterWeights masters(model, split);
  torchamp::FusedAdam optimizer({masters.parameters()[0]});
  static_cast<Optimizer&>(optimizer).add_param_group(
      OptimizerParamGroup({masters.parameters()[1]}));
  const auto pass = [&] {
    (model->weights[0].sum() + model->weights[1].sum()).backward();
    masters.take_gradients();
  };
  for (int i = 0; i < 3; ++i) {  // not stepped with
    static_cast<Optimizer&>(optimizer).zero_grad();
    pass();
  }
  (void)model->weights[0].detach();
  optimizer.zero_grad();
  pass();
  optimizer.step();
  masters.copy_to_model();
  static_cast<Optimizer&>(optimizer).zero_grad();
  (void)model->weights[0].detach();
  pass();
}

TEST(SplitMasters, SayThatTheirWeightsWereWrittenTo) {
  Twins twins(kind_named("adamw"), {at::ones({4})});
  const auto pass = [&] {
    twins.of_split->zero_grad();
    twins.model->weights[0].sum().backward();
    twins.masters.take_gradients();
  };
  {
    Twins early(kind_named("adamw"), {at::ones({4})});
    const at::NoGradGuard no_grad;
    early.model->weights[0].zero_();
    EXPECT_ERROR(early.masters.take_gradients(), "the weight '0' was written to since its masters");
  }
  pass();
  twins.of_split->step();
  pass();
  {
    const at::NoGradGuard no_grad;
    twins.model->weights[0].mul_(2);
  }
  EXPECT_ERROR(twins.of_split->step(), "FusedAdamW::step: parameter 0 of group 0 was written to");
  EXPECT_ERROR(pass(), "MasterWeights::take_gradients: the weight '0' was written to");
  std::ostringstream file;
  EXPECT_ERROR(torch::save(twins.masters, file), "MasterWeights::save: the weight '0' was written");
}

TEST(SplitMasters, SayThatGradientsWereNotTakenOrTheModelWasMoved) {
  Twins twins(kind_named("adamw"), {at::ones({4})});
  twins.model->weights[0].sum().backward();
  EXPECT_ERROR(twins.of_split->step(), "call MasterWeights::take_gradients() after backward()");
  twins.model->to(at::kDouble);
  EXPECT_ERROR(twins.masters.take_gradients(), "was moved, cast or given another shape");
}

TEST(SplitMasters, GoOnAfterAStepWithAClosureThatHasThrown) {
  torch::nn::Linear model(3, 3);
  MasterWeightsOptions options = split;
  options.main_gradients = true;
  const MasterWeights masters(model, options);
  torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(0.5));
  torchamp::GradScaler scaler;
  const auto step = [&] {
    const auto loss = [&] { return model->forward(at::ones({2, 3}, at::kBFloat16)).sum(); };
    return torchamp::step(scaler, optimizer, loss).stepped();
  };
  auto& parameters = optimizer.param_groups()[0].params();
  parameters.push_back(parameters[0]);
  EXPECT_ERROR(step(), "is in the optimizer twice");
  parameters.pop_back();
  EXPECT_TRUE(step());
}

TEST(SplitMasters, RefuseAFileOnceTheModelWasCast) {
  torch::nn::Linear model(3, 3);
  torchamp::MasterWeights masters(model, split);
  std::stringstream file;
  torch::save(masters, file);
  model->to(at::kFloat);
  const at::Tensor weight = model->weight.detach().clone();
  EXPECT_ERROR(torch::load(masters, file), "MasterWeights::load: the weight 'weight' was moved");
  EXPECT_TRUE(at::equal(model->weight, weight));
}

TEST(SplitMasters, KeepTheClipAndNotTheScaleOfAStepThatRanOutOfMemory) {
  const auto options = at::TensorOptions(at::kFloat);
  const Tensor scale = at::full({}, 4., options), found_inf = at::zeros({}, options);
  for (const bool clips : {false, true}) {
    int failures = 0;
    for (bool fails = true; fails; failures += fails ? 1 : 0) {
      ASSERT_LT(failures, 100);
      const Weights model(Params{at::zeros({3})});
      MasterWeights masters(model, split);
      torchamp::FusedSGD optimizer(masters.parameters(), torch::optim::SGDOptions(1.));
      model->weights[0].mutable_grad() = at::full({3}, 8.);
      if (clips) optimizer.divide_next_step(at::full({}, 2., options));
      try {
        const HostAllocationLimit limit(failures);
        optimizer.step_scaled(scale, found_inf);
        fails = false;
      } catch (const c10::OutOfMemoryError&) {
      }
      if (fails) optimizer.step();  // without a scale
      const float expected = -8.F / (clips ? 2.F : 1.F) / (fails ? 1.F : 4.F);
      EXPECT_TRUE(at::equal(model->weights[0].to(at::kFloat), at::full({3}, expected)));
    }
    EXPECT_GT(failures, 0) << "or this tests nothing";
  }
}

TEST(SplitMasters, CountNoStepThatRunsOutOfMemory) {
  const auto train = [](bool fails) {
    at::manual_seed(3);
    torch::nn::Linear net(4, 3);
    MasterWeights masters(net, split);
    torchamp::FusedAdam optimizer(masters.parameters(), torch::optim::AdamOptions(0.1));
    for (const Tensor& p : masters.parameters()) {
      p.mutable_grad() = at::ones(p.sizes(), at::kFloat);
    }
    optimizer.step();
    if (fails) {
      const auto step = [&] { optimizer.step(); };
      EXPECT_GT(until_memory_suffices<HostAllocationLimit>(step, [] {}), 0);
    } else {
      optimizer.step();
    }
    return net->parameters();
  };
  const Params expected = train(false), actual = train(true);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(actual[i], expected[i]));
  }
}

}  // namespace
