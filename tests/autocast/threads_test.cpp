// SPDX-License-Identifier: BSD-3-Clause
// The threads on which the policy is active: exactly the threads with LibTorch's own autocast
// state.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "support/thread_state.h"
#include "torchamp/autocast.h"
#include "torchamp/autocast_state.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::AutocastState;
using torchamp::AutocastStateGuard;
using torchamp::Policy;

/// What ops make of the thread's state: {mm of fp32, relu of fp16}.
using Dtypes = std::pair<at::ScalarType, at::ScalarType>;
Dtypes dtypes() {
  return {at::ones({2, 2}).mm(at::ones({2, 2})).scalar_type(),
          at::ones({2}, at::kHalf).relu().scalar_type()};
}
const Dtypes without_guard{at::kFloat, at::kHalf};
const Dtypes with_relu_in_fp32{at::kBFloat16, at::kFloat};
Policy relu_in_fp32() {
  return Policy::standard().fp32({"relu"});
}

}  // namespace

// On Windows, a torch::autograd::Function must be of a type with external linkage.
namespace threads_test {

/// Reports what it finds during backward.
struct Probe : torch::autograd::Function<Probe> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            int64_t result) {
    ctx->saved_data["result"] = result;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    *reinterpret_cast<Dtypes*>(ctx->saved_data["result"].toInt()) = dtypes();
    return {grads[0], at::Tensor()};
  }
};

}  // namespace threads_test

namespace {

using threads_test::Probe;

Dtypes during_backward(bool guarded) {
  Dtypes found;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor loss = Probe::apply(x, reinterpret_cast<int64_t>(&found)).sum();
  std::optional<AutocastGuard> guard;
  if (guarded) guard.emplace(at::kCPU, torchamp::AutocastOptions{.policy = relu_in_fp32()});
  loss.backward();
  return found;
}

TEST(Threads, BackwardRunsUnderTheStateOfTheCallerOfBackward) {
  EXPECT_EQ(during_backward(/*guarded=*/true), with_relu_in_fp32);
  EXPECT_EQ(during_backward(/*guarded=*/false), without_guard);
}

TEST(Threads, LaunchedTasksFollowTheLauncher) {
  std::promise<Dtypes> guarded, plain;
  {
    const AutocastGuard guard(at::kCPU, {.policy = relu_in_fp32()});
    at::launch([&] { guarded.set_value(dtypes()); });
    EXPECT_EQ(guarded.get_future().get(), with_relu_in_fp32);
  }
  at::launch([&] { plain.set_value(dtypes()); });
  EXPECT_EQ(plain.get_future().get(), without_guard);
}

TEST(Threads, WrappedFunctionsFollowTheThreadThatWrappedThem) {
  std::function<void()> wrapped;
  Dtypes found;
  {
    const AutocastGuard guard(at::kCPU, {.policy = relu_in_fp32()});
    wrapped = at::wrapPropagateTLSState([&] { found = dtypes(); });
  }
  std::thread(wrapped).join();
  EXPECT_EQ(found, with_relu_in_fp32);
}

TEST(Threads, BareThreadsStartWithoutAutocastAndWithoutPolicy) {
  const AutocastGuard guard(at::kCPU, {.policy = relu_in_fp32()});
  Dtypes found;
  std::thread([&] { found = dtypes(); }).join();
  EXPECT_EQ(found, without_guard);
}

TEST(Threads, RawAutocastOnAnotherThreadFollowsLibTorchsOwnRules) {
  const AutocastGuard guard(at::kCPU, {.policy = relu_in_fp32()});
  Dtypes found;
  std::thread([&] {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    found = dtypes();
  }).join();
  EXPECT_EQ(found, Dtypes(at::kBFloat16, at::kHalf));
}

TEST(Threads, ManyUnderDifferentPoliciesDoNotDisturbEachOther) {
  const std::vector<std::pair<Policy, at::ScalarType>> cases{
      {Policy::standard(), at::kHalf},
      {relu_in_fp32(), at::kFloat},
      {Policy::torch(), at::kHalf},
      {Policy::standard().lower_precision({"relu"}), at::kBFloat16},
  };
  // Kernels are registered before the threads start: see the class comment of AutocastGuard.
  for (const auto& [policy, relu] : cases) const AutocastGuard guard(at::kCPU, {.policy = policy});

  std::atomic<int> failures = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      const ThreadState before;
      for (int i = 0; i < 200; ++i) {
        const auto& [policy, relu] = cases[(t + i) % cases.size()];
        const AutocastGuard guard(at::kCPU, {.policy = policy});
        const at::Tensor weight = at::ones({2, 2}).requires_grad_();
        weight.mm(weight).sum().backward();
        failures += dtypes() != Dtypes(at::kBFloat16, relu) || !weight.grad().defined();
        const AutocastState state = AutocastState::of_this_thread();
        const AutocastGuard off(at::kCPU, {.enabled = false});
        failures += dtypes() != without_guard;
        const AutocastStateGuard again(state);
        failures += dtypes() != Dtypes(at::kBFloat16, relu);
      }
      failures += !(ThreadState() == before);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

}  // namespace
