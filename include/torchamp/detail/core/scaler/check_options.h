// SPDX-License-Identifier: BSD-3-Clause
// Checks of a scaler's options and of a state that it loads.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"

namespace TORCHAMP_NAMESPACE::detail {

inline void check_scale(const char* call, double scale, const GradScalerOptions& options) {
  const auto narrow = static_cast<float>(scale);
  TORCHAMP_CHECK_VALUE(narrow >= static_cast<float>(options.min_scale) &&
                           narrow <= static_cast<float>(options.max_scale),
                       call, ": the scale is ", scale, ". It must be between min_scale (",
                       options.min_scale, ") and max_scale (", options.max_scale, ").");
}

inline void check_option(bool holds, const char* call, const char* what, Piece value,
                         const char* range) {
  TORCHAMP_CHECK_VALUE(holds, call, ": ", what, " is ", value, ". ", range);
}

inline void check_growth_factor(const char* call, double factor) {
  check_option(factor > 1. && std::isfinite(factor), call, "the growth factor", factor,
               "It must be finite and above 1. For a constant scale, pass {.dynamic = false}.");
}

inline void check_backoff_factor(const char* call, double factor) {
  check_option(factor > 0. && factor < 1., call, "the backoff factor", factor,
               "It must be between 0 and 1. For a constant scale, pass {.dynamic = false}.");
}

inline void check_growth_interval(const char* call, int64_t interval) {
  check_option(interval >= 1 && interval <= std::numeric_limits<int32_t>::max(), call,
               "the growth interval", interval, "It must be between 1 and 2^31 - 1.");
}

inline void check_options(const GradScalerOptions& options) {
  constexpr const char* call = "GradScaler";
  TORCHAMP_CHECK_VALUE(options.min_scale >= std::numeric_limits<float>::min() &&
                           options.max_scale <= std::numeric_limits<float>::max() &&
                           options.min_scale <= options.max_scale,
                       call, ": min_scale is ", options.min_scale, " and max_scale ",
                       options.max_scale,
                       ". Both must be between 2^-126 and the largest fp32 number, and min_scale ",
                       "must not exceed max_scale.");
  check_scale(call, options.init_scale, options);
  check_growth_factor(call, options.growth_factor);
  check_backoff_factor(call, options.backoff_factor);
  check_growth_interval(call, options.growth_interval);
  check_option(options.hysteresis >= 1, call, "the hysteresis", options.hysteresis,
               "It must be 1 (lower the scale at once) or more.");
  check_option(options.growth_tracker_start <= 0 &&
                   options.growth_tracker_start >= std::numeric_limits<int32_t>::min(),
               call, "growth_tracker_start", options.growth_tracker_start,
               "It must be 0, or below 0 to delay growth after a bad iteration.");
  check_option(options.check_order.first_iterations >= 0, call, "check_order.first_iterations",
               options.check_order.first_iterations, "It must be 0 (no check) or more.");
  check_option(options.max_skips_in_a_row >= 0, call, "max_skips_in_a_row",
               options.max_skips_in_a_row, "It must be 0 (no limit) or more.");
  const bool calls = options.at_min_scale == AtLimit::call ||
                     (options.at_max_skips == AtLimit::call && options.max_skips_in_a_row > 0);
  TORCHAMP_CHECK_VALUE(!calls || options.on_limit, call,
                       ": a limit is set to AtLimit::call and on_limit is empty. Set on_limit.");
}

inline void check_state(const char* call, const GradScalerState& state,
                        const GradScalerOptions& options) {
  TORCHAMP_CHECK_VALUE(!state.empty(), call,
                       ": the state is empty; it was probably saved from a disabled GradScaler.");
  check_scale(call, state.scale, options);
  check_growth_factor(call, state.growth_factor);
  check_backoff_factor(call, state.backoff_factor);
  check_growth_interval(call, state.growth_interval);
  check_option(state.growth_tracker >= std::numeric_limits<int32_t>::min() &&
                   state.growth_tracker <= std::numeric_limits<int32_t>::max(),
               call, "the growth tracker", state.growth_tracker, "It must be a count of 32 bits.");
}

}  // namespace TORCHAMP_NAMESPACE::detail
