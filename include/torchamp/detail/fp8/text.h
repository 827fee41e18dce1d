// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <cctype>
#include <string>
#include <string_view>

#include "torchamp/fp8_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// A recipe's name in texts.
struct Fp8RecipeRow {
  Fp8Recipe recipe;
  std::string_view name;
};

inline constexpr Fp8RecipeRow fp8_recipes[] = {
    {Fp8Recipe::tensorwise, "tensorwise"}, {Fp8Recipe::rowwise, "rowwise"},
    {Fp8Recipe::blockwise, "blockwise"},   {Fp8Recipe::mxfp8, "mxfp8"},
    {Fp8Recipe::nvfp4, "nvfp4"},
};

/// OpRule::text.
inline std::string fp8_text(const Fp8Options& options) {
  std::string text;
  const auto add = [&](std::string_view piece) { (text += text.empty() ? "" : " ") += piece; };
  for (const Fp8RecipeRow& row : fp8_recipes) {
    if (row.recipe != options.recipe || row.recipe == Fp8Recipe::tensorwise) continue;
    add("recipe=");
    text += row.name;
  }
  if (!options.stochastic_rounding) add("round_to_nearest");
  if (options.strict) add("strict");
  if (options.only_worthwhile) add("only_worthwhile");
  return text.empty() ? "fp8" : "fp8(" + text + ')';
}

/// Sets what `word` says: "recipe=rowwise", "strict". False if there is no such option.
inline bool set_fp8_option(std::string_view word, Fp8Options& options) {
  if (word == "round_to_nearest") {
    options.stochastic_rounding = false;
    return true;
  }
  if (word == "strict") return options.strict = true;
  if (word == "only_worthwhile") return options.only_worthwhile = true;
  for (const Fp8RecipeRow& row : fp8_recipes) {
    if (!word.starts_with("recipe=") || word.substr(7) != row.name) continue;
    options.recipe = row.recipe;
    return true;
  }
  return false;
}

/// The options in a text, separated by white space or commas. Error: one that there is not, or one
/// given twice.
inline Fp8Options parse_fp8_options(std::string_view text) {
  Fp8Options options;
  std::string given = " ";
  while (!text.empty()) {
    const auto end = text.find_first_of(" \t\r\v\f,");
    const std::string_view word = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    if (word.empty()) continue;
    if (set_fp8_option(word, options)) {
      const std::string name(word.substr(0, word.find('=')));
      TORCH_CHECK(given.find(' ' + name + ' ') == std::string::npos, "the option '", name,
                  "' of fp8 is given twice; leave one of them");
      given += name + ' ';
      continue;
    }
    std::string known = "round_to_nearest, strict, only_worthwhile";
    for (const Fp8RecipeRow& row : fp8_recipes) known.append(", recipe=").append(row.name);
    TORCH_CHECK(false, "there is no option '", word.substr(0, 60), "' of fp8; the options are ",
                known);
  }
  return options;
}

}  // namespace torchamp::detail
