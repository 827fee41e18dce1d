// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <limits>

#include "torchamp/detail/scaler/gradient_forecast.h"
#include "torchamp/detail/scaler/scale_arithmetic.h"
#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

/// What a scale update remembers from one iteration to the next. Number is double on the host and a
/// 0-dim fp64 tensor on a device, so that one text of the update serves both.
template <class Number>
struct ScaleMemory {
  Number scale;
  Number growth_tracker;
  Number credit;        ///< bad iterations that are still forgiven, plus one
  Number since_change;  ///< iterations since the scale last changed
  Number overflows;     ///< bad ones since it was last lowered
  Number skips;         ///< bad ones in a row
  /// Only where GradScalerOptions::follows_gradients.
  GradientForecast<Number> forecast{};
};

/// Calls `f(name, number...)` for each number that torch.amp does not have, in all `memories`. The
/// names are those in archives, and the order that of their checksum.
template <class F, class... Memories>
void for_each_own_number(const F& f, Memories&... memories) {
  f("torchamp_credit", memories.credit...);
  f("torchamp_since_change", memories.since_change...);
  f("torchamp_overflows", memories.overflows...);
  f("torchamp_skips_in_a_row", memories.skips...);
}

/// The same for all numbers.
template <class F, class... Memories>
void for_each_number(const F& f, Memories&... memories) {
  f("scale", memories.scale...);
  f("growth_tracker", memories.growth_tracker...);
  for_each_own_number(f, memories...);
}

/// What an update starts from.
inline ScaleMemory<double> initial_memory(const GradScalerOptions& options) {
  return {.scale = static_cast<float>(options.init_scale),
          .growth_tracker = static_cast<double>(options.growth_tracker_start),
          .credit = static_cast<double>(options.hysteresis),
          .since_change = 0.,
          .overflows = 0.,
          .skips = 0.,
          .forecast = initial_forecast()};
}

/// Whether ATen's kernel for torch.amp is the whole update. It keeps no credit and no rate of
/// overflows.
inline bool is_torch_update(const GradScalerOptions& options) {
  return options.dynamic && !options.follows_gradients && options.hysteresis == 1 &&
         options.overflow_tolerance == 0. && options.growth_tracker_start == 0;
}

/// What is remembered after an iteration that was `bad` or not (a bool, or a 0-dim bool tensor).
/// `largest` is the largest magnitude of the scaled gradients, 0 where it is not known; it matters
/// only where GradScalerOptions::follows_gradients. With forgives_bad_losses it is an inf where a
/// loss was not finite, and only there.
template <class Number, class Bool>
ScaleMemory<Number> after_update(const GradScalerOptions& options,
                                 const ScaleMemory<Number>& before, const Bool& bad,
                                 const Number& largest = {}) {
  ScaleMemory<Number> after = before;
  after.skips = choose(bad, before.skips + 1., 0.);
  if (!options.dynamic) return after;

  const auto full_credit = static_cast<double>(options.hysteresis);
  const bool refills = options.hysteresis_refill != HysteresisRefill::growth;
  after.growth_tracker =
      choose(bad, static_cast<double>(options.growth_tracker_start), before.growth_tracker + 1.);
  const Number spent = clamp(before.credit - 1., 0., full_credit);
  if (refills) {
    after.credit = choose(bad, spent, full_credit);
  } else {
    after.credit = choose(bad, spent, before.credit);
  }
  after.since_change = before.since_change + 1.;
  after.overflows = choose(bad, before.overflows + 1., before.overflows);

  const auto lowers = bad & (after.credit <= 0.) &
                      (after.overflows / after.since_change >= options.overflow_tolerance);
  const auto grows = after.growth_tracker == static_cast<double>(options.growth_interval);
  const Number lowered =
      clamp(as_fp32(before.scale * options.backoff_factor), options.min_scale, options.max_scale);
  const Number raised = as_fp32(before.scale * options.growth_factor);
  const Number kept =
      choose(is_finite(raised), clamp(raised, options.min_scale, options.max_scale), before.scale);
  after.scale = choose(lowers, lowered, choose(grows, kept, before.scale));
  after.growth_tracker = choose(grows, 0., after.growth_tracker);
  after.since_change = choose(lowers | grows, 0., after.since_change);
  after.overflows = choose(lowers, 0., after.overflows);
  after.credit = choose(grows, full_credit, after.credit);
  if (options.hysteresis_refill == HysteresisRefill::good_or_backed_off) {
    after.credit = choose(lowers, full_credit, after.credit);
  }
  if (!options.follows_gradients) return after;

  constexpr double bad_loss = std::numeric_limits<double>::infinity();
  const Number known =
      options.forgives_bad_losses ? choose(largest == bad_loss, 0., largest) : largest;
  after.forecast = after_iteration<Number, Bool>(options, before.forecast, before.scale, bad,
                                                 before.skips == 0., lowers, grows, known);
  const Number predicted = clamp(predicted_scale(options, after.forecast, before.scale, bad, known),
                                 options.min_scale, options.max_scale);
  // Where nothing is known of the gradients, good iterations raise the scale as ever.
  after.scale = choose(bad, choose(lowers, predicted, before.scale),
                       choose(after.forecast.samples > 0., predicted, after.scale));
  if (!options.forgives_bad_losses) return after;

  const auto forgiven = bad & (largest == bad_loss);
  const auto forgive = [&](const char*, Number& now, const Number& then) {
    now = choose(forgiven, then, now);
  };
  const Number skips = after.skips;
  const Number since_change = choose(forgiven, before.since_change + 1., after.since_change);
  for_each_number(forgive, after, before);
  for_each_forecast_number(forgive, after.forecast, before.forecast);
  after.skips = skips;
  after.since_change = since_change;  // 0 would say that the scale was lowered
  return after;
}

/// Whether the step from `before` to `after` ought to have lowered a scale that is at its floor.
inline bool stays_at_floor(const GradScalerOptions& options, const ScaleMemory<double>& before,
                           const ScaleMemory<double>& after) {
  // since_change is 0 only where the scale was lowered or grew; a bad iteration has lowered it.
  return options.dynamic && after.skips > 0. && after.since_change == 0. &&
         before.scale <= options.min_scale;
}

}  // namespace torchamp::detail
