// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/logging.h>
#include <torch/script.h>

#include <sstream>
#include <thread>
#include <tuple>
#include <vector>

#include "torchamp/autocast.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;

constexpr const char* source = R"(
def forward(self, x, w, y):
    product = torch.mm(x, w)
    total = y + y
    probability = torch.softmax(y, 0)
    activation = torch.relu(y)
    exponential = torch.exp(y)
    return product, total, probability, activation, exponential
)";

torch::jit::Module compiled() {
  torch::jit::Module module("Module");
  module.define(source);
  return module;
}

torch::jit::Module loaded() {
  std::stringstream file;
  compiled().save(file);
  return torch::jit::load(file);
}

struct Inputs {
  at::Tensor x = at::linspace(-1, 1, 6).view({2, 3});
  at::Tensor w = at::linspace(-1, 2, 6).view({3, 2}).requires_grad_();
  at::Tensor y = at::linspace(-2, 2, 4).to(at::kBFloat16);
};

std::vector<at::Tensor> eager(const Inputs& in) {
  return {in.x.mm(in.w), in.y + in.y, in.y.softmax(0), in.y.relu(), in.y.exp()};
}

std::vector<at::Tensor> scripted(torch::jit::Module& module, const Inputs& in) {
  std::vector<at::Tensor> results;
  const auto tuple = module.forward({in.x, in.w, in.y}).toTuple();
  for (const auto& result : tuple->elements()) results.push_back(result.toTensor());
  return results;
}

/// Often enough for the profiling executor to have swapped in its optimised graph.
constexpr int runs = 4;

void expect_scripted_equals_eager(torch::jit::Module& module) {
  for (int run = 0; run < runs; ++run) {
    Inputs for_eager, for_script;
    const auto expected = eager(for_eager);
    const auto actual = scripted(module, for_script);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type())
          << "result " << i << ", run " << run;
      EXPECT_TRUE(at::equal(actual[i], expected[i])) << "result " << i << ", run " << run;
    }
    expected[0].sum().backward();
    actual[0].sum().backward();
    EXPECT_TRUE(at::equal(for_script.w.grad(), for_eager.w.grad())) << "run " << run;
  }
}

const std::vector<Policy>& policies() {
  static const std::vector<Policy> all{
      Policy::standard(), Policy::torch(),
      Policy::standard().lower_precision({"add", "softmax"}).fp32({"mm", "relu"})};
  return all;
}

TEST(TorchScript, FollowsTheGuardAndThePolicyForwardAndBackward) {
  for (torch::jit::Module module : {compiled(), loaded()}) {
    for (const Policy& policy : policies()) {
      for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
        const AutocastGuard guard(at::kCPU, {.dtype = dtype, .policy = policy});
        expect_scripted_equals_eager(module);
      }
    }
  }
}

TEST(TorchScript, FollowsThePolicyWhicheverStateItFirstRanIn) {
  for (std::size_t first = 0; first < policies().size() + 2; ++first) {
    torch::jit::Module module = compiled();
    if (first < policies().size()) {
      const AutocastGuard guard(at::kCPU, {.policy = policies()[first]});
      for (int run = 0; run < runs; ++run) (void)scripted(module, Inputs());
    } else {  // without autocast, and under at::autocast alone
      at::autocast::set_autocast_enabled(at::kCPU, first == policies().size());
      for (int run = 0; run < runs; ++run) (void)scripted(module, Inputs());
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
    for (const Policy& policy : policies()) {
      const AutocastGuard guard(at::kCPU, {.policy = policy});
      expect_scripted_equals_eager(module);
    }
    expect_scripted_equals_eager(module);
  }
}

// What torch.jit.trace makes of a conv2d. LibTorch's autocast has no kernel for it on a CPU.
TEST(TorchScript, CastsATracedConvolutionUnderTheStandardPolicyAndUnderAnEdit) {
  torch::jit::Module module("Module");
  module.define(R"(
def forward(self, x, w):
    return torch._convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
                              False, False, True, True)
)");
  const at::Tensor x = at::linspace(-1, 1, 48).view({1, 3, 4, 4});
  const at::Tensor w = at::linspace(-1, 2, 54).view({2, 3, 3, 3}).requires_grad_();
  const auto under = [&](const Policy& policy, bool eager) {
    const AutocastGuard guard(at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
    return eager ? at::conv2d(x, w, {}, 1, 1) : module.forward({x, w}).toTensor();
  };
  for (const Policy& policy :
       {Policy::standard(), Policy::torch().lower_precision({"_convolution"})}) {
    for (int run = 0; run < runs; ++run) {
      EXPECT_TRUE(under(policy, /*eager=*/false).equal(under(policy, /*eager=*/true)));
    }
  }
  EXPECT_EQ(under(Policy::torch(), /*eager=*/true).scalar_type(), at::kBFloat16);
  EXPECT_EQ(under(Policy::torch(), /*eager=*/false).scalar_type(), at::kFloat);
}

at::Tensor product_of_weight(const at::Tensor& x, const at::Tensor& w) {
  return x.matmul(w).relu() + 1;
}

TEST(TorchScript, TheBackwardOutsideTheGuardHasTheCastsOfTheForward) {
  torch::jit::Module module("Module");
  module.define("def forward(self, x, w):\n    return torch.relu(torch.matmul(x, w)) + 1\n");
  const Inputs in;
  for (const bool autocast : {false, true, false, true}) {
    for (int run = 0; run < runs; ++run) {
      at::Tensor eager, scripted;
      {
        AutocastGuard guard(at::kCPU, {.enabled = autocast});
        eager = product_of_weight(in.x, in.w);
        scripted = module.forward({in.x, in.w}).toTensor();
      }
      const auto expected = torch::autograd::grad({eager.sum()}, {in.w});
      const auto gradient = torch::autograd::grad({scripted.sum()}, {in.w});
      EXPECT_TRUE(torch::equal(gradient[0], expected[0])) << "autocast " << autocast;
    }
  }
}

/// Whether the JIT may optimise a script that the calling thread runs now.
bool is_optimized() {
  torch::jit::Module module("Module");
  module.define("def forward(self, x):\n    return torch.relu(x)\n");
  module.forward({at::ones({2})});
  return torch::jit::getGraphExecutorOptimize();
}

TEST(TorchScript, TheJitOptimizesAgainAfterTheGuardAndOnOtherThreads) {
  ASSERT_TRUE(is_optimized());
  {
    AutocastGuard outer(at::kCPU);
    AutocastGuard inner(at::kCPU, {.policy = Policy::torch()});
    EXPECT_FALSE(is_optimized());
    std::thread([] { EXPECT_TRUE(is_optimized()); }).join();
    {
      const AutocastGuard off(at::kCPU, {.enabled = false});
      EXPECT_TRUE(is_optimized());
    }
    EXPECT_FALSE(is_optimized());
  }
  EXPECT_TRUE(torch::jit::getGraphExecutorOptimize());
  const AutocastGuard off(at::kCPU, {.enabled = false});
  EXPECT_TRUE(is_optimized());
}

TEST(TorchScript, AGuardSetsTheJitsSwitchOnlyIfAScriptRuns) {
  const AutocastGuard guard(at::kCPU);
  EXPECT_TRUE(torch::jit::getGraphExecutorOptimize()) << "see Note [Derivatives of scripts]";
  EXPECT_FALSE(is_optimized());
}

TEST(TorchScript, WhatTheProgramHasSwitchedOffStaysOff) {
  torch::jit::setGraphExecutorOptimize(false);
  {
    const AutocastGuard outer(at::kCPU);
    EXPECT_FALSE(is_optimized());
    const AutocastGuard off(at::kCPU, {.enabled = false});
    EXPECT_FALSE(is_optimized());
  }
  EXPECT_FALSE(is_optimized());
  torch::jit::setGraphExecutorOptimize(true);
}

/// Under a policy that the calling thread took over, and with the JIT's switch as given.
void expect_guards_leave_the_switch(bool optimize) {
  torch::jit::setGraphExecutorOptimize(optimize);
  for (const bool enabled : {false, true}) {
    for (const Policy& policy : policies()) {
      {
        const AutocastGuard guard(at::kCPU, {.enabled = enabled, .policy = policy});
        EXPECT_EQ(is_optimized(), optimize && !enabled);
        const AutocastGuard off(at::kCPU, {.enabled = false});
        EXPECT_EQ(is_optimized(), optimize);
      }
      EXPECT_EQ(is_optimized(), optimize) << "after a guard, enabled " << enabled;
    }
  }
}

TEST(TorchScript, GuardsHoldUnderAPolicyThatTheThreadTookOverAndLeaveTheSwitchUnchanged) {
  const AutocastGuard guard(at::kCPU);
  const at::ThreadLocalState state;
  for (const bool optimize : {false, true}) {
    std::thread([&] {
      const at::ThreadLocalStateGuard taken_over(state);
      expect_guards_leave_the_switch(optimize);
    }).join();
  }
}

TEST(TorchScript, FollowsThePolicyWithALoggerOfTheProgram) {
  namespace logging = torch::jit::logging;
  torch::jit::Module module = compiled();
  logging::LockingLogger of_the_program;
  { const AutocastGuard before(at::kCPU); }
  logging::LoggerBase* const ours = logging::setLogger(&of_the_program);
  {
    const AutocastGuard guard(at::kCPU);
    expect_scripted_equals_eager(module);
    EXPECT_EQ(logging::getLogger(), &of_the_program);
  }
  EXPECT_TRUE(torch::jit::getGraphExecutorOptimize());
  EXPECT_GE(of_the_program.getCounterValue(logging::runtime_counters::GRAPH_EXECUTOR_INVOCATIONS),
            runs);
  EXPECT_EQ(logging::setLogger(ours), &of_the_program);
  const AutocastGuard guard(at::kCPU);
  expect_scripted_equals_eager(module);
}

TEST(TorchScript, OutsideGuardsTheJitsOwnCastsStay) {
  const auto under_raw_autocast = [](torch::jit::Module& module) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    std::vector<at::ScalarType> dtypes;
    for (int run = 0; run < runs; ++run) {
      for (const auto& result : scripted(module, Inputs())) dtypes.push_back(result.scalar_type());
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return dtypes;
  };
  // The JIT's lists put y + y and exp(y) in fp32; the dispatcher's CPU list leaves them in bf16.
  std::vector<at::ScalarType> expected;
  for (int run = 0; run < runs; ++run) {
    for (const auto dtype : {at::kBFloat16, at::kFloat, at::kBFloat16, at::kBFloat16, at::kFloat}) {
      expected.push_back(dtype);
    }
  }
  torch::jit::Module module = compiled();
  EXPECT_EQ(under_raw_autocast(module), expected);
  {
    const AutocastGuard guard(at::kCPU);
    expect_scripted_equals_eager(module);
  }
  EXPECT_EQ(under_raw_autocast(module), expected);
}

}  // namespace
