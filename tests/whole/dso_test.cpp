// SPDX-License-Identifier: BSD-3-Clause
// A host and a plugin with hidden visibility share one policy and one set of overlays, and the
// plugin may come and go. See Note [One runtime per process].
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "torchamp/autocast.h"
#include "torchamp/autocast_state.h"
#include "whole/dso/plugin.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;

at::ScalarType relu_dtype() {
  return at::ones({2}, at::kHalf).relu().scalar_type();
}

class LoadedPlugin {
 public:
  LoadedPlugin() : handle_(dlopen(TORCHAMP_TEST_PLUGIN, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
    calls_ = reinterpret_cast<GetPlugin>(dlsym(handle_, "torchamp_test_plugin"))();
  }
  LoadedPlugin(const LoadedPlugin&) = delete;
  LoadedPlugin& operator=(const LoadedPlugin&) = delete;
  ~LoadedPlugin() { dlclose(handle_); }

  const Plugin* operator->() const { return &calls_; }

  /// Calls `inside` under the plugin's guard.
  void under_its_guard(const std::function<void()>& inside) const {
    calls_.under_its_guard(
        [](void* argument) { (*static_cast<const std::function<void()>*>(argument))(); },
        const_cast<std::function<void()>*>(&inside));
  }

 private:
  void* handle_;
  Plugin calls_;
};

/// How many kernels of torchamp's lie under the CPU's autocast key of `op`.
int overlays(const char* op, const char* overload) {
  const std::string state =
      c10::Dispatcher::singleton().findSchemaOrThrow(op, overload).dumpState();
  int count = 0;
  for (auto at = state.find("torchamp/detail/overlay/kernel.h"); at != std::string::npos;
       at = state.find("torchamp/detail/overlay/kernel.h", at + 1)) {
    ++count;
  }
  return count;
}

void use_the_host_first() {
  const AutocastGuard guard(at::kCPU);
}
void use_the_plugin_first() {
  const LoadedPlugin plugin;
  plugin.under_its_guard([] {});
}

void expect_one_policy_and_one_set_of_overlays() {
  const LoadedPlugin plugin;
  EXPECT_EQ(plugin->runtime(), &torchamp::detail::shared_runtime());
  {
    const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().fp32({"relu"})});
    EXPECT_EQ(plugin->thread_policy(), torchamp::detail::thread_policy());
    EXPECT_EQ(plugin->relu_dtype(), at::kFloat);
    plugin.under_its_guard([] { EXPECT_EQ(relu_dtype(), at::kFloat); });
  }
  plugin.under_its_guard([&] {
    EXPECT_EQ(plugin->thread_policy(), torchamp::detail::thread_policy());
    EXPECT_EQ(relu_dtype(), at::kFloat);
    const AutocastGuard guard(at::kCPU, {.policy = Policy::torch()});
    EXPECT_EQ(plugin->relu_dtype(), at::kHalf);
  });
  EXPECT_EQ(relu_dtype(), at::kHalf);
  EXPECT_EQ(overlays("aten::relu", ""), 1);
  EXPECT_EQ(overlays("aten::add", "Tensor"), 1);
}

void expect_a_working_process_after_unloading() {
  std::optional<torchamp::AutocastState> from_plugin;
  at::Tensor loss;
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  {
    const LoadedPlugin plugin;
    plugin.under_its_guard([&] {
      from_plugin = torchamp::AutocastState::of_this_thread();
      loss = weight.mm(weight).relu().sum();
    });
  }
  loss.backward();
  EXPECT_TRUE(weight.grad().defined());
  EXPECT_EQ(relu_dtype(), at::kHalf);
  const torchamp::AutocastStateGuard again(*from_plugin);
  EXPECT_EQ(relu_dtype(), at::kFloat) << "a policy made by the plugin outlives it";
}

// The two orders need a process each: tests/CMakeLists.txt runs this program once for either.
TEST(SharedLibraries, ShareOnePolicyAndSurviveUnloading) {
  const char* first = std::getenv("TORCHAMP_TEST_FIRST");
  if (first != nullptr && std::string(first) == "plugin") {
    use_the_plugin_first();
  } else {
    use_the_host_first();
  }
  for (int round = 0; round < 3; ++round) {
    expect_one_policy_and_one_set_of_overlays();
    expect_a_working_process_after_unloading();
  }
}

}  // namespace
