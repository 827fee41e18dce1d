// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <string_view>

#include "torchamp/detail/extras/policy_text/parse.h"
#include "torchamp/labs/detail/fp8/run.h"
#include "torchamp/labs/fp8_options.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Sets the option `word`: "recipe=rowwise", "strict". False for an unknown option.
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

/// The options in a text, separated by white space or commas. Errors: an unknown or repeated
/// option.
inline Fp8Options parse_fp8_options(std::string_view text) {
  Fp8Options options;
  std::string given = " ";
  for (const std::string& word : split(text, " \t\r\v\f,")) {
    if (set_fp8_option(word, options)) {
      const std::string name = word.substr(0, word.find('='));
      TORCH_CHECK(given.find(' ' + name + ' ') == std::string::npos, "the option '", name,
                  "' of fp8 is given twice; leave one out");
      given += name + ' ';
      continue;
    }
    TORCH_CHECK(false, "there is no option '", word.substr(0, 60),
                "' of fp8; the options are round_to_nearest, strict, only_worthwhile, recipe=",
                names_of(fp8_recipes, &Fp8RecipeRow::name, ", recipe="));
  }
  return options;
}

}  // namespace TORCHAMP_NAMESPACE::detail
