// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/master_weights.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

#include "support/expect_error.h"
#include "support/memory_meter.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"
#include "torchamp/recompute.h"

namespace {

using at::Tensor;
using torchamp::MasterWeights;

struct OwnNormImpl : torch::nn::Module {
  OwnNormImpl() : gain(register_parameter("gain", at::ones({4}))) {}
  Tensor forward(const Tensor& x) { return x * gain; }
  Tensor gain;
};
TORCH_MODULE(OwnNorm);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : body(register_module("body", torch::nn::Linear(4, 4))),
        batch(register_module("batch", torch::nn::BatchNorm1d(4))),
        own(register_module("own", OwnNorm())),
        head(register_module("head", torch::nn::Linear(4, 2))),
        frozen(register_parameter("frozen", at::randn({4}), /*requires_grad=*/false)) {}
  Tensor forward(const Tensor& x) {
    return head->forward(own->forward(batch->forward(body->forward(x * frozen))));
  }
  torch::nn::Linear body;
  torch::nn::BatchNorm1d batch;
  OwnNorm own;
  torch::nn::Linear head;
  Tensor frozen;
};
TORCH_MODULE(Net);

std::vector<Tensor> clones(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

void expect_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(MasterWeights, KeepNormsAndNamedParametersInFp32) {
  Net net;
  const auto before = clones(net->parameters());
  const MasterWeights masters(net, {.dtype = at::kBFloat16, .keep_fp32 = {"head.bias"}});
  std::map<std::string, at::ScalarType> dtypes;
  for (const auto& item : net->named_parameters()) dtypes[item.key()] = item.value().scalar_type();
  EXPECT_EQ(dtypes, (std::map<std::string, at::ScalarType>{{"frozen", at::kBFloat16},
                                                           {"body.weight", at::kBFloat16},
                                                           {"body.bias", at::kBFloat16},
                                                           {"batch.weight", at::kFloat},
                                                           {"batch.bias", at::kFloat},
                                                           {"own.gain", at::kFloat},
                                                           {"head.weight", at::kBFloat16},
                                                           {"head.bias", at::kFloat}}));
  EXPECT_EQ(net->batch->running_mean.scalar_type(), at::kFloat);

  const auto named = masters.named_parameters();
  ASSERT_EQ(named.size(), 7u);  // all but the frozen one
  std::size_t i = 0;
  for (const auto& item : net->named_parameters()) {
    if (item.key() != "frozen") {
      EXPECT_EQ(named[i].first, item.key());
      EXPECT_TRUE(at::equal(named[i].second, before[i + 1])) << item.key();
      EXPECT_EQ(named[i].second.is_same(item.value()), item.value().scalar_type() == at::kFloat);
      EXPECT_TRUE(named[i].second.is_leaf() && named[i].second.requires_grad());
      ++i;
    }
  }
}

TEST(MasterWeights, TakeWholeModulesByNameAndNormsOnRequest) {
  Net net;
  const MasterWeights masters(net, {.keep_fp32 = {"head"}, .keep_norms = false});
  EXPECT_EQ(net->head->weight.scalar_type(), at::kFloat);
  EXPECT_EQ(net->batch->weight.scalar_type(), at::kHalf);
  EXPECT_ERROR(MasterWeights(Net(), {.keep_fp32 = {"hea"}}),
               "MasterWeights: keep_fp32 names 'hea', but the model has no parameter of that name");
  EXPECT_ERROR(MasterWeights(Net(), {.dtype = at::kFloat}),
               "MasterWeights: a model cannot be kept in Float");
}

TEST(MasterWeights, GiveASharedParameterOneMaster) {
  struct Tied : torch::nn::Module {
    Tied() { register_parameter("b", register_parameter("a", at::ones({2}))); }
  };
  const auto tied = std::make_shared<Tied>();
  const MasterWeights masters(tied);
  EXPECT_EQ(masters.parameters().size(), 1u);
  EXPECT_EQ(tied->named_parameters()["b"].scalar_type(), at::kHalf);
}

// A bf16 weight of 1 would stay 1: half of its last digit is 0.002.
TEST(MasterWeights, AddUpUpdatesThatSixteenBitsWouldLose) {
  torch::nn::Linear net(torch::nn::LinearOptions(4, 1).bias(false));
  torch::nn::init::ones_(net->weight);
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  torch::optim::SGD optimizer(masters.parameters(), 1e-4);
  for (int i = 0; i < 100; ++i) {
    optimizer.zero_grad();
    net->forward(at::ones({1, 4}, at::kBFloat16)).sum().backward();
    masters.take_gradients();
    optimizer.step();
    masters.copy_to_model();
  }
  expect_close(masters.parameters()[0], at::full({1, 4}, 0.99f));
  EXPECT_TRUE(at::equal(net->weight, at::full({1, 4}, 0.99f).to(at::kBFloat16)));
}

Tensor loss_of(Net& net, const Tensor& x, at::ScalarType dtype = at::kBFloat16) {
  const torchamp::AutocastGuard autocast(at::kCPU, dtype);
  return net->forward(x).to(at::kFloat).pow(2).mean();
}

/// The same by hand, one parameter at a time.
TEST(MasterWeights, TrainAsAPlainLoopOverParametersDoes) {
  at::manual_seed(3);
  Net net;
  Net by_hand;
  {
    const at::NoGradGuard no_grad;
    for (const auto& item : by_hand->named_parameters()) {
      item.value().copy_(*net->named_parameters().find(item.key()));
    }
  }
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  torch::optim::Adam optimizer(masters.parameters(), torch::optim::AdamOptions(0.01));

  std::vector<Tensor> theirs;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // 16-bit parameter and master
  for (const auto& item : by_hand->named_parameters()) {
    const Tensor& parameter = item.value();
    const bool norm = item.key().starts_with("batch") || item.key().starts_with("own");
    Tensor master = parameter;
    if (!norm) {
      master = parameter.detach().clone();
      parameter.set_data(parameter.detach().to(at::kBFloat16));
    }
    if (!parameter.requires_grad()) continue;
    if (!norm) pairs.emplace_back(parameter, master.set_requires_grad(true));
    theirs.push_back(master);
  }
  torch::optim::Adam by_hand_optimizer(theirs, torch::optim::AdamOptions(0.01));

  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    by_hand_optimizer.zero_grad();
    for (int batch = 0; batch < 2; ++batch) {
      const Tensor x = at::randn({8, 4});
      loss_of(net, x).backward();
      masters.take_gradients();
      loss_of(by_hand, x).backward();
      for (auto& [parameter, master] : pairs) {
        const Tensor wide = parameter.grad().to(at::kFloat);
        master.mutable_grad() = master.grad().defined() ? master.grad() + wide : wide;
        parameter.mutable_grad().reset();
      }
    }
    optimizer.step();
    masters.copy_to_model();
    by_hand_optimizer.step();
    const at::NoGradGuard no_grad;
    for (auto& [parameter, master] : pairs) parameter.copy_(master);
  }
  expect_equal(masters.parameters(), theirs);
  expect_equal(net->parameters(), by_hand->parameters());
}

TEST(MasterWeights, FreeTheModelsGradientsAndLeaveThoseOfFp32Parameters) {
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

TEST(MasterWeights, MissNoGradientsWhereNoneAreToBeTaken) {
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

TEST(MasterWeights, DropGradientsWithThoseOfTheModel) {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  const auto pass = [&](float x) { net->forward(at::full({1, 1}, x, at::kBFloat16)).backward(); };
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  pass(8);
  masters.take_gradients();
  pass(8);
  masters.zero_grad();
  EXPECT_FALSE(net->weight.grad().defined());
  EXPECT_FALSE(masters.parameters()[0].grad().defined());

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
  EXPECT_ERROR(masters.take_gradients(), "the parameter 'frozen' has a gradient and no master");
}

/// The ops that the calling thread calls, without those that they call in turn.
std::vector<std::string> ops_called_by(const std::function<void()>& body) {
  static thread_local std::vector<std::string>* names = nullptr;
  static thread_local int depth = 0;
  std::vector<std::string> result;
  names = &result;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
            if (depth++ == 0) names->emplace_back(op.name());
            return nullptr;
          },
          [](const at::RecordFunction&, at::ObserverContext*) { --depth; })
          .scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return result;
}

TEST(MasterWeights, CopyBackInOnePassOverAllParameters) {
  torch::nn::Sequential net;
  for (int i = 0; i < 10; ++i) net->push_back(torch::nn::Linear(4, 4));
  MasterWeights masters(net);
  EXPECT_EQ(ops_called_by([&] { masters.copy_to_model(); }),
            std::vector<std::string>{"aten::_foreach_copy_"});
}

TEST(MasterWeights, WorkWithScalerClippingAndFusedOptimizers) {
  for (const bool fused : {false, true}) {
    at::manual_seed(5);
    Net net;
    MasterWeights masters(net, {.dtype = at::kHalf});
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (fused) {
      optimizer =
          std::make_unique<torchamp::FusedSGD>(masters.parameters(), torch::optim::SGDOptions(0.1));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(masters.parameters(), 0.1);
    }
    torchamp::GradScaler scaler({.init_scale = 1024.});
    for (const bool overflow : {false, true, false}) {
      const auto before = clones(masters.parameters());
      const auto model_before = clones(net->parameters());
      optimizer->zero_grad();
      const Tensor loss = loss_of(net, at::randn({8, 4}), at::kHalf);
      scaler.scale(overflow ? loss * 1e30 : loss).backward();
      masters.take_gradients();
      scaler.unscale_(*optimizer);
      torchamp::clip_grad_norm_(masters.parameters(), 0.5);
      EXPECT_EQ(scaler.step(*optimizer).stepped(), !overflow);
      scaler.update();
      masters.copy_to_model();
      if (overflow) {
        expect_equal(masters.parameters(), before);
        expect_equal(net->parameters(), model_before);
        continue;
      }
      double length = 0.;
      for (std::size_t i = 0; i < before.size(); ++i) {
        length += (masters.parameters()[i] - before[i]).pow(2).sum().item<double>();
      }
      EXPECT_GT(length, 0.);
      EXPECT_LE(std::sqrt(length), 0.1 * 0.5 * 1.001);
    }
    EXPECT_EQ(scaler.get_scale(), 512.);
  }
}

TEST(MasterWeights, WhoseGradientsAreTakenAfterUnscalingAreNotSteppedWith) {
  for (const bool fused : {false, true}) {
    Net net;
    MasterWeights masters(net, {.dtype = at::kHalf});
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (fused) {
      optimizer =
          std::make_unique<torchamp::FusedSGD>(masters.parameters(), torch::optim::SGDOptions(0.1));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(masters.parameters(), 0.1);
    }
    torchamp::GradScaler scaler;
    const auto before = clones(masters.parameters());
    scaler.scale(loss_of(net, at::randn({8, 4}), at::kHalf)).backward();
    scaler.unscale_(*optimizer);  // finds those of the norms, in fp32
    masters.take_gradients();
    EXPECT_ERROR(scaler.step(*optimizer), "call MasterWeights::take_gradients() before unscale_");
    expect_equal(masters.parameters(), before);
  }
}

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
               "MasterWeights::load: the archive holds what the model in the program does not "
               "have: bias");
  EXPECT_TRUE(at::equal(masters.parameters()[0], values[0]));
}

TEST(MasterWeights, StayAsTheyWereWhenLoadingFails) {
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

// c10d's Reducer has its hooks there.
TEST(MasterWeights, LeaveTheNodesThatAccumulateGradientsInPlace) {
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  const auto node = torch::autograd::impl::grad_accumulator(net->body->weight);
  std::stringstream file;
  torch::save(masters, file);
  torch::load(masters, file);
  EXPECT_EQ(torch::autograd::impl::grad_accumulator(net->body->weight), node);
}

TEST(MasterWeights, HalveTheMemoryOfWeightsAndActivations) {
  struct Bytes {
    double weights, forward;
  };
  const auto measure = [](bool narrow) {
    constexpr std::int64_t width = 64, batch = 256;
    const MemoryMeter memory;
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) {
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    }
    const std::int64_t built = memory.bytes();
    std::optional<MasterWeights> masters;
    if (narrow) masters.emplace(net, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16});
    const Tensor x = at::randn({batch, width}, narrow ? at::kBFloat16 : at::kFloat);
    const std::int64_t before = memory.bytes();
    const Tensor y = net->forward(x);
    return Bytes{static_cast<double>(before - built - static_cast<std::int64_t>(x.nbytes())),
                 static_cast<double>(memory.bytes() - before)};
  };
  const Bytes plain = measure(false), narrow = measure(true);
  EXPECT_EQ(plain.weights, 0.);                 // the fp32 ones are there in both
  EXPECT_EQ(narrow.weights, 4 * 64 * 64 * 2.);  // the model's own
  EXPECT_EQ(narrow.forward, plain.forward / 2.);
}

TEST(MasterWeights, ComposeWithRecomputation) {
  at::manual_seed(9);
  Net net;
  MasterWeights masters(net, {.dtype = at::kBFloat16});
  const Tensor x = at::randn({8, 4});
  const auto gradients = [&](bool checkpointed) {
    Tensor loss;
    {
      const torchamp::AutocastGuard autocast(at::kCPU, at::kBFloat16);
      loss = (checkpointed ? torchamp::checkpoint(net, x) : net->forward(x))
                 .to(at::kFloat)
                 .pow(2)
                 .mean();
    }
    loss.backward();
    masters.take_gradients();
    std::vector<Tensor> result;
    for (const Tensor& parameter : masters.parameters()) {
      result.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
    return result;
  };
  expect_equal(gradients(false), gradients(true));
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

TEST(MasterWeights, RefuseANullModel) {
  EXPECT_ERROR(MasterWeights(std::shared_ptr<torch::nn::Module>()), "the model is null");
}

}  // namespace
