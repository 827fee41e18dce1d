// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/cuda_graph.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/tolerances.h"
#include "torchamp/autocast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"

namespace {

using torchamp::CudaGraph;
using torchamp::CudaGraphOptions;
using Tensors = CudaGraph::Tensors;

/// Stands in for CUDA on a CPU: a recording is the work itself, done again at each replay. So what
/// happens on the host in a replay is not tested with it, but the order of things is.
class Repeater final : public torchamp::detail::GraphRecorder {
 public:
  struct Log {
    int runs = 0, records = 0, replays = 0, resets = 0;
    at::DeviceType watched = at::kMeta;  // nothing, since the CPU's kernels read
    bool refuse = false;
  };
  explicit Repeater(Log& log) : log_(log) {}

  c10::DeviceType device_type() const override { return log_.watched; }
  void run(const std::function<void()>& work) override {
    ++log_.runs;
    work();
  }
  void record(const std::function<void()>& work) override {
    ++log_.records;
    TORCH_CHECK(!log_.refuse, "operation not permitted");
    work_ = work;
  }
  void replay() override {
    ++log_.replays;
    work_();
  }
  void reset() override {
    ++log_.resets;
    work_ = nullptr;
  }

 private:
  Log& log_;
  std::function<void()> work_;
};

auto repeating(Repeater::Log& log) {
  return [&log](c10::Device) { return std::make_unique<Repeater>(log); };
}

/// A CudaGraph on `device`: a real one on CUDA, one that repeats on a CPU.
template <class Body>
std::unique_ptr<CudaGraph> make_graph(at::DeviceType device, torch::optim::Optimizer& optimizer,
                                      Body body, Repeater::Log& log,
                                      CudaGraphOptions options = {}) {
  if (device == at::kCUDA) {
    return std::make_unique<CudaGraph>(optimizer, std::move(body), options);
  }
  return std::make_unique<CudaGraph>(
      CudaGraph::Optimizers{optimizer},
      [body = std::move(body)](const Tensors& batch) mutable -> Tensors { return {body(batch)}; },
      options, repeating(log));
}

/// A small network that is trained as users train: guard, scaler, clipping, fused step.
struct Training {
  explicit Training(at::DeviceType device_type, const std::string& kind = "adam")
      : device(device_type) {
    torch::manual_seed(7);
    net = torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8),
                                torch::nn::ReLU(), torch::nn::Linear(8, 1));
    net->to(device);
    const auto parameters = net->parameters();
    if (kind == "adam") {
      optimizer =
          std::make_unique<torchamp::FusedAdam>(parameters, torch::optim::AdamOptions(0.01));
    } else if (kind == "adamw") {
      optimizer = std::make_unique<torchamp::FusedAdamW>(
          parameters, torch::optim::AdamWOptions(0.01).amsgrad(true));
    } else {
      optimizer = std::make_unique<torchamp::FusedSGD>(
          parameters, torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
    }
  }

  at::Tensor step(const Tensors& batch) {
    ++calls;
    optimizer->zero_grad();
    at::Tensor loss;
    {
      const torchamp::AutocastGuard autocast(device.type());
      loss = torch::mse_loss(net->forward(batch[0]), batch[1]);
    }
    scaler.scale(loss).backward();
    torchamp::clip_grad_norm_(scaler, *optimizer, 0.5);
    scaler.step(*optimizer);
    scaler.update();
    return loss;
  }

  /// Batch `i`; every fifth one overflows.
  Tensors batch(int i) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + i);
    at::Tensor x = at::randn({4, 6}, generator), y = at::randn({4, 1}, generator);
    if (i % 5 == 3) y.fill_(std::numeric_limits<float>::infinity());
    return {x.to(device), y.to(device)};
  }

  at::Device device;
  torch::nn::Sequential net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  torchamp::GradScaler scaler{{.init_scale = 1024., .growth_interval = 3}};
  int calls = 0;
};

/// A graph of `training`'s steps.
std::unique_ptr<CudaGraph> graph_of_steps(Training& training, Repeater::Log& log) {
  return make_graph(
      training.device.type(), *training.optimizer,
      [&training](const Tensors& batch) { return training.step(batch); }, log);
}

void expect_equal_training(const Training& a, const Training& b) {
  const auto pa = a.net->parameters(), pb = b.net->parameters();
  for (std::size_t i = 0; i < pa.size(); ++i) expect_close(pa[i], pb[i]);
  const auto ba = a.net->buffers(), bb = b.net->buffers();
  for (std::size_t i = 0; i < ba.size(); ++i) expect_close(ba[i], bb[i]);
  EXPECT_EQ(a.scaler.get_scale(), b.scaler.get_scale());
}

// ---- What is refused before anything is captured
// --------------------------------------------------

class OneParameter : public ::testing::Test {
 protected:
  at::Tensor parameter_ = torch::zeros({2}, torch::requires_grad());
  torchamp::FusedAdam fused_{{parameter_}};
  Repeater::Log log_;

  CudaGraph graph_of(std::function<Tensors(const Tensors&)> body, CudaGraphOptions options = {}) {
    return CudaGraph({fused_}, std::move(body), options, repeating(log_));
  }
  /// Any iteration that steps.
  Tensors step(const Tensors& batch) {
    parameter_.mutable_grad() = batch[0].clone();
    fused_.step();
    return {batch[0] * 2};
  }
  CudaGraph stepping_graph(CudaGraphOptions options = {}) {
    return graph_of([this](const Tensors& batch) { return step(batch); }, options);
  }
};

TEST_F(OneParameter, RefusesAnOrdinaryOptimizer) {
  torch::optim::Adam ordinary({parameter_});
  EXPECT_ERROR(CudaGraph(ordinary, [](const Tensors&) {}),
               "CudaGraph: an ordinary optimizer decides on the host");
  EXPECT_ERROR(CudaGraph({fused_, ordinary}, [](const Tensors&) {}), "Use torchamp's FusedAdam");
}

TEST_F(OneParameter, RefusesParametersOnACpu) {
  EXPECT_ERROR(CudaGraph(fused_, [](const Tensors&) {}),
               "CudaGraph: the optimizers' parameters are on cpu, but only a CUDA device has "
               "graphs. Move the model there");
}

TEST_F(OneParameter, RefusesParametersOnSeveralDevices) {
  torchamp::FusedAdam elsewhere({torch::zeros({2}, torch::device(at::kMeta))});
  EXPECT_ERROR(CudaGraph({fused_, elsewhere}, [](const Tensors&) {}),
               "there are parameters on cpu and on meta, but a graph belongs to one device");
}

TEST_F(OneParameter, RefusesToCaptureNothing) {
  EXPECT_ERROR(CudaGraph(CudaGraph::Optimizers{}, [](const Tensors&) {}), "no optimizer");
}

TEST_F(OneParameter, RefusesToCaptureWithoutAWarmUp) {
  EXPECT_ERROR(stepping_graph({.warmup = 0}), "CudaGraph: warmup is 0, but at least one");
}

TEST_F(OneParameter, RefusesInputsThatDoNotFitAndGoesOnAsBefore) {
  CudaGraph graph = stepping_graph({.warmup = 1});
  const at::Tensor fits = torch::ones({2});
  EXPECT_ERROR(graph({at::Tensor()}), "CudaGraph: input 0 is undefined");
  EXPECT_ERROR(graph({torch::ones({2}, torch::requires_grad())}), "input 0 requires grad");
  EXPECT_ERROR(graph({torch::ones({2}, torch::device(at::kMeta))}),
               "input 0 is on meta, but the optimizers' parameters are on cpu");
  graph({fits});
  graph({fits});
  const at::Tensor before = parameter_.detach().clone();
  EXPECT_ERROR(graph({fits, fits}), "2 inputs were given, but the first call had 1");
  EXPECT_ERROR(graph({torch::ones({3})}),
               "input 0 is Float[3], but in the first call it was Float[2]");
  EXPECT_ERROR(graph({torch::ones({2}, torch::kLong)}), "input 0 is Long[2]");
  EXPECT_TRUE(at::equal(before, parameter_));
  EXPECT_TRUE(graph.is_captured());
  graph({fits});
  EXPECT_FALSE(at::equal(before, parameter_));
}

TEST_F(OneParameter, NamesTheOpThatReadsTheDevice) {
  log_.watched = at::kCPU;  // as a GPU would be
  bool reads = true;
  torch::optim::SGDOptions plain(0.1);
  torchamp::FusedSGD optimizer({parameter_}, plain);
  CudaGraph graph(
      {optimizer},
      [&](const Tensors& batch) -> Tensors {
        if (reads && batch[0].sum().item<double>() < 0.) return {};
        return {batch[0] + 1};
      },
      {.warmup = 2}, repeating(log_));
  graph({torch::ones({2})});
  EXPECT_ERROR(graph({torch::ones({2})}),
               "CudaGraph: the iteration makes host and device wait for each other, which a graph "
               "cannot hold: aten::_local_scalar_dense (Tensor::item) on a tensor of shape []");
  EXPECT_FALSE(graph.is_captured());
  EXPECT_EQ(log_.records, 0);
  reads = false;  // and goes on when it is mended
  graph({torch::ones({2})});
  graph({torch::ones({2})});
  EXPECT_TRUE(graph.is_captured());
}

TEST_F(OneParameter, TellsWhyACaptureFailed) {
  log_.refuse = true;
  CudaGraph graph = stepping_graph({.warmup = 1});
  graph({torch::ones({2})});
  EXPECT_ERROR(graph({torch::ones({2})}),
               "CudaGraph: the iteration cannot be captured, though it ran eagerly 1 times");
  EXPECT_FALSE(graph.is_captured());
  log_.refuse = false;
  graph({torch::ones({2})});
  EXPECT_TRUE(graph.is_captured());
}

// ---- The order of things
// --------------------------------------------------------------------------

TEST_F(OneParameter, WarmsUpThenCapturesOnceAndReplays) {
  CudaGraph graph = stepping_graph({.warmup = 2});
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(graph.is_captured(), i > 2);
    graph({torch::ones({2})});
  }
  EXPECT_EQ(log_.runs, 2);
  EXPECT_EQ(log_.records, 1);
  EXPECT_EQ(log_.replays, 4);
}

TEST_F(OneParameter, HandsTheLatestInputsToTheBodyAtFixedAddresses) {
  std::vector<const void*> addresses;
  CudaGraph graph = graph_of(
      [&](const Tensors& batch) {
        addresses.push_back(batch[0].const_data_ptr());
        return step(batch);
      },
      {.warmup = 1});
  for (int i = 0; i < 4; ++i) {
    const Tensors& outputs = graph({torch::full({2}, i)});
    ASSERT_EQ(outputs.size(), 1);
    EXPECT_TRUE(at::equal(outputs[0], torch::full({2}, 2 * i)));
  }
  for (const void* address : addresses) EXPECT_EQ(address, addresses[0]);
}

TEST_F(OneParameter, ReturnsWhatTheBodyReturnsWithoutItsAutogradGraph) {
  CudaGraph nothing(fused_, [](const Tensors&) {}, {.enabled = false});
  EXPECT_TRUE(nothing({}).empty());
  CudaGraph one(fused_, [&](const Tensors&) { return parameter_ * 2; }, {.enabled = false});
  EXPECT_FALSE(one({})[0].requires_grad());
  CudaGraph several(fused_,
                    [&](const Tensors& batch) {
                      return Tensors{batch[0], at::Tensor()};
                    },
                    {.enabled = false});
  EXPECT_FALSE(several({parameter_})[1].defined());
}

TEST_F(OneParameter, RunsEagerlyOnAnyBatchWhenDisabled) {
  torch::optim::SGD ordinary({parameter_}, 0.1);
  int calls = 0;
  CudaGraph graph(ordinary,
                  [&](const Tensors& batch) {
                    ++calls;
                    return batch[0].sum();
                  },
                  {.enabled = false});
  EXPECT_EQ(graph({torch::ones({2})})[0].item<double>(), 2.);
  EXPECT_EQ(graph({torch::ones({3})})[0].item<double>(), 3.);
  EXPECT_EQ(calls, 2);
  EXPECT_FALSE(graph.is_captured());
}

TEST_F(OneParameter, TakesAnotherShapeAfterReset) {
  CudaGraph graph =
      graph_of([](const Tensors& batch) -> Tensors { return {batch[0].sum()}; }, {.warmup = 1});
  for (int i = 0; i < 3; ++i) graph({torch::ones({2})});
  graph.reset();
  EXPECT_FALSE(graph.is_captured());
  EXPECT_EQ(graph({torch::ones({3})})[0].item<double>(), 3.);
  EXPECT_EQ(graph({torch::ones({3})})[0].item<double>(), 3.);
  EXPECT_EQ(log_.records, 2);
}

TEST_F(OneParameter, DropsCastsThatWereMadeBeforeTheCaptureAndInIt) {
  const at::Tensor weight = torch::ones({2, 2}, torch::requires_grad());
  at::Tensor cast, later;
  CudaGraph graph = graph_of([&](const Tensors& batch) { return step(batch); }, {.warmup = 1});
  const torchamp::AutocastGuard outside(at::kCPU);
  graph({torch::ones({2})});
  cast = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
  EXPECT_TRUE(cast.is_same(at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU)));
  graph({torch::ones({2})});
  later = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
  EXPECT_FALSE(cast.is_same(later));
}

/// A ScaledStep that knows nothing of captures.
class Plain : public torch::optim::SGD, public torchamp::ScaledStep {
 public:
  using SGD::SGD;
  at::Tensor step_scaled(const at::Tensor&, const at::Tensor&) override { return step(); }
};

TEST_F(OneParameter, CapturesAnewWhenALearningRateChanged) {
  Plain optimizer({parameter_}, 0.5);
  CudaGraph graph(
      {optimizer},
      [&](const Tensors& batch) -> Tensors {
        parameter_.mutable_grad() = batch[0].clone();
        optimizer.step_scaled({}, {});
        return {};
      },
      {.warmup = 1}, repeating(log_));
  for (int i = 0; i < 3; ++i) graph({torch::ones({2})});
  EXPECT_EQ(log_.records, 1);
  static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).lr(2.);
  for (int i = 0; i < 3; ++i) graph({torch::ones({2})});
  EXPECT_EQ(log_.records, 2);
  EXPECT_EQ(log_.runs, 2);
  expect_close(parameter_, torch::full({2}, -3 * 0.5 - 3 * 2.));
}

// ---- The same as eagerly
// ---------------------------------------------------------------------------

class OnDevice : public ::testing::TestWithParam<at::DeviceType> {};
INSTANTIATE_TEST_SUITE_P(CudaGraph, OnDevice, all_devices(), device_name);

TEST_P(OnDevice, AgreesWithTheEagerRunStepByStep) {
  SKIP_WITHOUT(GetParam());
  for (const char* kind : {"adam", "adamw", "sgd"}) {
    SCOPED_TRACE(kind);
    Training eager(GetParam(), kind), captured(GetParam(), kind);
    Repeater::Log log;
    const auto graph = graph_of_steps(captured, log);
    for (int i = 0; i < 24; ++i) {
      SCOPED_TRACE(i);
      const at::Tensor expected = eager.step(eager.batch(i));
      const at::Tensor actual = (*graph)(captured.batch(i))[0];
      expect_close(actual, expected);
      expect_equal_training(captured, eager);
    }
    EXPECT_TRUE(graph->is_captured());
    EXPECT_EQ(captured.calls, GetParam() == at::kCUDA ? 4 : 24);
  }
}

TEST_P(OnDevice, FollowsAScaleSetByHand) {
  SKIP_WITHOUT(GetParam());
  Training eager(GetParam()), captured(GetParam());
  Repeater::Log log;
  const auto graph = graph_of_steps(captured, log);
  for (int i = 0; i < 12; ++i) {
    if (i == 6) {
      eager.scaler.update(64.);
      captured.scaler.update(64.);
    }
    eager.step(eager.batch(i));
    (*graph)(captured.batch(i));
    expect_equal_training(captured, eager);
  }
}

TEST_P(OnDevice, FollowsALearningRateThatChangesAtEveryStep) {
  SKIP_WITHOUT(GetParam());
  for (const char* kind : {"adam", "sgd"}) {
    SCOPED_TRACE(kind);
    Training eager(GetParam(), kind), captured(GetParam(), kind);
    Repeater::Log log;
    const auto graph = graph_of_steps(captured, log);
    for (int i = 0; i < 12; ++i) {
      for (Training* training : {&eager, &captured}) {
        training->optimizer->param_groups()[0].options().set_lr(0.01 / (1 + i));
      }
      eager.step(eager.batch(i));
      (*graph)(captured.batch(i));
      expect_equal_training(captured, eager);
    }
  }
}

TEST_P(OnDevice, GoesOnFromAnOptimizerStateThatWasLoaded) {
  SKIP_WITHOUT(GetParam());
  Training eager(GetParam()), captured(GetParam());
  Repeater::Log log;
  const auto graph = graph_of_steps(captured, log);
  std::stringstream saved;
  for (int i = 0; i < 16; ++i) {
    if (i == 5 || i == 10) {
      // What is saved in the middle of replays counts them.
      std::stringstream eager_saved, captured_saved;
      torch::save(*eager.optimizer, eager_saved);
      torch::save(*captured.optimizer, captured_saved);
      if (i == 5) saved << eager_saved.str();
      torchamp::FusedAdam read(captured.net->parameters());
      torch::load(read, captured_saved);
      const auto& expected = static_cast<const torch::optim::AdamParamState&>(
          *static_cast<torchamp::FusedAdam&>(*eager.optimizer).state().begin()->second);
      const auto& actual =
          static_cast<const torch::optim::AdamParamState&>(*read.state().begin()->second);
      EXPECT_EQ(actual.step(), expected.step());
    }
    if (i == 12) {
      for (Training* training : {&eager, &captured}) {
        std::stringstream again(saved.str());
        torch::load(*training->optimizer, again);
      }
    }
    eager.step(eager.batch(i));
    (*graph)(captured.batch(i));
    expect_equal_training(captured, eager);
  }
}

TEST_P(OnDevice, HoldsAWholeWindowOfAccumulation) {
  SKIP_WITHOUT(GetParam());
  Training eager(GetParam()), captured(GetParam());
  const auto window = [](Training& training, const Tensors& batches) {
    training.optimizer->zero_grad();
    at::Tensor sum;
    for (std::size_t i = 0; i < batches.size(); i += 2) {
      at::Tensor loss;
      {
        const torchamp::AutocastGuard autocast(training.device.type());
        loss = torch::mse_loss(training.net->forward(batches[i]), batches[i + 1]) / 2;
      }
      training.scaler.scale(loss).backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    training.scaler.step(*training.optimizer);
    training.scaler.update();
    return sum;
  };
  Repeater::Log log;
  const auto graph = make_graph(
      GetParam(), *captured.optimizer,
      [&](const Tensors& batches) { return window(captured, batches); }, log);
  for (int i = 0; i < 8; ++i) {
    Tensors batches = eager.batch(i);
    for (const at::Tensor& tensor : eager.batch(i + 1)) batches.push_back(tensor);
    const at::Tensor expected = window(eager, batches);
    expect_close((*graph)(batches)[0], expected);
    expect_equal_training(captured, eager);
  }
}

TEST_P(OnDevice, HoldsSeveralOptimizers) {
  SKIP_WITHOUT(GetParam());
  Training eager(GetParam()), captured(GetParam());
  const auto split = [](Training& training) {
    const auto parameters = training.net->parameters();
    return std::pair(std::make_unique<torchamp::FusedSGD>(
                         std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 2),
                         torch::optim::SGDOptions(0.1)),
                     std::make_unique<torchamp::FusedAdam>(
                         std::vector<at::Tensor>(parameters.begin() + 2, parameters.end())));
  };
  const auto step = [](Training& training, auto& optimizers, const Tensors& batch) {
    at::Tensor loss;
    {
      const torchamp::AutocastGuard autocast(training.device.type());
      loss = torch::mse_loss(training.net->forward(batch[0]), batch[1]);
    }
    training.net->zero_grad();
    training.scaler.scale(loss).backward();
    training.scaler.step(*optimizers.first);
    training.scaler.step(*optimizers.second);
    training.scaler.update();
    return loss;
  };
  auto eager_optimizers = split(eager), captured_optimizers = split(captured);
  const auto body = [&](const Tensors& batch) -> Tensors {
    return {step(captured, captured_optimizers, batch)};
  };
  Repeater::Log log;
  std::optional<CudaGraph> graph;
  const CudaGraph::Optimizers both{*captured_optimizers.first, *captured_optimizers.second};
  if (GetParam() == at::kCUDA) {
    graph.emplace(both, body);
  } else {
    graph.emplace(both, body, CudaGraphOptions{}, repeating(log));
  }
  for (int i = 0; i < 10; ++i) {
    step(eager, eager_optimizers, eager.batch(i));
    (*graph)(captured.batch(i));
    expect_equal_training(captured, eager);
  }
}

// ---- On a GPU alone
// --------------------------------------------------------------------------------

TEST(CudaGraphOnCuda, TakesInputsFromTheHost) {
  SKIP_WITHOUT(at::kCUDA);
  Training eager(at::kCUDA), captured(at::kCUDA);
  CudaGraph graph(*captured.optimizer, [&](const Tensors& batch) { return captured.step(batch); });
  for (int i = 0; i < 8; ++i) {
    const Tensors batch = eager.batch(i);
    eager.step(batch);
    graph({batch[0].cpu().pin_memory(), batch[1].cpu()});
    expect_equal_training(captured, eager);
  }
}

TEST(CudaGraphOnCuda, FindsReadsAndCopiesBeforeTheCapture) {
  SKIP_WITHOUT(at::kCUDA);
  Training training(at::kCUDA);
  const auto expect_found = [&](auto access, const char* text) {
    CudaGraph graph(*training.optimizer,
                    [&](const Tensors& batch) {
                      access(batch);
                      return training.step(batch);
                    },
                    {.warmup = 1});
    EXPECT_ERROR(graph(training.batch(0)), text);
    EXPECT_FALSE(graph.is_captured());
  };
  expect_found([](const Tensors& batch) { batch[0].sum().item<float>(); }, "Tensor::item");
  expect_found([](const Tensors& batch) { batch[0].cpu(); }, "from the device to the host");
  expect_found([](const Tensors&) { torch::ones({2}).cuda(); }, "from the host to the device");
  expect_found([](const Tensors& batch) { batch[0].nonzero(); }, "aten::nonzero");
  expect_found([](const Tensors& batch) { batch[0].index({batch[0] > 0}); }, "aten::nonzero");
}

TEST(CudaGraphOnCuda, RecoversFromAnExceptionInTheCapture) {
  SKIP_WITHOUT(at::kCUDA);
  Training eager(at::kCUDA), captured(at::kCUDA);
  bool fails = true;
  CudaGraph graph(*captured.optimizer,
                  [&](const Tensors& batch) {
                    at::Tensor loss = captured.step(batch);
                    if (captured.calls == 3 && std::exchange(fails, false))
                      throw std::runtime_error("mine");
                    return loss;
                  },
                  {.warmup = 2});
  for (int i = 0; i < 10; ++i) {
    if (i == 2) {
      EXPECT_THROW(graph(captured.batch(i)), std::runtime_error);
    }
    eager.step(eager.batch(i));
    graph(captured.batch(i));
    expect_equal_training(captured, eager);
  }
  EXPECT_TRUE(graph.is_captured());
}

TEST(CudaGraphOnCuda, IsRightWithinAGuardThatStaysOpen) {
  SKIP_WITHOUT(at::kCUDA);
  Training eager(at::kCUDA), captured(at::kCUDA);
  CudaGraph graph(*captured.optimizer, [&](const Tensors& batch) { return captured.step(batch); });
  for (int i = 0; i < 10; ++i) eager.step(eager.batch(i));
  const torchamp::AutocastGuard outside(at::kCUDA, {.enabled = false});
  for (int i = 0; i < 10; ++i) graph(captured.batch(i));
  expect_equal_training(captured, eager);
}

TEST(CudaGraphOnCuda, DrawsNewRandomNumbersInEachReplay) {
  SKIP_WITHOUT(at::kCUDA);
  Training training(at::kCUDA);
  CudaGraph graph(*training.optimizer,
                  [&](const Tensors& batch) {
                    training.step(batch);
                    return torch::rand({4}, torch::device(at::kCUDA));
                  },
                  {.warmup = 1});
  graph(training.batch(0));
  const at::Tensor first = graph(training.batch(1))[0].clone();
  const at::Tensor second = graph(training.batch(2))[0].clone();
  EXPECT_FALSE(at::equal(first, second));
}

TEST(CudaGraphOnCuda, GivesItsMemoryBack) {
  SKIP_WITHOUT(at::kCUDA);
  Training training(at::kCUDA);
  for (int i = 0; i < 3; ++i) {
    CudaGraph graph(*training.optimizer, [&](const Tensors& batch) { return training.step(batch); },
                    {.warmup = 1});
    for (int step = 0; step < 4; ++step) graph(training.batch(step));
  }
  Training eager(at::kCUDA);  // the model is whole without its graph
  EXPECT_NO_THROW(training.step(training.batch(0)));
  EXPECT_TRUE(training.net->parameters()[0].isfinite().all().item<bool>());
}

}  // namespace
