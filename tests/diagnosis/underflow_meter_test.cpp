// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/labs/underflow_meter.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/seed.h"
#include "torchamp/autocast.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/recompute.h"

namespace {

namespace nn = torch::nn;
using torchamp::AutocastGuard;
using torchamp::GradScaler;
using torchamp::UnderflowMeter;
using torchamp::UnderflowReport;
using torchamp::UnderflowRow;

/// The row of a module's gradients; one without any numbers if there is none.
UnderflowRow row_of(const UnderflowReport& report, const std::string& module, bool of_weights) {
  for (const UnderflowRow& row : report.rows) {
    if (row.module == module && row.of_weights == of_weights) return row;
  }
  return {};
}

/// Two layers with a dropout between, of which the second can be made to lose gradients.
struct NetImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::dropout(first(x).relu(), 0.5, is_training()));
  }
  nn::Linear first = register_module("first", nn::Linear(8, 16));
  nn::Linear last = register_module("last", nn::Linear(16, 4));
};
TORCH_MODULE(Net);

class Meter : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(device());
    torch::manual_seed(0);
  }

  at::DeviceType device() const { return GetParam(); }
  Net net() const {
    Net model;
    (void)to_device(model, device());
    return model;
  }
  at::Tensor randn(at::IntArrayRef sizes) const { return torch::randn(sizes).to(device()); }
  /// As far as a forward goes under a guard.
  at::Tensor in_half(const std::function<at::Tensor()>& forward) const {
    const AutocastGuard autocast(device(), at::kHalf);
    return forward();
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Meter, all_devices(), device_name);

}  // namespace

TEST_P(Meter, CountsPlantedUnderflowToTheElement) {
  Net model = net();
  nn::Linear layer = model->last;
  {
    const at::NoGradGuard no_grad;
    layer->weight.fill_(0.01);
    layer->weight.narrow(1, 0, 3).fill_(0x1p-24);  // too small for gradients of inputs
  }
  at::Tensor x = torch::ones({50, 16}) * 0.01;
  x.narrow(1, 14, 1).fill_(0.);       // no gradient in fp32 either
  x.narrow(1, 15, 1).fill_(0x1p-24);  // too small for gradients of weights
  x = x.to(device()).to(at::kHalf).requires_grad_();
  at::Tensor size = torch::ones({50, 4}) * 0x1p-10;
  size.flatten().narrow(0, 0, 7).fill_(0x1p-40);  // of one row and most of another
  size = size.to(device());
  UnderflowMeter meter(*model);
  {
    const auto metered = meter.step();
    EXPECT_TRUE(metered.is_metered());
    const at::Tensor y = in_half([&] { return layer(x.relu()); });
    (y.to(at::kFloat) * size).sum().backward();
  }
  const UnderflowReport report = meter.report();
  std::ostringstream text;
  text << report;
  SCOPED_TRACE(text.str());
  const UnderflowRow rest = row_of(report, "", false);
  EXPECT_EQ(rest.elements, 50 * 4);
  EXPECT_EQ(rest.lost, 7) << "by the cast of the loss's gradient to fp16";
  const UnderflowRow inputs = row_of(report, "last", false);
  EXPECT_EQ(inputs.elements, 50 * 16);
  EXPECT_EQ(inputs.lost, 49 * 3) << "in the first row fp32 has nothing from the same inputs";
  const UnderflowRow weights = row_of(report, "last", true);
  EXPECT_EQ(weights.elements, 4 * 16 + 4);
  EXPECT_EQ(weights.lost, 4);
  ASSERT_EQ(report.steps.size(), 1U);
  EXPECT_EQ(report.steps[0].elements, report.total().elements);
  EXPECT_EQ(report.steps[0].lost, 7 + 49 * 3 + 4);
}

TEST_P(Meter, CountsWhatTheScaledLossLosesWithItsScale) {
  Net model = net();
  model->eval();
  const at::Tensor x = randn({32, 8});
  GradScaler scaler({.init_scale = 1.});
  UnderflowMeter meter(*model, {.every = 1});
  for (const double scale : {1., 65536.}) {
    if (scale != 1.) scaler.update(scale);
    const auto metered = meter.step(scaler);
    const at::Tensor y = in_half([&] { return model(x); });
    scaler.scale(y.to(at::kFloat).square().mean() * 1e-5).backward();
  }
  const UnderflowReport report = meter.report();
  ASSERT_EQ(report.steps.size(), 2U);
  EXPECT_EQ(report.steps[0].scale, 1.);
  EXPECT_EQ(report.steps[1].scale, 65536.);
  EXPECT_GT(report.steps[0].share(), 0.1);
  EXPECT_LT(report.steps[1].share(), report.steps[0].share() / 10.);
  std::ostringstream text;
  text << report;
  EXPECT_NE(text.str().find("2 of 2 steps metered"), std::string::npos) << text.str();
  EXPECT_NE(text.str().find("65536"), std::string::npos) << text.str();
}

TEST_P(Meter, MetersTheFirstStepAndEachThatIsSoManyLater) {
  Net model = net();
  const at::Tensor x = randn({4, 8});
  UnderflowMeter meter(*model, {.every = 3});
  for (int step = 0; step < 8; ++step) {
    const auto metered = meter.step();
    EXPECT_EQ(metered.is_metered(), step % 3 == 0) << step;
    EXPECT_EQ(at::hasCallbacks(), step % 3 == 0) << step;
    in_half([&] { return model(x); }).sum().backward();
  }
  EXPECT_FALSE(at::hasCallbacks());
  const UnderflowReport report = meter.report();
  EXPECT_EQ(report.steps_in_all, 8);
  ASSERT_EQ(report.steps.size(), 3U);
  EXPECT_EQ(report.steps[2].step, 6);
  EXPECT_EQ(report.steps[2].elements, report.steps[0].elements);
}

TEST_P(Meter, LeavesGradientsAndRandomNumbersUnchanged) {
  const auto run = [&](bool with_meter) {
    seed_all(0);
    Net model = net();
    const at::Tensor x = randn({16, 8}).requires_grad_();
    UnderflowMeter meter(*model, {.every = with_meter ? 1 : 1000});
    { const auto first = meter.step(); }
    for (int i = 0; i < 2; ++i) {
      const auto metered = meter.step();
      EXPECT_EQ(metered.is_metered(), with_meter);
      // Computed again in backward, with its dropout.
      const at::Tensor y = in_half([&] {
        return torchamp::checkpoint([&](const at::Tensor& input) { return model(input); }, x);
      });
      at::Tensor hooked = y.to(at::kFloat);
      hooked.register_hook([](const at::Tensor& gradient) {
        at::Tensor same = gradient.to(at::kHalf);
        return same.mul_(0.5).to(at::kFloat);  // in place
      });
      hooked.square().mean().backward();
    }
    std::vector<at::Tensor> all{x.grad(), torch::rand({3})};
    for (const at::Tensor& parameter : model->parameters()) all.push_back(parameter.grad());
    return all;
  };
  const auto plain = run(false), metered = run(true);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(at::equal(plain[i], metered[i])) << i;
  }
}

TEST_P(Meter, CountsEachGradientOnceIfItIsAddedViewedOrCopied) {
  Net model = net();
  model->eval();
  const at::Tensor x = randn({4, 8});
  UnderflowMeter meter(*model);
  {
    const auto metered = meter.step();
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const at::Tensor y = in_half([&] { return model(x) + model(x).t().contiguous().t(); });
      y.sum().backward();
    }
  }
  const UnderflowReport report = meter.report();
  EXPECT_EQ(row_of(report, "last", true).elements, 6 * (16 * 4 + 4));
  EXPECT_EQ(row_of(report, "first", true).elements, 6 * (8 * 16 + 16));
  EXPECT_EQ(row_of(report, "last", false).elements, 6 * 4 * 16);
  EXPECT_EQ(row_of(report, "first", false).elements, 0) << "the batch wants none";
}

TEST_P(Meter, MetersModelsIn16BitsAndNothingInFp32) {
  Net model = net();
  model->eval();
  const at::Tensor x = randn({4, 8});
  UnderflowMeter meter(*model, {.every = 1});
  {
    const auto metered = meter.step();
    model(x).sum().backward();
  }
  EXPECT_TRUE(meter.report().rows.empty());
  model->to(at::kBFloat16);
  model->zero_grad();
  {
    const auto metered = meter.step();
    model(x.to(at::kBFloat16)).sum().backward();
  }
  const UnderflowReport report = meter.report();
  EXPECT_EQ(row_of(report, "last", true).elements, 16 * 4 + 4);
  EXPECT_EQ(row_of(report, "last", false).elements, 4 * 16);
  EXPECT_EQ(report.steps.size(), 2U);
}

TEST_P(Meter, KeepsNothingOfAStepThatAnExceptionEnds) {
  Net model = net();
  const at::Tensor x = randn({4, 8});
  UnderflowMeter meter(*model, {.every = 1});
  const auto step = [&](bool throws) {
    const auto metered = meter.step();
    at::Tensor y = in_half([&] { return model(x); });
    y.register_hook([throws](const at::Tensor& gradient) {
      if (throws) throw std::runtime_error("by the program");
      return gradient;
    });
    y.sum().backward();
  };
  EXPECT_THROW(step(true), std::runtime_error);
  EXPECT_FALSE(at::hasCallbacks());
  EXPECT_TRUE(meter.report().rows.empty());
  EXPECT_EQ(meter.report().steps_in_all, 1);
  step(false);
  ASSERT_EQ(meter.report().steps.size(), 1U);
  EXPECT_EQ(meter.report().steps[0].step, 1);
}

TEST(UnderflowMeter, RunsNoOpOfAnotherLibraryTwice) {
  static int calls = 0;
  torch::Library library(torch::Library::DEF, "meter_test", std::nullopt, __FILE__, __LINE__);
  library.def("count(Tensor x) -> Tensor", [](const at::Tensor& x) {
    ++calls;
    return x.clone();
  });
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("meter_test::count", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  Net model;
  UnderflowMeter meter(*model);
  {
    const auto metered = meter.step();
    const AutocastGuard autocast(at::kCPU, at::kHalf);
    const at::Tensor y = model(torch::randn({4, 8}));
    y.register_hook([&](const at::Tensor& gradient) { return op.call(gradient); });
    y.sum().backward();
  }
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(meter.report().total().not_looked_at, 4 * 4);
}

TEST(UnderflowMeter, DetectsWhatAThreadWithTheCallersStateRuns) {
  Net model;
  model->eval();
  UnderflowMeter meter(*model, {.every = 1});
  const auto step = [&] {
    const AutocastGuard autocast(at::kCPU, at::kHalf);
    model(torch::ones({4, 8})).sum().backward();
  };
  {
    const auto metered = meter.step();
    std::thread([state = at::ThreadLocalState(), &step] {
      const at::ThreadLocalStateGuard guard(state);
      step();
    }).join();
  }
  EXPECT_EQ(row_of(meter.report(), "last", true).elements, 16 * 4 + 4);
  {
    const auto metered = meter.step();
    std::thread(step).join();
  }
  EXPECT_EQ(meter.report().steps.at(1).elements, 0);
}

TEST(UnderflowMeter, RefusesWhatItCannotMeter) {
  Net model;
  EXPECT_ERROR(UnderflowMeter(*model, {.every = 0}), "every is 0. It must be 1 or more");
  UnderflowMeter meter(*model);
  {
    const auto metered = meter.step();
    EXPECT_ERROR((void)meter.step(), "the last step has not ended");
  }
  { const auto next = meter.step(); }
  EXPECT_EQ(meter.report().steps_in_all, 2);
}

template <class Meter>
concept can_step = requires(Meter&& meter) {
  std::forward<Meter>(meter).step();
};
static_assert(can_step<UnderflowMeter&> && !can_step<UnderflowMeter>, "nobody could ask it");

TEST(UnderflowMeter, MayGoBeforeItsStepEnds) {
  Net model;
  auto meter = std::make_unique<UnderflowMeter>(*model);
  const auto metered = meter->step();
  meter.reset();
  const AutocastGuard autocast(at::kCPU);
  model(torch::ones({4, 8})).sum().backward();
  EXPECT_TRUE(metered.is_metered());
}

TEST(UnderflowMeter, SaysThatNoSixteenBitGradientWasMade) {
  Net model;
  UnderflowMeter meter(*model);
  const auto printed = [&] {
    std::ostringstream text;
    text << meter.report();
    return text.str();
  };
  EXPECT_EQ(printed(), "0 of 0 steps metered\n");
  {
    const auto metered = meter.step();
    model(torch::ones({4, 8})).sum().backward();
  }
  EXPECT_EQ(printed(),
            "1 of 1 steps metered: no 16-bit gradient was made in them (are forward, under a "
            "guard, and backward within the step?)\nstep  scale  share\n   0      1      -\n");
}

TEST(UnderflowMeter, ReadsNothingOfADeviceUntilItIsAsked) {
  SKIP_WITHOUT(at::kPrivateUse1);
  Net model;
  (void)to_device(model, at::kPrivateUse1);
  const at::Tensor x = torch::ones({4, 8}).to(at::kPrivateUse1);
  GradScaler scaler;
  UnderflowMeter meter(*model, {.every = 2});
  const auto step = [&] {
    const auto metered = meter.step(scaler);
    at::Tensor loss;
    {
      const AutocastGuard autocast(at::kPrivateUse1, at::kHalf);
      loss = model(x).to(at::kFloat).sum();
    }
    scaler.scale(loss).backward();
  };
  step();
  const simulated::Counts counts;
  for (int i = 0; i < 4; ++i) step();
  EXPECT_EQ(counts.now().device_to_host, 0);
  EXPECT_EQ(counts.now().waits, 0);
  const UnderflowReport report = meter.report();
  ASSERT_EQ(report.steps.size(), 3U);
  EXPECT_EQ(report.steps[1].scale, 65536.);
  EXPECT_EQ(counts.now().device_to_host, 2) << "counts and scales";
}

TEST_P(Meter, KnowsTheModulesInEachBackwardOfAGraphThatIsRetained) {
  Net model = net();
  const at::Tensor x = randn({4, 8});
  const auto count = [&](int times) {
    UnderflowMeter meter(*model);
    {
      const auto metered = meter.step();
      const at::Tensor loss = in_half([&] { return model(x); }).to(at::kFloat).sum();
      for (int i = 1; i <= times; ++i) loss.backward({}, /*retain_graph=*/i < times);
    }
    return meter.report();
  };
  const UnderflowReport once = count(1), twice = count(2);
  for (const char* const module : {"", "first", "last"}) {
    for (const bool of_weights : {false, true}) {
      EXPECT_EQ(row_of(twice, module, of_weights).elements,
                2 * row_of(once, module, of_weights).elements)
          << module << of_weights;
    }
  }
  EXPECT_GT(row_of(once, "last", true).elements, 0);
}
