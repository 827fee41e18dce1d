// SPDX-License-Identifier: BSD-3-Clause
// Random policies through text and back, and texts that were damaged at random.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "support/conditions.h"
#include "torchamp/labs/fp8.h"
#include "torchamp/policy_text.h"

namespace {

using torchamp::Cast;
using torchamp::Fp8Recipe;
using torchamp::Policy;

constexpr std::string_view op_names[] = {
    "mm",  "linear", "softmax.int", "add", "sum.dim_IntList", "relu",     "conv2d", "layer_norm",
    "exp", "cat",    "addcmul",     "max", "relu.",           "aten::mul"};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::size_t below(std::size_t limit) { return engine_() % limit; }
  template <class Items>
  const auto& one_of(const Items& items) {
    return items[below(std::size(items))];
  }

 private:
  std::mt19937 engine_;
};

Policy& edit(Policy& policy, Cast cast, const torchamp::OpNames& ops, const torchamp::When& when) {
  switch (cast) {
    case Cast::lower_precision:
      return policy.lower_precision(ops, when);
    case Cast::fp32:
      return policy.fp32(ops, when);
    case Cast::promote:
      return policy.promote(ops, when);
    case Cast::unchanged:
      return policy.unchanged(ops, when);
    default:
      return policy.native(ops, when);
  }
}

Policy random_policy(Random& random) {
  static constexpr Cast casts[] = {Cast::native, Cast::lower_precision, Cast::fp32, Cast::promote,
                                   Cast::unchanged};
  static constexpr Fp8Recipe recipes[] = {Fp8Recipe::tensorwise, Fp8Recipe::rowwise,
                                          Fp8Recipe::blockwise, Fp8Recipe::mxfp8, Fp8Recipe::nvfp4};
  static const std::vector<torchamp::Condition> conditions = torchamp::conditions();
  Policy policy = random.below(2) ? Policy::standard() : Policy::torch();
  for (std::size_t edits = random.below(6); edits > 0; --edits) {
    torchamp::When when;
    if (random.below(3) == 0) when = random.one_of(conditions).when;
    if (random.below(6) == 0) {
      policy = torchamp::fp8(
          policy, random.below(2) ? torchamp::ops::dense : torchamp::OpNames{"mm", "linear"},
          torchamp::Fp8Options{.recipe = random.one_of(recipes),
                               .strict = random.below(2) == 0,
                               .only_worthwhile = random.below(2) == 0},
          when);
      continue;
    }
    if (random.below(3) == 0) {
      edit(policy, random.one_of(casts), random.one_of(torchamp::ops::families), when);
      continue;
    }
    std::vector<std::string> names;
    for (std::size_t count = random.below(4); count > 0; --count) {
      names.emplace_back(random.one_of(op_names));
    }
    if (random.below(4) == 0 && !names.empty()) {
      const std::vector<std::string_view> views(names.begin(), names.end());
      if (views.size() == 1) {
        const std::string_view family[] = {views[0]};
        edit(policy, random.one_of(casts), torchamp::OpFamily("own", family), when);
        continue;
      }
    }
    edit(policy, random.one_of(casts), names, when);
  }
  return policy;
}

void expect_same(const Policy& one, const Policy& other) {
  ASSERT_EQ(torchamp::to_text(one), torchamp::to_text(other));
  EXPECT_TRUE(*one.data() == *other.data());
  EXPECT_EQ(one.data()->edits_of_ops, other.data()->edits_of_ops);
}

TEST(PolicyTextFuzz, EveryPolicyWithoutPredicatesComesBackFromItsText) {
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    const Policy policy = random_policy(random);
    SCOPED_TRACE(torchamp::to_text(policy));
    expect_same(policy, torchamp::parse_policy(torchamp::to_text(policy)));
    if (HasFailure()) break;
  }
}

/// Damages a text in one of the ways in which files are damaged.
void damage(std::string& text, Random& random) {
  static constexpr std::string_view pieces[] = {"\t",
                                                " ",
                                                "\n",
                                                "\r\n",
                                                ":",
                                                "::",
                                                ": ",
                                                ",",
                                                "#",
                                                "when",
                                                " when float16",
                                                " and ",
                                                "ops::",
                                                "ops::norm",
                                                "fp32",
                                                "fp32: mm\n",
                                                "fp8(strict) ",
                                                "(",
                                                ")",
                                                "policy torch\n",
                                                ".",
                                                "\0",
                                                "\xEF\xBB\xBF",
                                                "\xFF",
                                                "aten::",
                                                "bfloat16"};
  const std::size_t at = random.below(text.size() + 1);
  switch (random.below(5)) {
    case 0:
      text.insert(at, random.one_of(pieces));
      break;
    case 1:
      text.erase(at, random.below(8));
      break;
    case 2:
      if (at < text.size()) text[at] = static_cast<char>(random.below(256));
      break;
    case 3:
      text.insert(at, text.substr(random.below(text.size() + 1), random.below(40)));
      break;
    default:
      text.insert(at, random.below(30) == 0 ? random.below(30'000) : random.below(5), 'x');
  }
}

TEST(PolicyTextFuzz, ADamagedTextIsAnErrorOrAPolicyThatComesBack) {
  Random random(2);
  int taken = 0, refused = 0;
  for (int i = 0; i < 800; ++i) {
    std::string text = torchamp::to_text(random_policy(random));
    for (std::size_t times = 1 + random.below(3); times > 0; --times) damage(text, random);
    SCOPED_TRACE(text.substr(0, 400));
    try {
      const Policy policy = torchamp::parse_policy(text);
      ++taken;
      expect_same(policy, torchamp::parse_policy(torchamp::to_text(policy)));
    } catch (const c10::Error& error) {
      ++refused;
      const std::string what = error.what_without_backtrace();
      EXPECT_TRUE(what.starts_with("torchamp::parse_policy: ")) << what;
      EXPECT_LT(what.size(), 4000u);
    }
    if (HasFailure()) break;
  }
  EXPECT_GT(taken, 20);
  EXPECT_GT(refused, 100);
}

}  // namespace
