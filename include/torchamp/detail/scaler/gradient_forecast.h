// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sqrt.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "torchamp/detail/scaler/loss_scale.h"
#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

// For doubles on the host and 0-dim tensors on a device, as in loss_scale.h. Where std and at
// have one name for both, a using-declaration and the argument find the one that fits.

inline double maximum_of(double a, double b) {
  return std::max(a, b);
}
inline at::Tensor maximum_of(const at::Tensor& a, const at::Tensor& b) {
  return at::maximum(a, b);
}

inline double minimum_of(double a, double b) {
  return std::min(a, b);
}
inline at::Tensor minimum_of(const at::Tensor& a, const at::Tensor& b) {
  return at::minimum(a, b);
}

// Note [A scale that looks ahead]
//
// OpenSeq2Seq's LogMaxScaler (open_seq2seq/optimizers/automatic_loss_scaler.py) takes the
// logarithms of the gradients' largest magnitudes for normally distributed and chooses the scale so
// that one in a thousand would overflow: 2^(16 - mean - 3.09 sigma), of moving averages. What is
// different here:
//
// - A bad iteration tells that the gradients were at least 2^16 over the scale: this, as a
//   logarithm, is what it adds to the averages. LogMaxScaler adds the number 2^16 instead of its
//   logarithm, 16, and does not divide it by the scale, so that one overflow ruins the averages for
//   thousands of iterations. But no more than 2^4 over the mean, and once for a run of bad
//   iterations, since a batch of NaNs says nothing of the gradients. Before the first good
//   iteration, it adds nothing.
// - The averages are weighed so that they are right from the first iteration on.
// - The latest magnitude counts as well, so that the scale follows at once where gradients grow.
// - It aims at 2^13 instead of 2^16, for what lies between the loss and a parameter may be larger
//   than the parameter's gradient. Where that overflows all the same, the aim is lowered by the
//   backoff factor, once for a run of bad iterations, and raised again by the growth factor after
//   growth_interval good ones: as torch.amp does with its scale.
// - After a bad iteration, which does not tell how large the gradients were, the scale retreats by
//   2^12, or to 1 if nothing is known of the gradients, for one good iteration to measure them.
// - A loss that is not finite says that infs and NaNs of the gradients are none of the scale's: the
//   scale had no part in it yet. Such an iteration can be forgiven altogether
//   (forgives_bad_losses). Gradients alone do not tell: an overflow of the scale in the first step
//   of backward spoils all of them as a batch of NaNs does, and their magnitudes before it are far
//   below fp16's limit in both cases, as the aim has them. Not by default: processes whose
//   gradients are averaged find the same infs without agreeing on anything, but each knows its own
//   loss alone.
// - The scale is a power of two: multiplying and dividing by it are exact.

/// What is known of the gradients' largest magnitudes. Logarithms are to the base 2, of the
/// unscaled gradients.
template <class Number>
struct GradientForecast {
  Number samples;      ///< how many there were
  Number mean;         ///< of the logarithms of the latest
  Number slow_mean;    ///< of more of them
  Number slow_square;  ///< the mean of their squares
  Number aim;          ///< the logarithm that the scaled gradients are to have
};

/// Its numbers, in the order of rule_numbers.
template <class Number>
std::vector<Number> numbers_of(const GradientForecast<Number>& forecast) {
  return {forecast.samples, forecast.mean, forecast.slow_mean, forecast.slow_square, forecast.aim};
}
template <class Number>
GradientForecast<Number> forecast_of(const std::vector<Number>& numbers) {
  return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
}

struct ForecastConstants {
  static constexpr double highest_aim = 13.;
  static constexpr double lowest_aim = -18.;
  static constexpr double overflow = 16.;  ///< the logarithm of what fp16 cannot hold
  static constexpr double surprise = 4.;   ///< the most that a bad iteration adds to the mean
  static constexpr double sigmas = 3.09;
  static constexpr double decay = 0.99;
  static constexpr double slow_decay = 0.9995;
  static constexpr double retreat = 0x1p-12;
};

/// What is known after an iteration whose gradients were multiplied by `scale`, their largest
/// magnitude being `largest` then (0: not known). `Bool` as in after_update; `is_first`: of a run
/// of bad iterations; `lowers` and `grows`: whether scales do that are torch.amp's.
template <class Number, class Bool>
GradientForecast<Number> after_iteration(const GradScalerOptions& options,
                                         const GradientForecast<Number>& before,
                                         const Number& scale, const Bool& bad, const Bool& is_first,
                                         const Bool& lowers, const Bool& grows,
                                         const Number& largest) {
  using Constants = ForecastConstants;
  using std::log2, std::pow;
  GradientForecast<Number> after = before;
  const auto is_sample = choose(bad, choose(is_first, before.samples, 0.), largest) > 0.;
  const Number log_scale = log2(scale);
  const Number overflowed =
      minimum_of(Constants::overflow - log_scale, before.mean + Constants::surprise);
  const Number sample = choose(bad, maximum_of(overflowed, before.mean), log2(largest) - log_scale);
  const Number samples = before.samples + 1.;
  const auto average = [&](const Number& mean, const Number& value, double decay) {
    const Number weight = (1. - decay) / (1. - pow(decay, samples));
    return choose(is_sample, mean + (value - mean) * weight, mean);
  };
  after.samples = choose(is_sample, samples, before.samples);
  after.mean = average(before.mean, sample, Constants::decay);
  after.slow_mean = average(before.slow_mean, sample, Constants::slow_decay);
  after.slow_square = average(before.slow_square, sample * sample, Constants::slow_decay);
  after.aim = choose(lowers & is_first & (before.samples > 0.),
                     before.aim + std::log2(options.backoff_factor),
                     choose(grows, before.aim + std::log2(options.growth_factor), before.aim));
  after.aim = clamp(after.aim, Constants::lowest_aim, Constants::highest_aim);
  return after;
}

/// The scale for the next iteration, within no limits yet; `now` as after_iteration() gave it.
template <class Number, class Bool>
Number predicted_scale(const GradScalerOptions& options, const GradientForecast<Number>& now,
                       const Number& scale, const Bool& bad, const Number& largest) {
  using Constants = ForecastConstants;
  using std::exp2, std::floor, std::log2, std::sqrt;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const Number variance = clamp(now.slow_square - now.slow_mean * now.slow_mean, 0., infinity);
  const Number expected = now.mean + sqrt(variance) * Constants::sigmas;
  const Number latest = choose(bad, expected, log2(largest) - log2(scale));
  // Nothing is known of the latest if it is -inf.
  constexpr double rounding = 1e-6;  // so that a whole number stays one
  const Number target = exp2(floor(now.aim - maximum_of(expected, latest) + rounding));
  const Number lower = choose(
      scale > 1., choose(now.samples > 0., clamp(scale * Constants::retreat, 1., infinity), 1.),
      as_fp32(scale * options.backoff_factor));
  return choose(bad, choose(now.samples > 0., minimum_of(target, lower), lower), target);
}

}  // namespace torchamp::detail
