// SPDX-License-Identifier: BSD-3-Clause
// A trial of another policy, such as an audit's, on a model whose modules have their own.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules.h>

#include <memory>
#include <utility>

#include "support/policies.h"
#include "torchamp/autocast.h"
#include "torchamp/detail/core/autocast/policy_scope.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/labs/module_policy.h"

namespace {

namespace detail = torchamp::detail;
namespace nn = torch::nn;
using torchamp::AutocastGuard;
using torchamp::ModulePolicies;
using torchamp::Policy;
using torchamp::WithPolicy;

TEST(ModulePolicies, YieldToATrialOfAnotherPolicyUnlessItIsOneOfThemToo) {
  WithPolicy<nn::ReLU> relu;
  ModulePolicies{{"", relu_in_fp32()}}.apply_to(*relu);
  for (const bool with_modules : {false, true}) {
    const auto trial = std::make_shared<detail::GuardOverride>();
    trial->policy = Policy::torch().data();
    trial->module_policies = with_modules;
    auto state = detail::copy_of(detail::thread_policy());
    state->guards = trial;
    const detail::PolicyScope scope(std::move(state));
    const AutocastGuard autocast(at::kCPU);
    EXPECT_EQ(relu(at::ones({2}, at::kBFloat16)).scalar_type(),
              with_modules ? at::kFloat : at::kBFloat16);
  }
}

}  // namespace
