// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/labs/detail/modules/name_pattern.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>

namespace {

using torchamp::detail::has_wildcard;
using torchamp::detail::matches;
using torchamp::detail::pattern_of;

TEST(NamePattern, AQuestionMarkIsOneCharacterButADot) {
  EXPECT_TRUE(matches("a?c", "abc"));
  EXPECT_FALSE(matches("a?c", "a.c"));
  EXPECT_FALSE(matches("a?", "a"));
  EXPECT_FALSE(matches("?", ""));
}

TEST(NamePattern, AStarIsAnythingWithinAPart) {
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("*", "abc"));
  EXPECT_TRUE(matches("a*", "a"));
  EXPECT_TRUE(matches("a.*.c", "a.b.c"));
  EXPECT_FALSE(matches("a.*", "a.b.c"));
  EXPECT_FALSE(matches("*", "a.b"));
}

TEST(NamePattern, TwoStarsCrossDots) {
  EXPECT_TRUE(matches("**", "a.b.c"));
  EXPECT_TRUE(matches("a.**.c", "a.b.b.c"));
  EXPECT_FALSE(matches("a.**.c", "a.c"));
  EXPECT_TRUE(matches("***", "a.b"));
  EXPECT_FALSE(matches("**.c", "a.b"));
}

TEST(NamePattern, MustFitTheWholeName) {
  EXPECT_TRUE(matches("", ""));
  EXPECT_FALSE(matches("", "a"));
  EXPECT_FALSE(matches("a", "ab"));
  EXPECT_FALSE(matches("b", "ab"));
}

TEST(ModulePolicies, FitPatternsToWholeNames) {
  EXPECT_TRUE(matches("encoder.*", "encoder.0"));
  EXPECT_FALSE(matches("encoder.*", "encoder.0.norm"));
  EXPECT_FALSE(matches("encoder.*", "encoder"));
  EXPECT_FALSE(matches("encoder.*", "the_encoder.0"));
  EXPECT_TRUE(matches("encoder.**", "encoder.0.norm"));
  EXPECT_TRUE(matches("**.norm", "encoder.0.norm"));
  EXPECT_FALSE(matches("**.norm", "norm"));
  EXPECT_TRUE(matches("**norm", "norm"));
  EXPECT_TRUE(matches("*.*.norm", "encoder.0.norm"));
  EXPECT_TRUE(matches("layer?", "layer7"));
  EXPECT_FALSE(matches("layer?", "layer.7"));
  EXPECT_FALSE(matches("a?", "a."));
  EXPECT_TRUE(matches("*", "encoder"));
  EXPECT_TRUE(matches("", ""));
}

TEST(NamePattern, TakesAWildcardBehindABackslashForItself) {
  EXPECT_TRUE(matches("h\\*", "h*"));
  EXPECT_FALSE(matches("h\\*", "head"));
  EXPECT_TRUE(matches("\\?\\\\*", "?\\x"));
  EXPECT_TRUE(matches("h\\", "h\\"));
  for (const std::string name : {"h*", "h?d", "h\\*", "**", "h", ""}) {
    EXPECT_FALSE(has_wildcard(pattern_of(name))) << name;
    EXPECT_TRUE(matches(pattern_of(name), name)) << name;
  }
}

/// The definition, tried in all ways.
bool slowly(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.starts_with('*')) {
    const bool crosses = pattern.starts_with("**");
    for (std::size_t length = 0; length <= name.size(); ++length) {
      if (slowly(pattern.substr(crosses ? 2 : 1), name.substr(length))) return true;
      if (length < name.size() && name[length] == '.' && !crosses) return false;
    }
    return false;
  }
  if (name.empty() || (pattern[0] == '?' ? name[0] == '.' : pattern[0] != name[0])) return false;
  return slowly(pattern.substr(1), name.substr(1));
}

TEST(NamePattern, MatchesTheSameNamesAsASearchThroughAllSplits) {
  std::mt19937 random(7);
  const auto word = [&](std::string_view letters, unsigned longest) {
    std::string text;
    for (unsigned length = random() % longest; length > 0; --length) {
      text += letters[random() % letters.size()];
    }
    return text;
  };
  int fitting = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::string pattern = word("ab.?**", 8), name = word("ab.", 8);
    ASSERT_EQ(matches(pattern, name), slowly(pattern, name)) << pattern << " and " << name;
    fitting += matches(pattern, name) ? 1 : 0;
  }
  EXPECT_GT(fitting, 1000);
}

TEST(NamePattern, EndsForManyStars) {  // for which a search through all splits takes years
  std::string stars;
  for (int i = 0; i < 1000; ++i) stars += "*a";
  EXPECT_FALSE(matches(stars + "b", std::string(1000, 'a')));
  EXPECT_FALSE(matches("*a*a*a*a*a*a*a*b", std::string(2000, 'a')));
  EXPECT_TRUE(matches(stars, std::string(1000, 'a')));
}

}  // namespace
