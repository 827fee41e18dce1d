// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/labs/cast_recorder.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/jit.h>
#include <torch/nn/modules.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "support/devices.h"
#include "support/recorder_on.h"
#include "support/skips.h"
#include "torchamp/autocast.h"
#include "torchamp/labs/module_policy.h"

namespace {

namespace nn = torch::nn;
using recorder_on::Calls;
using recorder_on::Recorder;
using recorder_on::row_of;
using torchamp::AutocastGuard;
using torchamp::Cast;
using torchamp::CastRecorder;
using torchamp::Policy;

INSTANTIATE_TEST_SUITE_P(Devices, Recorder, all_devices(), device_name);

TEST_P(Recorder, CountsCallsCastsAndBytesOfAProduct) {
  const auto x = wide({2, 3});
  const auto weight = wide({3, 4}).requires_grad_();
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  (void)x.mm(weight);
  auto row = row_of(recorder, "mm");
  EXPECT_EQ(row.calls, (Calls{{low(), 1}}));
  EXPECT_EQ(row.casts, 2);
  EXPECT_EQ(row.cast_bytes, 2 * 3 * (4 + 2) + 3 * 4 * (4 + 2));
  // The weight's cast is in the cache now.
  (void)x.mm(weight);
  row = row_of(recorder, "mm");
  EXPECT_EQ(row.calls, (Calls{{low(), 2}}));
  EXPECT_EQ(row.casts, 3);
  EXPECT_EQ(row.cast_bytes, 2 * (2 * 3) * 6 + 3 * 4 * 6);
  EXPECT_EQ(recorder.report().rows().size(), 1u) << recorder.report();
}

TEST_P(Recorder, ReportsTheDtypeInWhichAnOpRan) {
  const auto x = narrow({4});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  (void)x.relu();
  (void)x.exp();
  (void)x.sum();
  (void)wide({4}).relu();
  (void)x.argmax();
  (void)x.gt(0);
  (void)x.to(at::kDouble).mul(2);
  EXPECT_EQ(row_of(recorder, "relu").calls, (Calls{{low(), 1}, {at::kFloat, 1}}));
  EXPECT_EQ(row_of(recorder, "exp").calls, (Calls{{at::kFloat, 1}}));
  EXPECT_EQ(row_of(recorder, "exp").casts, 1);
  EXPECT_EQ(row_of(recorder, "exp").cast_bytes, 4 * (2 + 4));
  EXPECT_EQ(row_of(recorder, "sum").calls, (Calls{{at::kFloat, 1}}));
  EXPECT_EQ(row_of(recorder, "sum").casts, 0);
  EXPECT_EQ(row_of(recorder, "argmax").calls, (Calls{{low(), 1}}));
  EXPECT_EQ(row_of(recorder, "gt.Scalar").calls, (Calls{{low(), 1}}));
  EXPECT_EQ(row_of(recorder, "mul.Scalar").calls, (Calls{{at::kDouble, 1}}));
}

TEST_P(Recorder, CountsOneCastForAnAddition) {
  for (const bool inference : {false, true}) {
    const std::optional<c10::InferenceMode> mode(
        inference ? std::optional<c10::InferenceMode>(std::in_place) : std::nullopt);
    const auto x = narrow({4}), y = narrow({4});
    const CastRecorder recorder;
    const AutocastGuard autocast(device());
    (void)(x + y);
    (void)(x + x);
    const auto row = row_of(recorder, "add.Tensor");
    EXPECT_EQ(row.calls, (Calls{{at::kFloat, 2}}));
    EXPECT_EQ(row.casts, 2) << (inference ? "in inference mode" : "");
  }
}

TEST_P(Recorder, LeavesOutWhatComputesNothing) {
  const auto x = narrow({2, 2});
  const CastRecorder recorder;
  (void)x.t().view({2, 2, 1}).unsqueeze(0).detach();
  (void)at::zeros_like(x);
  (void)at::ones({2});
  (void)x.to(low());
  wide({2, 2}).copy_(x);
  (void)x.sum().item<double>();
  ASSERT_EQ(recorder.report().rows().size(), 1u) << recorder.report();
  EXPECT_EQ(recorder.report().rows()[0].op, "sum");
}

TEST_P(Recorder, PutsCastsOfInnerOpsDownToTheOpThatTheProgramCalls) {
  SKIP_WITHOUT_FUSED_RNN_CELLS(GetParam());
  nn::LSTM lstm(3, 2);
  to_device(lstm, device());
  // A CPU without LSTMs in bf16 runs them in fp32, and casts the input instead of the weights.
  const bool in_fp32 = Policy::standard().effect("lstm", device()) == Cast::fp32;
  const auto x = in_fp32 ? narrow({2, 1, 3}) : wide({2, 1, 3});
  const CastRecorder recorder;
  {
    const AutocastGuard autocast(device());
    (void)lstm->forward(x);
  }
  const auto report = recorder.report();
  ASSERT_EQ(row_of(report, "lstm.input").calls.size(), 1u) << report;
  EXPECT_GT(report.total().casts, 0);
  EXPECT_EQ(row_of(report, "lstm.input").casts, report.total().casts) << report;
}

TEST_P(Recorder, CountsTheProgramsOwnCastsApart) {
  const auto x = wide({5});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  const auto y = x.to(low());
  (void)x.to(at::kFloat);
  auto row = row_of(recorder, "to.dtype");
  EXPECT_EQ(row.calls, (Calls{{low(), 1}}));
  EXPECT_EQ(row.casts, 1);
  EXPECT_EQ(row.cast_bytes, 5 * 6);
  EXPECT_EQ(recorder.report().rows().size(), 1u);
}

TEST_P(Recorder, CountsNoConversionThatAKernelMakesItself) {
  const auto x = narrow({4});
  const auto y = wide({4});
  const CastRecorder recorder;
  const AutocastGuard autocast(device(), {.policy = Policy::torch()});
  (void)(x * y);
  EXPECT_EQ(row_of(recorder, "mul.Tensor").calls, (Calls{{at::kFloat, 1}}));
  EXPECT_EQ(recorder.report().total().casts, 0);
}

TEST_P(Recorder, WorksUnderRawAutocastAndWithoutAny) {
  const auto x = wide({2, 2});
  const CastRecorder recorder;
  (void)x.mm(x);
  at::autocast::set_autocast_enabled(device(), true);
  (void)x.mm(x);
  at::autocast::set_autocast_enabled(device(), false);
  at::autocast::clear_cache();
  const auto row = row_of(recorder, "mm");
  EXPECT_EQ(row.calls, (Calls{{at::kFloat, 1}, {low(), 1}}));
  EXPECT_EQ(row.casts, 2);
}

// Modules and backward

TEST_P(Recorder, NamesTheModulesThatOwnTheParameters) {
  nn::Sequential model(nn::Linear(4, 3), nn::ReLU(), nn::Linear(3, 2));
  to_device(model, device());
  const auto x = wide({5, 4});
  const CastRecorder recorder(*model);
  at::Tensor loss;
  {
    const AutocastGuard autocast(device());
    loss = model->forward(x).sum();
  }
  loss.backward();
  const auto report = recorder.report();
  EXPECT_EQ(row_of(report, "addmm", "0").calls, (Calls{{low(), 1}}));
  EXPECT_EQ(row_of(report, "addmm", "0").cast_bytes, (5 * 4 + 4 * 3 + 3) * 6);
  EXPECT_EQ(row_of(report, "addmm", "2").casts, 2);  // its input has 16 bits already
  EXPECT_EQ(row_of(report, "relu").calls, (Calls{{low(), 1}}));
  EXPECT_EQ(row_of(report, "mm", "0", /*backward=*/true).calls, (Calls{{low(), 1}})) << report;
  EXPECT_EQ(row_of(report, "mm", "2", /*backward=*/true).calls, (Calls{{low(), 2}}));
  const auto reverse = row_of(report, "ToCopyBackward0", "0", /*backward=*/true);
  EXPECT_EQ(reverse.calls, (Calls{{at::kFloat, 2}}));
  EXPECT_EQ(reverse.cast_bytes, (4 * 3 + 3) * 6);
}

TEST_P(Recorder, NamesModulesByUserScopesAndModulePolicies) {
  torchamp::WithPolicy<nn::GELU> gelu;
  nn::Sequential model({{"act", nn::GELU()}});
  torchamp::ModulePolicies{{"act", Policy::standard().fp32({"gelu"})}}.apply_to(*model);
  const auto x = narrow({3}).requires_grad_();
  const CastRecorder recorder(*model);
  at::Tensor y;
  {
    const AutocastGuard autocast(device());
    y = model->forward(x);
    RECORD_USER_SCOPE("block");
    y = y.relu().sum() + gelu->forward(x).sum();
  }
  y.backward();
  const auto report = recorder.report();
  EXPECT_EQ(row_of(report, "gelu", "act").calls, (Calls{{at::kFloat, 1}})) << report;
  EXPECT_EQ(row_of(report, "relu", "block").calls, (Calls{{at::kFloat, 1}}));
  EXPECT_EQ(row_of(report, "gelu", "block").calls, (Calls{{low(), 1}}));
  EXPECT_EQ(row_of(report, "gelu_backward", "act", true).calls, (Calls{{at::kFloat, 1}})) << report;
  EXPECT_EQ(row_of(report, "threshold_backward", "block", true).calls, (Calls{{at::kFloat, 1}}));
}

TEST_P(Recorder, NamesTheModuleOfACustomFunctionsBackward) {
  struct Double : torch::autograd::Function<Double> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
      return x * 2;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      return {gradients[0].exp()};
    }
  };
  const auto x = wide({2}).requires_grad_();
  const CastRecorder recorder;
  at::Tensor y;
  {
    RECORD_USER_SCOPE("block");
    y = Double::apply(x);
  }
  y.sum().backward();
  EXPECT_EQ(row_of(recorder, "mul.Scalar", "block").calls, (Calls{{at::kFloat, 1}}));
  EXPECT_EQ(row_of(recorder, "exp", "block", true).calls, (Calls{{at::kFloat, 1}}));
}

TEST_P(Recorder, DistinguishesABackwardUnderAutocast) {
  const auto weight = wide({2, 2}).requires_grad_();
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  weight.mm(weight).pow(2).sum().backward();
  const auto report = recorder.report();
  EXPECT_EQ(row_of(report, "mm").calls, (Calls{{low(), 1}}));
  EXPECT_EQ(row_of(report, "mm", "", true).calls, (Calls{{low(), 2}}));
}

TEST_P(Recorder, CountsTheOpsOfAScript) {
  const auto script = torch::jit::compile("def f(x, y):\n  return torch.relu(torch.mm(x, y))\n");
  const auto x = wide({2, 2});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  (void)script->run_method("f", x, x);
  EXPECT_EQ(row_of(recorder, "mm").calls, (Calls{{low(), 1}})) << recorder.report();
  EXPECT_EQ(row_of(recorder, "mm").casts, 2);
  EXPECT_EQ(row_of(recorder, "relu").calls, (Calls{{low(), 1}}));
}

TEST_P(Recorder, ChangesNoResult) {
  const auto x = at::randn({4, 4}, device()).requires_grad_();
  const auto run = [&] {
    const AutocastGuard autocast(device());
    return (x.mm(x).softmax(-1).mm(x) + x).sum();
  };
  const auto expected = run();
  const CastRecorder recorder;
  EXPECT_TRUE(run().equal(expected));
}

TEST_P(Recorder, LeavesOutOpsThatThrow) {
  const auto x = wide({2, 3});
  const CastRecorder recorder;
  EXPECT_THROW((void)x.mm(x), c10::Error);
  (void)x.relu();
  ASSERT_EQ(recorder.report().rows().size(), 1u);
  EXPECT_EQ(recorder.report().rows()[0].op, "relu");
}

TEST_P(Recorder, KnowsTheModulesInEachBackwardOfAGraphThatIsRetained) {
  nn::Sequential model(nn::Linear(3, 2), nn::Linear(2, 1));
  to_device(model, device());
  const auto x = wide({2, 3});
  const CastRecorder recorder(*model);
  at::Tensor loss;
  {
    const AutocastGuard autocast(device());
    loss = model->forward(x).to(at::kFloat).sum();
  }
  loss.backward({}, /*retain_graph=*/true);
  const auto calls_of = [&](const std::string& module) {
    std::int64_t calls = 0;
    const auto report = recorder.report();
    for (const auto& row : report.rows()) {
      if (!row.backward || row.module != module) continue;
      for (const auto& [dtype, count] : row.calls) calls += count;
    }
    return calls;
  };
  const auto nobodys = calls_of(""), first = calls_of("0"), last = calls_of("1");
  EXPECT_GT(first, 0);
  loss.backward();
  // Two of each module add to the gradients of the first.
  EXPECT_EQ(calls_of("0"), 2 * first + 2) << recorder.report();
  EXPECT_EQ(calls_of("1"), 2 * last + 2) << recorder.report();
  EXPECT_EQ(calls_of(""), 2 * nobodys) << recorder.report();
}

TEST_P(Recorder, KnowsTheModulesOfGradientsThatTheProgramHasReplaced) {
  nn::Sequential model(nn::Linear(3, 2), nn::Linear(2, 1));
  to_device(model, device());
  const auto x = wide({2, 3});
  const CastRecorder recorder(*model);
  const auto step = [&] { model->forward(x).sum().backward(); };
  for (int window = 0; window < 2; ++window) {
    model->zero_grad();
    for (int part = 0; part < 3; ++part) step();
  }
  for (const char* module : {"0", "1"}) {
    const auto row = row_of(recorder, "add_.Tensor", module, /*backward=*/true);
    EXPECT_EQ(row.calls, (Calls{{at::kFloat, 2 * 2 * 2}})) << recorder.report();
  }
  EXPECT_EQ(row_of(recorder, "add_.Tensor", "", /*backward=*/true).calls, Calls{});
}

}  // namespace
