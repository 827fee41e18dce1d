// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Policy::fp8: matrix products in fp8.
///
/// A CPU emulates a GPU's products, to rehearse a run. Operands and scales are bitwise equal.
/// Results are equal where a sum needs at most 14 bits (small integers). Otherwise an element
/// differs by the rounding of the result, and by up to K * 2^-12 of the largest of the K products
/// that it sums, because a GPU's fp8 units keep some 14 bits of each and a CPU 24.

#include <c10/util/Exception.h>

#include <memory>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/extras/fp8/run.h"
#include "torchamp/fp8_options.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

template <>
struct Fp8Extra<Policy> {
  using Options = Fp8Options;
  static std::shared_ptr<const OpRule> rule(const Fp8Options& options) {
    TORCH_CHECK_VALUE(options.recipe <= Fp8Recipe::nvfp4,
                      "Policy::fp8: ", static_cast<int>(options.recipe),
                      " is not a recipe of Fp8Recipe.");
    return std::make_shared<Fp8Rule>(options);
  }
};

/// Lets Policy::set accept Cast::fp8.
inline const bool fp8_is_registered = [] {
  fp8_rule_maker = [] { return Fp8Extra<Policy>::rule({}); };
  return true;
}();

}  // namespace detail

}  // namespace TORCHAMP_NAMESPACE
