// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. fp8(): a policy whose matrix products are computed in fp8.
///
/// A CPU emulates a GPU's products, to rehearse a run. Operands and scales are bitwise equal.
/// Results are equal where a sum needs at most 14 bits (small integers). Otherwise an element
/// differs by the rounding of the result, and by up to K * 2^-12 of the largest of the K products
/// that it sums, because a GPU's fp8 units keep some 14 bits of each and a CPU 24.

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

/// Lets Policy::set and texts of policies have Cast::fp8.
inline const bool fp8_is_registered = [] {
  fp8_rule_maker = [](std::string_view options) { return fp8_rule(parse_fp8_options(options)); };
  return true;
}();

}  // namespace detail

/// Returns `policy` with the named products in fp8: operands, and the gradient that arrives in
/// backward, are quantised to 8 bits, with scales of the present tensors; the result has the
/// region's dtype. The ops are `linear`, `addmm`, `mm` and `matmul` (ops::dense), with a matrix as
/// their second factor.
///
///     const auto policy = torchamp::fp8(torchamp::Policy::standard(), torchamp::ops::dense);
///
/// GPUs with fp8 units compute the products; a CPU emulates them, with the same 8-bit operands and
/// scales. A call that fp8 does not support runs as lower_precision, which a CastRecorder counts.
/// In an fp32 region the rule has no effect. An inf or NaN in an operand turns all results that use
/// its scale into NaN: under `tensorwise` and `nvfp4` the whole result. Asking for a second
/// derivative is an error. A region that ends without a single product in fp8 warns once, and names
/// the products that it has called. Never synchronises. Keeps no statistics between calls; 8-bit
/// forms of parameters are cached like casts of weights: see AutocastOptions::cache.
///
/// Errors: the errors of Policy::set, and any other op; with `options.strict`, a device that
/// cannot, at the guard (for a module's policy, at its forward).
[[nodiscard]] inline Policy fp8(const Policy& policy, const OpNames& ops,
                                const Fp8Options& options = {}, const When& when = {}) {
  auto edited = std::make_shared<detail::PolicyData>(*policy.data());
  detail::add_edit(*edited, Cast::fp8, ops, when, detail::fp8_rule(options));
  return Policy(std::move(edited));
}

}  // namespace TORCHAMP_NAMESPACE
