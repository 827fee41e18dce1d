// SPDX-License-Identifier: BSD-3-Clause
// A host and a plugin with hidden visibility share one policy and one set of autocast kernels, and
// the plugin may come and go, also if it was built against another version of torchamp. See
// Note [One runtime per process] and .github/CONTRIBUTING.md, Two versions in one process.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <typeinfo>

#include "internals/dso/plugin.h"
#include "torchamp/autocast.h"
#include "torchamp/autocast_state.h"
#include "torchamp/cpu_products.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/weights/derived.h"
#include "torchamp/version.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;

at::ScalarType relu_dtype() {
  return at::ones({2}, at::kHalf).relu().scalar_type();
}

class LoadedPlugin {
 public:
  explicit LoadedPlugin(const std::string& path)
      : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
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

/// The number of torchamp's kernels of `op`, under all dispatch keys.
int kernels(const char* op, const char* overload) {
  const std::string state =
      c10::Dispatcher::singleton().findSchemaOrThrow(op, overload).dumpState();
  int count = 0;
  for (auto at = state.find("torchamp kernel"); at != std::string::npos;
       at = state.find("torchamp kernel", at + 1)) {
    ++count;
  }
  return count;
}

// What the host is built against, and plugins of this version, of another version with the same
// layout, and of another version with another layout.
const std::string host_version = std::to_string(TORCHAMP_VERSION_MAJOR) + '.' +
                                 std::to_string(TORCHAMP_VERSION_MINOR) + '.' +
                                 std::to_string(TORCHAMP_VERSION_PATCH);
const std::string same_version = TORCHAMP_TEST_PLUGINS "/libdso_plugin.so";
const std::string other_version = TORCHAMP_TEST_PLUGINS "/libdso_plugin_other_version.so";
const std::string other_layout = TORCHAMP_TEST_PLUGINS "/libdso_plugin_other_layout.so";

// Which part of the process is the first to use torchamp: each order needs a separate process, and
// tests/CMakeLists.txt runs this program once for each.
std::string first_user() {
  const char* const first = std::getenv("TORCHAMP_TEST_FIRST");
  return first == nullptr ? "host" : first;
}

class SharedLibraries : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string first = first_user();
    if (first == "host") {
      const AutocastGuard guard(at::kCPU);
    } else {
      const LoadedPlugin plugin(TORCHAMP_TEST_PLUGINS "/lib" + first + ".so");
      EXPECT_EQ(plugin->error_of_a_guard(), "");
    }
  }
};

void expect_one_policy_and_one_set_of_kernels(const std::string& path) {
  const LoadedPlugin plugin(path);
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
  EXPECT_EQ(kernels("aten::relu", ""), 1);
  EXPECT_EQ(kernels("aten::add", "Tensor"), 1);
}

void expect_a_working_process_after_unloading(const std::string& path) {
  std::optional<torchamp::AutocastState> from_plugin;
  at::Tensor loss;
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  {
    const LoadedPlugin plugin(path);
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

TEST_F(SharedLibraries, ShareOnePolicyAndSurviveUnloading) {
  if (first_user() == "dso_plugin_other_layout") GTEST_SKIP() << "the host cannot make a guard";
  for (int round = 0; round < 3; ++round) {
    for (const std::string& path : {same_version, other_version}) {
      expect_one_policy_and_one_set_of_kernels(path);
      expect_a_working_process_after_unloading(path);
    }
  }
}

TEST_F(SharedLibraries, RegisterOneKernelForAProductOnACpu) {
  if (first_user() == "dso_plugin_other_layout") GTEST_SKIP() << "the host cannot make a guard";
  torchamp::set_cpu_products(torchamp::CpuProducts::fp32);
  for (const std::string& path : {same_version, other_version}) {
    const LoadedPlugin plugin(path);
    EXPECT_EQ(plugin->error_of_a_guard(), "");
    const AutocastGuard guard(at::kCPU);
  }
  // Policies have no kernel of it under the autocast key.
  EXPECT_EQ(kernels("aten::_addmm_activation", ""), 1);
  torchamp::set_cpu_products(torchamp::CpuProducts::fastest);
}

TEST_F(SharedLibraries, GetReportsOfEachOthersSteps) {
  if (first_user() == "dso_plugin_other_layout") GTEST_SKIP() << "the host cannot keep anything";
  using namespace torchamp::detail;
  for (const std::string& path : {same_version, other_version, other_layout}) {
    const LoadedPlugin plugin(path);
    const at::Tensor weight = at::ones({2});
    int made = 0;
    const auto get = [&] {
      (void)derived_weights().get(weight, {WeightForm::Kind::cast, 0},
                                  {WeightKeep::Until::weights_step}, [&](const Tensors&) {
                                    ++made;
                                    return Tensors{at::ones({2}, at::kHalf)};
                                  });
    };
    get();
    get();
    EXPECT_EQ(made, 1);
    plugin->note_step();
    get();
    EXPECT_EQ(made, 2) << path;
  }
}

TEST_F(SharedLibraries, KeepTheCodeOfTwoVersionsApart) {
  const std::string type = typeid(Policy).name();
  EXPECT_EQ(LoadedPlugin(same_version)->policy_type, type);
  EXPECT_NE(LoadedPlugin(other_version)->policy_type, type);
  EXPECT_THAT(LoadedPlugin(other_version)->policy_type, testing::HasSubstr("v98_7_6"));
}

TEST_F(SharedLibraries, FailAtTheFirstGuardIfTheirLayoutsDiffer) {
  const bool host_fails = first_user() == "dso_plugin_other_layout";
  const std::string other_layouts_version = "99.7.6";
  const std::string before = host_fails                                   ? other_layouts_version
                             : first_user() == "dso_plugin_other_version" ? "98.7.6"
                                                                          : host_version;
  const std::string after = host_fails ? host_version : other_layouts_version;
  const auto expect_both_named = [&](const std::string& error) {
    EXPECT_THAT(error, testing::HasSubstr("was built against torchamp " + after +
                                          ", but torchamp " + before + " is in use"));
  };
  for (int round = 0; round < 2; ++round) {
    if (!host_fails) {
      const LoadedPlugin plugin(other_layout);
      expect_both_named(plugin->error_of_a_guard());
      continue;
    }
    for (const bool enabled : {true, false}) {
      try {
        const AutocastGuard guard(at::kCPU, {.enabled = enabled});
        ADD_FAILURE() << "no error";
      } catch (const c10::Error& error) {
        expect_both_named(error.what_without_backtrace());
      }
    }
    expect_both_named(LoadedPlugin(same_version)->error_of_a_guard());
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU))
        << "a guard that fails changes nothing";
  }
  EXPECT_EQ(relu_dtype(), at::kHalf);
}

}  // namespace
