// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/cast_recorder.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/jit.h>
#include <torch/nn/modules.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/devices.h"
#include "support/expect_error.h"
#include "support/skips.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/module_policy.h"

namespace {

namespace nn = torch::nn;
using torchamp::AutocastGuard;
using torchamp::CastRecorder;
using torchamp::CastReport;
using torchamp::OpCall;
using torchamp::Policy;
using Calls = std::map<at::ScalarType, std::int64_t>;

/// The report's row for an op; one without any counts if there is none.
CastReport::Row row_of(const CastReport& report, const std::string& op,
                       const std::string& module = "", bool backward = false) {
  for (const auto& row : report.rows()) {
    if (row.op == op && row.module == module && row.backward == backward) return row;
  }
  return {};
}
CastReport::Row row_of(const CastRecorder& recorder, const std::string& op,
                       const std::string& module = "", bool backward = false) {
  return row_of(recorder.report(), op, module, backward);
}

class Recorder : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }

  at::DeviceType device() const { return GetParam(); }
  at::ScalarType low() const { return at::autocast::get_autocast_dtype(device()); }
  at::Tensor wide(std::initializer_list<std::int64_t> sizes) const {
    return at::ones(sizes, device());
  }
  at::Tensor narrow(std::initializer_list<std::int64_t> sizes) const {
    return at::ones(sizes, at::dtype(low()).device(device()));
  }
};
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

TEST_P(Recorder, TellsTheDtypeThatAnOpRanIn) {
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
  const auto x = wide({2, 1, 3});
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

// Casts that undo each other

TEST_P(Recorder, SeesACastOfACastsResultBack) {
  const auto x = wide({4});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  const auto y = x.to(low());
  EXPECT_EQ(recorder.report().total().undone, 0);
  (void)y.view({2, 2}).exp();
  EXPECT_EQ(row_of(recorder, "exp").undone, 1);
}

TEST_P(Recorder, SeesACastBackAfterAnOpInFp32) {
  const auto x = narrow({2, 2});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  auto y = x.exp();  // softmax's own kernel casts on accelerators
  EXPECT_EQ(row_of(recorder, "exp").casts, 1);
  y = at::dropout(y, 0.5, /*train=*/true).t() * 0.5;
  (void)y.mm(x);
  EXPECT_EQ(row_of(recorder, "mm").casts, 1);
  EXPECT_EQ(row_of(recorder, "mm").undone, 1);
  EXPECT_EQ(recorder.report().total().undone, 1);
}

TEST_P(Recorder, TakesNoOtherCastsForUndone) {
  const auto x = wide({2, 2});
  const auto y = narrow({2, 2});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  (void)x.mm(x).exp();        // to 16 bits for mm, and its result to fp32
  (void)y.exp().exp().mm(y);  // the second exp wants fp32 itself
  (void)y.softmax(-1).exp();  // stays in fp32
  EXPECT_EQ(recorder.report().total().undone, 0) << recorder.report();
}

// Ops in fp32 because of an input

TEST_P(Recorder, SeesOpsInFp32BecauseOfAnInput) {
  const auto x = narrow({2, 2});
  const auto y = wide({2, 2});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  (void)(x * y);
  (void)(x * y.sum());  // a tensor without dimensions decides nothing
  (void)at::cat({x, y});
  (void)at::cat({x, x});
  (void)at::mse_loss(x, y);  // its rule is fp32
  (void)(x + y);             // and so is that of additions
  (void)at::ones_like(y).mul_(x);
  (void)x.mm(y);
  EXPECT_EQ(row_of(recorder, "mul.Tensor").calls, (Calls{{at::kFloat, 1}, {low(), 1}}));
  EXPECT_EQ(row_of(recorder, "mul.Tensor").fp32_by_input, 1);
  EXPECT_EQ(row_of(recorder, "cat").calls, (Calls{{at::kFloat, 1}, {low(), 1}}));
  EXPECT_EQ(row_of(recorder, "cat").fp32_by_input, 1);
  EXPECT_EQ(recorder.report().total().fp32_by_input, 2) << recorder.report();
}

TEST_P(Recorder, AsksThePolicyWhetherARuleWantedFp32) {
  const auto x = narrow({2});
  const auto y = wide({2});
  const auto count = [&](const Policy& policy, auto call) {
    const CastRecorder recorder;
    const AutocastGuard autocast(device(), {.policy = policy});
    (void)call();
    return recorder.report().total().fp32_by_input;
  };
  const auto add = [&] { return x + y; };
  const auto mul = [&] { return x * y; };
  EXPECT_EQ(count(Policy::standard(), add), 0);
  EXPECT_EQ(count(Policy::torch(), add), 1);
  EXPECT_EQ(count(Policy::standard().promote({"mul"}), mul), 1);
  EXPECT_EQ(count(Policy::standard().fp32({"mul"}), mul), 0);
  const auto when_size = [](std::int64_t size) {
    return torchamp::When{.predicate = [size](const OpCall& call) {
      return (call.argument("self").toTensor() + 0).numel() == size;
    }};
  };
  EXPECT_EQ(count(Policy::standard().fp32({"mul"}, when_size(2)), mul), 0);
  EXPECT_EQ(count(Policy::standard().fp32({"mul"}, when_size(3)), mul), 1);
}

TEST_P(Recorder, LetsAPredicateBeCalledOnceForEachCall) {
  const auto x = narrow({2});
  const auto y = wide({2});
  int calls = 0;
  const torchamp::When counted{.predicate = [&](const OpCall&) { return ++calls % 2 == 1; }};
  const CastRecorder recorder, another;
  const AutocastGuard autocast(device(), {.policy = Policy::torch().promote({"mul"}, counted)});
  (void)(x * y);  // promoted by a rule
  EXPECT_EQ(calls, 1);
  (void)(x * y);  // by type promotion
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(row_of(recorder, "mul.Tensor").fp32_by_input, 2) << recorder.report();
  EXPECT_EQ(row_of(another, "mul.Tensor").fp32_by_input, 2);
}

TEST_P(Recorder, KeepsOutOfAPredicatesWay) {
  const auto x = narrow({2});
  const auto y = wide({2});
  const CastRecorder recorder;
  const torchamp::When when{.predicate = [&](const OpCall& call) {
    EXPECT_TRUE(recorder.report().rows().empty());  // must not wait for itself
    std::thread(at::wrapPropagateTLSState([&] { (void)recorder.report(); })).join();
    return (call.argument("self").toTensor() + 0).numel() == 2;
  }};
  const AutocastGuard autocast(device(), {.policy = Policy::torch().fp32({"mul"}, when)});
  (void)(x * y);
  const auto report = recorder.report();
  ASSERT_EQ(report.rows().size(), 1u) << "the predicate's own ops are not the program's" << report;
  EXPECT_EQ(row_of(report, "mul.Tensor").casts, 1) << report;
  EXPECT_EQ(row_of(report, "mul.Tensor").fp32_by_input, 0) << report;
}

TEST_P(Recorder, TellsAChoiceOfTheInnerOpFromTheOuterOnes) {
  const auto x = narrow({2, 2});
  const auto y = wide({2, 2});
  const torchamp::When always{.predicate = [](const OpCall&) { return true; }};
  const CastRecorder recorder;
  const AutocastGuard autocast(
      device(), {.policy = Policy::torch().unchanged({"mul"}, always).fp32({"addcmul"}, always)});
  RECORD_USER_SCOPE("scope");
  (void)at::addcmul(x, x, y);
  (void)(x * y);
  const auto report = recorder.report();
  EXPECT_EQ(row_of(report, "addcmul", "scope").fp32_by_input, 0) << report;
  EXPECT_EQ(row_of(report, "mul.Tensor", "scope").fp32_by_input, 1) << report;
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

TEST_P(Recorder, TellsABackwardUnderAutocastApart) {
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

// Threads, nesting, lifetime

TEST_P(Recorder, FollowsLibTorchsThreadStateAndNoOtherThread) {
  const auto x = wide({2});
  const CastRecorder recorder;
  std::thread(at::wrapPropagateTLSState([&] { (void)x.relu(); })).join();
  std::thread([&] { (void)x.exp(); }).join();
  EXPECT_EQ(row_of(recorder, "relu").calls, (Calls{{at::kFloat, 1}}));
  EXPECT_EQ(recorder.report().rows().size(), 1u);
}

TEST_P(Recorder, CountsOnSeveralThreadsAtOnce) {
  const auto x = narrow({8});
  const CastRecorder recorder;
  const AutocastGuard autocast(device());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back(at::wrapPropagateTLSState([&] {
      for (int step = 0; step < 50; ++step) (void)x.exp();
    }));
  }
  for (int step = 0; step < 50; ++step) (void)recorder.report();
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(row_of(recorder, "exp").calls, (Calls{{at::kFloat, 200}}));
  EXPECT_EQ(row_of(recorder, "exp").casts, 200);
}

TEST_P(Recorder, RecordsFromItsConstructionToItsDestruction) {
  const auto x = wide({2});
  ASSERT_FALSE(at::hasCallbacks());
  {
    const CastRecorder outer;
    (void)x.relu();
    {
      const CastRecorder inner;
      (void)x.relu();
      EXPECT_EQ(row_of(inner, "relu").calls, (Calls{{at::kFloat, 1}}));
    }
    (void)x.relu();
    EXPECT_EQ(row_of(outer, "relu").calls, (Calls{{at::kFloat, 3}}));
  }
  EXPECT_FALSE(at::hasCallbacks());
  std::optional<CastRecorder> ended(std::in_place);
  RECORD_USER_SCOPE("outlives the recorder");
  ended.reset();
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

TEST(RecorderErrors, RefusesMoreThan32AtOnce) {
  std::vector<std::unique_ptr<std::optional<CastRecorder>>> recorders;
  for (int i = 0; i < 32; ++i) {
    recorders.push_back(std::make_unique<std::optional<CastRecorder>>(std::in_place));
  }
  EXPECT_ERROR((void)CastRecorder(), "CastRecorder: 32 are recording at once already.");
  recorders.pop_back();
  EXPECT_NO_THROW((void)CastRecorder());
  recorders.clear();
  EXPECT_FALSE(at::hasCallbacks());
}

/// How many calls a recorder has counted.
int64_t calls(const CastRecorder& recorder) {
  int64_t sum = 0;
  for (const auto& [dtype, count] : recorder.report().total().calls) sum += count;
  return sum;
}

TEST(RecorderErrors, ARecorderDestroyedOnAnotherThreadFeedsNoLaterOne) {
  const CollectedWarnings warnings;
  const auto x = at::ones({2});
  std::thread([&] {
    std::optional<CastRecorder> first(std::in_place), later;
    std::thread([&] { first.reset(); }).join();
    std::thread elsewhere([&] {
      later.emplace();
      std::thread([&] { (void)x.relu(); }).join();
      (void)x.relu();
    });
    elsewhere.join();
    (void)x.relu();  // on the first one's thread
    EXPECT_EQ(calls(*later), 1);
    const CastRecorder own;  // with the callback that the first one has left behind, or without
    (void)x.relu();
    EXPECT_EQ(calls(own), 1);
    EXPECT_EQ(calls(*later), 1);
  }).join();
}

TEST(RecorderErrors, AStateFromUnderARecorderThatHasEndedFeedsNoLaterOne) {
  const auto x = at::ones({2});
  std::optional<CastRecorder> first(std::in_place);
  const at::ThreadLocalState before;
  first.reset();
  const CastRecorder later;
  {
    const at::ThreadLocalStateGuard guard(before);
    (void)x.relu();
    const CastRecorder within;
    (void)x.relu();
    EXPECT_EQ(calls(within), 1);
  }
  EXPECT_EQ(calls(later), 0);
  (void)x.relu();
  EXPECT_EQ(calls(later), 1);
}

TEST(RecorderErrors, WarnsOfDestructionOnAnotherThread) {
  const CollectedWarnings warnings;
  std::optional<CastRecorder> recorder;
  std::thread([&] { recorder.emplace(); }).join();
  recorder.reset();
  EXPECT_THAT(warnings.text(), ::testing::HasSubstr("~CastRecorder: destroyed by another thread"));
}

}  // namespace
