// SPDX-License-Identifier: BSD-3-Clause
// The variable TORCHAMP_POLICY. It is read once per process, so each case runs in a child.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

#include "torchamp/autocast.h"
#include "torchamp/policy_text.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;

/// Prints what ops make of a guard that names the standard policy, and ends the process.
[[noreturn]] void report(const std::string& value) {
  setenv("TORCHAMP_POLICY", value.c_str(), 1);
  try {
    const AutocastGuard guard(at::kCPU, {.policy = Policy::standard()});
    const at::Tensor wide = at::ones({2, 2}), lower = at::ones({2, 2}, at::kBFloat16);
    std::cerr << "mm " << wide.mm(wide).scalar_type() << ", add " << (lower + lower).scalar_type()
              << ", relu " << lower.relu().scalar_type() << '\n';
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
  }
  std::exit(0);
}

void expect(const std::string& value, const std::string& report_text) {
  EXPECT_EXIT(report(value), ::testing::ExitedWithCode(0), report_text) << value;
}

class Environment : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(Environment, UnsetOrEmptyChangesNothing) {
  expect("", "mm BFloat16, add Float, relu BFloat16");
}

TEST_F(Environment, OffRunsEveryGuardDisabled) {
  expect("off", "mm Float, add BFloat16");
}

TEST_F(Environment, ANameReplacesThePolicyOfEveryGuard) {
  expect("torch", "mm BFloat16, add BFloat16");
  expect("standard", "mm BFloat16, add Float");
}

TEST_F(Environment, AFileReplacesThePolicyOfEveryGuard) {
  const std::string path = ::testing::TempDir() + "torchamp_environment_policy.txt";
  std::ofstream(path) << "policy torch\nfp32: relu, mm\n";
  expect("file:" + path, "mm Float, add BFloat16, relu Float");
  std::remove(path.c_str());
  expect("file:" + path, "torchamp::load_policy: cannot read '.*torchamp_environment_policy.txt'");
}

TEST_F(Environment, AFileWithPoliciesOfModulesGivesOnlyRulesForOps) {
  const std::string path = ::testing::TempDir() + "torchamp_environment_policies.txt";
  std::ofstream(path) << "policy torch  # chosen\nfp32: relu  # reason\nmodule head\nfp32: mm\n";
  expect("file:" + path, "mm BFloat16, add BFloat16, relu Float");
  std::remove(path.c_str());
}

TEST_F(Environment, AnErrorInTheFileNamesTheVariableTheFileAndTheLine) {
  const std::string path = ::testing::TempDir() + "torchamp_environment_bad_policy.txt";
  std::ofstream(path) << "policy torch\nfp32: rleu\n";
  expect("file:" + path,
         "TORCHAMP_POLICY: torchamp::load_policy: '.*torchamp_environment_bad_policy.txt': line 2: "
         "Policy::fp32: LibTorch knows no op 'rleu'");
  std::remove(path.c_str());
}

TEST_F(Environment, AnFp8RuleInTheFileIsAnErrorWithARemedy) {
  const std::string path = ::testing::TempDir() + "torchamp_environment_fp8_policy.txt";
  for (const char* rule : {"fp8: ops::dense", "fp8(recipe=rowwise strict): mm"}) {
    std::ofstream(path) << "policy standard\n" << rule << '\n';
    expect("file:" + path,
           "TORCHAMP_POLICY: torchamp::load_policy: '.*torchamp_environment_fp8_policy.txt': line "
           "2: an fp8 rule cannot come from the environment. Give it in the program, by "
           "fp8\\(\\) or load_policy");
  }
  std::remove(path.c_str());
}

TEST_F(Environment, ABadValueIsAnErrorAtTheGuard) {
  expect("fast", "TORCHAMP_POLICY is 'fast'. Set it to off, standard, torch or file:PATH");
}

}  // namespace
