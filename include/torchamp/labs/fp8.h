// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. fp8(): a policy whose matrix products are computed in fp8.
///
/// A CPU emulates a GPU's products, so that you can rehearse a run. Operands and scales are bitwise
/// identical. Results are identical if the sums need at most 14 bits (small integers). Otherwise
/// they differ, because a GPU's fp8 units keep some 14 bits of each product and a CPU keeps 24. A
/// sum of K products differs by up to K * 2^-12 of the largest product, plus the rounding of the
/// result.

#include <c10/util/Exception.h>

#include <memory>
#include <string_view>
#include <utility>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/labs/detail/fp8/options_text.h"
#include "torchamp/labs/detail/fp8/run.h"
#include "torchamp/labs/fp8_options.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

inline std::shared_ptr<const OpRule> fp8_rule(const Fp8Options& options) {
  TORCH_CHECK_VALUE(options.recipe <= Fp8Recipe::nvfp4,
                    "torchamp::fp8: ", static_cast<int>(options.recipe),
                    " is not a recipe of Fp8Recipe.");
  return std::make_shared<Fp8Rule>(options);
}

/// Allows Cast::fp8 in Policy::set and in texts of policies.
inline const bool fp8_is_registered = [] {
  fp8_rule_maker = [](std::string_view options) { return fp8_rule(parse_fp8_options(options)); };
  return true;
}();

}  // namespace detail

/// Returns `policy` with the named products in fp8. The operands, and in backward the result's
/// gradient, are quantised to 8 bits, with scales that are computed from the same tensors; the
/// result has the region's dtype. The ops are `linear`, `addmm`, `mm` and `matmul` (ops::dense),
/// with a matrix as the second factor.
///
///     const auto policy = torchamp::fp8(torchamp::Policy::standard(), torchamp::ops::dense);
///
/// GPUs with fp8 units compute the products; a CPU emulates them, with the same 8-bit operands and
/// scales. A call that fp8 does not support runs as lower_precision, which a CastRecorder counts.
/// In an fp32 region the rule has no effect. An inf or NaN in an operand turns all results that use
/// the operand's scale into NaN; under `tensorwise` and `nvfp4` this is the whole result. A second
/// derivative is an error. If a region ends without a single product in fp8, the guard warns once
/// per program, and names the products that the region has called.
///
/// Never synchronises. Stores no statistics between calls. 8-bit forms of parameters are cached
/// like casts of weights: see AutocastOptions::cache.
///
/// Errors: the errors of Policy::set; an op outside of ops::dense. With `options.strict`, the guard
/// throws if the device has no such products in fp8 (for a module's policy, the module's forward
/// throws).
[[nodiscard]] inline Policy fp8(const Policy& policy, const OpNames& ops,
                                const Fp8Options& options = {}, const When& when = {}) {
  auto edited = std::make_shared<detail::PolicyData>(*policy.data());
  detail::add_edit(*edited, Cast::fp8, ops, when, detail::fp8_rule(options));
  return Policy(std::move(edited));
}

}  // namespace TORCHAMP_NAMESPACE
