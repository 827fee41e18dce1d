// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/ops.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/expect_error.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/policy.h"
#include "torchamp/policy_text.h"

namespace {

using torchamp::Cast;
using torchamp::OpFamily;
using torchamp::Policy;
namespace ops = torchamp::ops;

TEST(Ops, EveryNameIsAnOpOfThisLibTorch) {
  for (const OpFamily& family : ops::families) {
    for (const std::string_view op : family) {
      EXPECT_FALSE(torchamp::detail::find_ops(op, "test", /*missing_ok=*/true).empty())
          << "ops::" << family.name() << ": " << op;
    }
  }
}

TEST(Ops, EveryOverloadThatLibTorchKnowsIsFoundByItsName) {
  std::map<std::string, std::vector<std::string>> overloads_of;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!c10::Dispatcher::singleton().findSchema(name)) continue;
    overloads_of[name.name].push_back(name.overload_name);
  }
  EXPECT_GT(overloads_of.size(), 1000U);
  for (auto& [base, overloads] : overloads_of) {
    std::sort(overloads.begin(), overloads.end());
    std::vector<std::string> found;
    for (const auto& op : torchamp::detail::find_ops(base, "test")) {
      EXPECT_EQ(op.operator_name().name, base);
      found.push_back(op.operator_name().overload_name);
    }
    EXPECT_EQ(found, overloads) << base;
  }
}

// Whoever adds a rule to the table finds here what the table alone makes work.
TEST(Policy, SetIsTheDoorOfEveryRuleOfTheTable) {
  for (const torchamp::detail::CastRow& row : torchamp::detail::cast_rows) {
    const std::string name(row.name);
    EXPECT_EQ(to_string(row.cast), name);
    const bool fp8 = row.cast == Cast::fp8;
    const std::string op = fp8 ? "mm" : "pow";
    const Policy policy = Policy::standard().set(row.cast, {op}, {.dtype = at::kHalf});
    EXPECT_EQ(to_text(policy), "policy standard\n" + name + " when float16: " + op + "\n");
    EXPECT_EQ(to_text(torchamp::parse_policy(to_text(policy))), to_text(policy));
    std::ostringstream printed;
    printed << policy;
    EXPECT_FALSE(row.effect.empty()) << name;
    EXPECT_NE(printed.str().find('\n' + name + ": " + std::string(row.effect) + '\n'),
              std::string::npos);
    const std::string call = fp8 ? "torchamp::fp8" : "Policy::" + name;
    EXPECT_ERROR(Policy::standard().set(row.cast, {"softmaks"}),
                 call + ": LibTorch knows no op 'softmaks'. Did you mean 'softmax'?");
    if (row.casts) {
      const std::string writes = row.cast == Cast::promote ? "add.out" : "add_";
      EXPECT_ERROR(Policy::standard().set(row.cast, {writes}),
                   call + ": '" + writes + "' cannot " + (fp8 ? "run in fp8" : "be cast"));
      const char* const other = fp8 ? "linear" : "relu";
      EXPECT_EQ(Policy::torch().set(row.cast, {other}).lookup(other, at::kCPU), row.cast);
    } else {
      EXPECT_NO_THROW(Policy::standard().set(row.cast, {"add_"}));
    }
  }
  EXPECT_ERROR(Policy::standard().set(static_cast<Cast>(99), {"pow"}),
               "Policy::set: 99 is not a rule of Cast");
}

TEST(Ops, EveryNameOfTheStandardTableHasOneRow) {
  std::set<std::string_view> names;
  for (const auto& row : torchamp::detail::standard_rows) {
    for (const std::string_view name : row.family) {
      EXPECT_TRUE(names.insert(name).second) << name;
      const std::string op(name.substr(0, name.find('.')));
      const std::string overload(name == op ? "any" : name.substr(op.size() + 1));
      EXPECT_EQ(torchamp::detail::standard_row({"aten::" + op, overload}), &row) << name;
      EXPECT_EQ(torchamp::detail::standard_row({"mylib::" + op, overload}), nullptr) << name;
    }
  }
}

TEST(Ops, TheStandardTableAsksLibTorchsListsAfterItsRows) {
  using torchamp::detail::standard_row;
  EXPECT_EQ(standard_row({"aten::sum", ""})->rule.where, torchamp::detail::Where::always);
  EXPECT_EQ(standard_row({"aten::mm", ""})->rule.cast, Cast::lower_precision);
  EXPECT_EQ(standard_row({"aten::mm", ""})->rule.where, torchamp::detail::Where::no_native_kernel);
  EXPECT_EQ(standard_row({"aten::mm", "out"})->rule.cast, Cast::promote);
  EXPECT_EQ(standard_row({"aten::mm", "other"}), nullptr);
  EXPECT_EQ(standard_row({"aten::relu", ""}), nullptr);
}

TEST(Ops, EveryNameCanBeCast) {
  for (const OpFamily& family : ops::families) {
    for (const std::string_view op : family) {
      EXPECT_NO_THROW(Policy::standard().fp32({op})) << "ops::" << family.name() << ": " << op;
    }
  }
}

// LibTorch before 2.15 has such overloads: std.correction_names, prod.dim_Dimname.
TEST(Ops, OverloadsWithNamedDimensionsAreNotCast) {
  for (const OpFamily& family : ops::families) {
    for (const std::string_view name : family) {
      for (const auto& op : torchamp::detail::find_ops(name, "test", /*missing_ok=*/true)) {
        const std::string& overload = op.operator_name().overload_name;
        if (overload.find("names") == std::string::npos) continue;
        EXPECT_NE(torchamp::detail::why_not_castable(op.schema()), "") << op.schema();
      }
    }
  }
}

TEST(Ops, NoNameIsInTwoFamiliesOrTwiceInOne) {
  std::map<std::string_view, std::string_view> family_of;
  for (const OpFamily& family : ops::families) {
    if (family == ops::dense) continue;
    for (const std::string_view op : family) {
      const auto [found, is_new] = family_of.emplace(op, family.name());
      EXPECT_TRUE(is_new) << op << " is in ops::" << family.name() << " and ops::" << found->second;
    }
  }
}

TEST(Ops, DenseProductsAreInTheFamiliesOfLinearAndMatmulToo) {
  const std::set<std::string_view> dense(ops::dense.begin(), ops::dense.end());
  EXPECT_EQ(dense, (std::set<std::string_view>{"linear", "addmm", "mm", "matmul"}));
  for (const std::string_view op : dense) {
    const OpFamily& other = op == "linear" ? ops::linear : ops::matmul;
    EXPECT_NE(std::find(other.begin(), other.end(), op), other.end()) << op;
  }
}

TEST(Ops, FamiliesHaveDifferentNamesAndAreNotEmpty) {
  std::set<std::string_view> names;
  for (const OpFamily& family : ops::families) {
    EXPECT_TRUE(names.insert(family.name()).second) << family.name();
    EXPECT_GT(family.size(), 0u) << family.name();
    EXPECT_EQ(static_cast<std::size_t>(std::distance(family.begin(), family.end())), family.size());
  }
}

/// The ops on LibTorch's CUDA lists that no family holds, each for a reason.
TEST(Ops, AlmostEveryOpOnLibTorchsListsIsInAFamily) {
  std::set<std::string> in_families, left_over;
  for (const OpFamily& family : ops::families) {
    for (const std::string_view op : family) in_families.insert(std::string(op));
  }
  for (const auto& row : torchamp::detail::cuda_rows) {
    for (const std::string_view name : row.family) {
      const std::string base(torchamp::detail::op_in(name));
      if (!in_families.contains(base)) left_over.insert(base);
    }
  }
  EXPECT_THAT(left_over, ::testing::UnorderedElementsAre(
                             "prelu",  // a pointwise op in the lower precision, alone in that
                             // The widest dtype of their arguments.
                             "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot",
                             "index_put", "scatter_add", "tensordot"));
}

}  // namespace
