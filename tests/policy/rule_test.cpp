// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/policy.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "support/conditions.h"
#include "support/expect_error.h"
#include "torchamp/autocast.h"
#include "torchamp/policy_text.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Cast;
using torchamp::OpCall;
using torchamp::OpFamily;
using torchamp::OpNames;
using torchamp::Policy;

at::Tensor bf16() {
  return at::ones({2, 2}, at::kBFloat16);
}

bool exponent_is_large(const OpCall& call) {
  return call.argument("exponent").toScalar().toDouble() > 2;
}

bool holds(const torchamp::When& when, const torchamp::ConditionCall& call) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::mm", "");
  const c10::IValue stack[] = {call.self, call.mat2};
  return when.holds(call.region_dtype, OpCall(op.schema(), stack));
}

TEST(Conditions, HoldForTheirCallsOnlyAndIfAllOthersHold) {
  for (const torchamp::Condition& one : torchamp::conditions()) {
    SCOPED_TRACE(one.text);
    EXPECT_FALSE(one.when.always());
    torchamp::When with_predicate = one.when;
    for (const bool says : {true, false}) {
      with_predicate.predicate = [says](const OpCall&) { return says; };
      EXPECT_EQ(holds(with_predicate, one.holds), says);
      EXPECT_FALSE(holds(with_predicate, one.fails));
    }
    EXPECT_TRUE(holds(one.when, one.holds));
    EXPECT_FALSE(holds(one.when, one.fails));
  }
}

TEST(Conditions, HaveARowForEachMember) {
  std::vector<bool> tested(torchamp::set_members({}).size());
  for (const torchamp::Condition& one : torchamp::conditions()) {
    const std::vector<bool> set = torchamp::set_members(one.when);
    for (std::size_t i = 0; i < set.size(); ++i) tested[i] = tested[i] || set[i];
  }
  EXPECT_THAT(tested, testing::Each(true));
}

TEST(Conditions, AreEqualIfTheirValuesAre) {
  const auto policy = [](const torchamp::When& when) { return Policy::torch().fp32({"mm"}, when); };
  for (const torchamp::Condition& one : torchamp::conditions()) {
    SCOPED_TRACE(one.text);
    EXPECT_TRUE(*policy(one.when).data() == *policy(one.when).data());
    for (const torchamp::When& other : {one.other, torchamp::When()}) {
      EXPECT_FALSE(one.when == other);
      EXPECT_FALSE(*policy(one.when).data() == *policy(other).data());
    }
  }
}

TEST(Conditions, ThatCanNeverHoldAreErrors) {
  for (const torchamp::Condition& one : torchamp::conditions()) {
    for (const auto& [when, error] : one.refused) {
      EXPECT_ERROR(Policy::standard().fp32({"relu"}, when), "Policy::fp32: " + error);
    }
  }
}

TEST(Conditions, ComeBackFromThePolicysText) {
  for (const torchamp::Condition& one : torchamp::conditions()) {
    const Policy policy = Policy::torch().fp32({"mm"}, one.when);
    const std::string text = "policy torch\nfp32 when " + one.text + ": mm\n";
    EXPECT_EQ(torchamp::to_text(policy), text);
    EXPECT_TRUE(*torchamp::parse_policy(text).data() == *policy.data()) << text;
  }
}

TEST(Conditions, OfSeveralKindsComeBackFromThePolicysText) {
  const std::vector<torchamp::Condition> all = torchamp::conditions();
  for (auto one = all.begin(); one != all.end(); ++one) {
    for (auto other = one; other != all.end(); ++other) {
      const std::string text =
          "policy torch\nfp32 when " + one->text + " and " + other->text + ": mm\n";
      if (one->member == other->member) {
        EXPECT_ERROR((void)torchamp::parse_policy(text),
                     "has two conditions of one kind: '" + other->text + "' is the second");
        continue;
      }
      const Policy policy = torchamp::parse_policy(text);
      EXPECT_EQ(torchamp::to_text(policy), text);
      EXPECT_TRUE(*torchamp::parse_policy(torchamp::to_text(policy)).data() == *policy.data());
      const torchamp::When& when = policy.data()->edits.at(0).when;
      EXPECT_FALSE(holds(when, one->fails) || holds(when, other->fails)) << text;
    }
  }
}

TEST(Conditions, ThatAreUnknownAreErrorsThatListTheConditions) {
  for (const std::string wrong : {"int8", "float16 bfloat16", "float16!"}) {
    const std::string error = "has the condition '" + wrong + "'; the conditions are float16, ";
    for (const std::string& text : {wrong, "float16 and " + wrong}) {
      EXPECT_ERROR((void)torchamp::parse_policy("policy torch\nfp32 when " + text + ": mm\n"),
                   error);
    }
  }
  for (const torchamp::Condition& one : torchamp::conditions()) {
    EXPECT_ERROR((void)torchamp::parse_policy("policy torch\nfp32 when int8: mm\n"), one.form);
  }
  for (const std::string text : {"", " and", " float16 and", " and float16"}) {
    EXPECT_ERROR((void)torchamp::parse_policy("policy torch\nfp32 when" + text + ": mm\n"),
                 "; the conditions are float16, ");
  }
}

TEST(When, ARuleCanHoldInRegionsOfOneDtypeOnly) {
  const Policy policy = Policy::standard().unchanged({"exp"}, {.dtype = at::kBFloat16});
  const at::Tensor x = bf16();
  {
    const AutocastGuard guard(at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
    EXPECT_EQ(x.exp().scalar_type(), at::kBFloat16);
  }
  const AutocastGuard guard(at::kCPU, {.dtype = at::kHalf, .policy = policy});
  EXPECT_EQ(x.exp().scalar_type(), at::kFloat);
}

TEST(When, ARuleCanDependOnAnArgument) {
  const AutocastGuard guard(
      at::kCPU, {.policy = Policy::standard()
                               .unchanged({"pow.Tensor_Scalar"})
                               .fp32({"pow.Tensor_Scalar"}, {.predicate = exponent_is_large})});
  EXPECT_EQ(bf16().pow(2).scalar_type(), at::kBFloat16);
  EXPECT_EQ(bf16().pow(3).scalar_type(), at::kFloat);
}

TEST(When, TheLastRuleThatHoldsWins) {
  const AutocastGuard guard(
      at::kCPU, {.policy = Policy::standard()
                               .unchanged({"relu"}, {.dtype = at::kBFloat16})
                               .fp32({"relu"}, {.predicate = [](const OpCall& call) {
                                       return call.argument("self").toTensor().dim() == 1;
                                     }})});
  EXPECT_EQ(bf16().relu().scalar_type(), at::kBFloat16);
  EXPECT_EQ(bf16()[0].relu().scalar_type(), at::kFloat);
}

TEST(When, IfNoConditionHoldsTheRuleBelowApplies) {
  const auto never = [](const OpCall&) { return false; };
  const AutocastGuard guard(at::kCPU,
                            {.policy = Policy::standard()
                                           .unchanged({"softmax", "mm"}, {.predicate = never})
                                           .fp32({"relu"}, {.predicate = never})});
  const at::Tensor x = bf16();
  EXPECT_EQ(x.softmax(0).scalar_type(), at::kFloat);
  EXPECT_EQ(x.to(at::kFloat).mm(x.to(at::kFloat)).scalar_type(), at::kBFloat16);
  EXPECT_EQ(x.relu().scalar_type(), at::kBFloat16);
}

TEST(When, AnEditWithoutConditionRemovesTheConditionalRulesBelowIt) {
  const auto always = [](const OpCall&) { return true; };
  const AutocastGuard guard(
      at::kCPU,
      {.policy = Policy::standard().fp32({"relu"}, {.predicate = always}).unchanged({"relu"})});
  EXPECT_EQ(bf16().relu().scalar_type(), at::kBFloat16);
}

TEST(When, APredicateMayCallOpsItsOwnAmongThemWhichAreNotCast) {
  std::vector<at::ScalarType> seen;
  const auto calls_itself = [&](const OpCall& call) {
    const at::Tensor self = call.argument("self").toTensor();
    seen.push_back(self.relu().scalar_type());
    seen.push_back(self.mm(self).scalar_type());
    return true;
  };
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().lower_precision(
                                           {"relu"}, {.predicate = calls_itself})});
  EXPECT_EQ(at::ones({2, 2}).relu().scalar_type(), at::kBFloat16);
  EXPECT_EQ(seen, (std::vector<at::ScalarType>{at::kFloat, at::kFloat}));
  EXPECT_EQ(at::ones({2, 2}).mm(at::ones({2, 2})).scalar_type(), at::kBFloat16)
      << "autocast is on again";
}

TEST(When, WhatAPredicateCallsIsNotRecorded) {
  static int recorded;
  recorded = 0;
  const at::CallbackHandle callback =
      at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& op) {
                                   recorded += op.name() == std::string_view("aten::erf") ? 1 : 0;
                                   return std::unique_ptr<at::ObserverContext>();
                                 }).scopes({at::RecordScope::FUNCTION}));
  const auto calls_another = [](const OpCall& call) {
    return call.argument("self").toTensor().erf().defined();
  };
  {
    const AutocastGuard guard(
        at::kCPU, {.policy = Policy::standard().fp32({"relu"}, {.predicate = calls_another})});
    EXPECT_EQ(bf16().relu().scalar_type(), at::kFloat);
    EXPECT_EQ(recorded, 0);
    (void)bf16().erf();
    EXPECT_EQ(recorded, 1);
  }
  at::removeCallback(callback);
}

TEST(When, APredicateIsCalledOnceForACallHoweverOftenAnEditNamesTheOp) {
  static constexpr std::string_view names[] = {"softmax", "relu", "softmax.int"};
  for (const OpNames& ops : {OpNames{"softmax", "softmax"}, OpNames{"softmax", "aten::softmax"},
                             OpNames{"softmax.int", "softmax"}, OpNames(OpFamily("mine", names))}) {
    int calls = 0;
    const auto never = [&](const OpCall&) {
      ++calls;
      return false;
    };
    const AutocastGuard guard(
        at::kCPU, {.policy = Policy::standard().lower_precision(ops, {.predicate = never})});
    EXPECT_EQ(bf16().softmax(0).scalar_type(), at::kFloat);
    EXPECT_EQ(calls, 1);
  }
}

TEST(When, APredicateThatThrowsLeavesAutocastOn) {
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().fp32(
                                           {"relu"}, {.predicate = [](const OpCall&) -> bool {
                                             throw std::runtime_error("no");
                                           }})});
  EXPECT_THROW((void)bf16().relu(), std::runtime_error);
  EXPECT_EQ(at::ones({2, 2}).mm(at::ones({2, 2})).scalar_type(), at::kBFloat16);
}

TEST(When, LookupLeavesConditionsOut) {
  const Policy policy = Policy::standard().fp32({"relu"}, {.dtype = at::kHalf});
  EXPECT_EQ(policy.lookup("relu", at::kCPU), Cast::unchanged);
}

TEST(OpCall, AnUnknownArgumentIsAnErrorWithTheSchema) {
  const AutocastGuard guard(
      at::kCPU, {.policy = Policy::standard().fp32({"relu"}, {.predicate = [](const OpCall& call) {
                                                     return call.argument("input").isTensor();
                                                   }})});
  EXPECT_ERROR(bf16().relu(),
               "OpCall::argument: 'aten::relu' has no argument 'input'. Its schema is aten::relu(");
  EXPECT_EQ(bf16().mul(2).scalar_type(), at::kBFloat16) << "autocast must survive the error";
}

}  // namespace
