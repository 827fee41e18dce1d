// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/labs/policy_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "support/audited_net.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "torchamp/labs/precision_audit.h"
#include "torchamp/policy_text.h"
#include "torchamp/torchamp.h"

namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;
using ::testing::Not;
using torchamp::AuditedPolicy;
using torchamp::Cast;
using torchamp::LoadedPolicies;
using torchamp::Policy;

/// What an audit chose, and what a program may make of it.
AuditedPolicy chosen() {
  AuditedPolicy result;
  result.policy.lower_precision("addmm").fp32("tanh");
  result.modules.set("last", Policy(result.policy).fp32("addmm"));
  result.decisions = {{"", "addmm", true, "fast"},
                      {"", "tanh", false, "slow"},
                      {"last", "addmm", false, "the last layer matters"}};
  return result;
}

LoadedPolicies saved_and_loaded(const AuditedPolicy& audited) {
  const TemporaryFolder folder;
  torchamp::save_policy(audited, folder / "policy");
  return torchamp::load_policies(folder / "policy");
}

Cast rule(const Policy& policy, const char* op) {
  return policy.lookup(op, at::kCPU);
}

LoadedPolicies load(const std::string& text) {
  const TemporaryFolder folder;
  std::ofstream(folder / "policy") << text;
  return torchamp::load_policies(folder / "policy");
}

TEST(PolicyFile, HasTheEditsThatTheProgramMadeOfWhatAnAuditChose) {
  AuditedPolicy audited = chosen();
  audited.policy.fp32("softmax").lower_precision("tanh").fp32(torchamp::ops::norm,
                                                              {.dtype = at::kHalf});
  audited.modules.set("first", Policy::standard().lower_precision("gelu"));
  const LoadedPolicies loaded = saved_and_loaded(audited);
  EXPECT_EQ(rule(loaded.policy, "addmm"), Cast::lower_precision);
  EXPECT_EQ(rule(loaded.policy, "softmax.int"), Cast::fp32);
  EXPECT_EQ(rule(loaded.policy, "tanh"), Cast::lower_precision);
  EXPECT_EQ(torchamp::to_text(loaded.policy), torchamp::to_text(audited.policy));
  const auto before = audited.modules.entries(), after = loaded.modules.entries();
  ASSERT_EQ(after.size(), before.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(after[i].first, before[i].first);
    EXPECT_EQ(torchamp::to_text(after[i].second), torchamp::to_text(before[i].second));
  }
}

TEST(PolicyFile, HasTheReasonsOfTheRulesThatAreStillTheAudits) {
  const TemporaryFolder folder;
  AuditedPolicy audited = chosen();
  audited.policy.lower_precision("tanh");
  torchamp::save_policy(audited, folder / "policy");
  const std::string text = content_of(folder / "policy");
  EXPECT_THAT(text, HasSubstr("lower_precision: addmm  # fast\n"));
  EXPECT_THAT(text, HasSubstr("fp32: tanh  # slow\nlower_precision: tanh\n"));
  // Its policy is not the one of all others with more edits any longer.
  EXPECT_THAT(text, HasSubstr("module last\npolicy torch\n"));
  EXPECT_THAT(text, HasSubstr("fp32: addmm  # the last layer matters\n"));
  torchamp::save_policy(chosen(), folder / "policy");
  EXPECT_THAT(content_of(folder / "policy"),
              HasSubstr("module last\nfp32: addmm  # the last layer matters\n"));
}

TEST(PolicyFile, RefusesAnEditThatIsCode) {
  const TemporaryFolder folder;
  AuditedPolicy audited = chosen();
  audited.policy.fp32("mm", {.predicate = [](const torchamp::OpCall&) { return true; }});
  EXPECT_ERROR(torchamp::save_policy(audited, folder / "policy"),
               "torchamp::save_policy: the rule 'fp32: mm' depends on a predicate");
  EXPECT_EQ(folder.files(), 0);
}

TEST(PolicyFile, TakesTheNameOfAModuleForNoPattern) {
  struct StarredImpl : nn::Module {
    torchamp::WithPolicy<nn::Linear> star =
        register_module("h*", torchamp::WithPolicy<nn::Linear>(2, 2));
    torchamp::WithPolicy<nn::Linear> head =
        register_module("head", torchamp::WithPolicy<nn::Linear>(2, 2));
  };
  StarredImpl model;
  AuditedPolicy audited;
  audited.decisions = {{"h*", "addmm", false, "it matters"}};
  EXPECT_EQ(saved_and_loaded(audited).apply_to(model), std::vector<std::string>{"h*"});
}

TEST(PolicyFile, LetsAModulesPartStandAlone) {
  const LoadedPolicies loaded = load(
      "policy torch\nfp32: mm\nmodule a\n# alone\n\npolicy standard\nfp32: addmm\nmodule b\nfp32: "
      "gelu\nmodule c\n");
  const auto modules = loaded.modules.entries();
  ASSERT_EQ(modules.size(), 3U);
  EXPECT_EQ(torchamp::to_text(modules[0].second), "policy standard\nfp32: addmm\n");
  EXPECT_EQ(torchamp::to_text(modules[1].second), "policy torch\nfp32: mm\nfp32: gelu\n");
  EXPECT_EQ(torchamp::to_text(modules[2].second), "policy torch\nfp32: mm\n");
  EXPECT_ERROR(load("policy torch\nmodule a\nfp32: mm\npolicy torch\n"),
               "line 4: 'policy torch' is a second line of its kind");
  EXPECT_ERROR(load("policy torch\nmodule a\npolicy other\n"),
               "line 3: 'policy other' stands where");
}

TEST(PolicyFile, NamesTheLinesOfManyModules) {
  std::string text = "policy torch\n";
  for (int i = 0; i < 500; ++i) text += "module m" + std::to_string(i) + "\nfp32: mm\n";
  EXPECT_EQ(load(text).modules.entries().size(), 500U);
  EXPECT_ERROR(load(text + "fp64: mm"), "line 1002: there is no rule 'fp64'");
  EXPECT_ERROR(load(text + "module m7\n"), "has two lines 'module m7'");
}

}  // namespace
