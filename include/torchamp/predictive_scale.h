// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief GradScalerOptions::predictive(): a scale that follows the gradients' magnitude.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/max.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/min.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/gradients/unscale.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

/// @file
/// With this header a program can set GradScalerOptions::follows_gradients and forgives_bad_losses,
/// and call GradScalerOptions::predictive(), where they are explained.

namespace torchamp::detail {

// For doubles on the host and 0-dim tensors on a device, as in scale_update.h. Where std and at
// have one name for both, a using-declaration and the argument find the one that fits.

// Note [A scale that looks ahead]
//
// OpenSeq2Seq's LogMaxScaler (open_seq2seq/optimizers/automatic_loss_scaler.py) takes the
// logarithms of the gradients' largest magnitudes for normally distributed and chooses the scale so
// that one in a thousand would overflow: 2^(16 - mean - 3.09 sigma), of moving averages. What is
// different here:
//
// - A bad iteration adds the logarithm of 2^16 over the scale to the averages. LogMaxScaler adds
//   2^16 itself, which ruins them for thousands of iterations. But no more than 2^4 over the mean,
//   once for a run of bad iterations, and nothing before the first good one: a batch of NaNs says
//   nothing of the gradients.
// - The averages are right from the first iteration on, and the latest magnitude counts as well.
// - It aims at 2^13 instead of 2^16, for what lies between the loss and a parameter may be larger
//   than the parameter's gradient. The aim backs off and grows as torch.amp's scale does.
// - After a bad iteration the scale retreats by 2^12, or to 1 if nothing is known of the gradients,
//   for one good iteration to measure them.
// - A loss that is not finite tells that the scale had no part in it: such an iteration can be
//   forgiven. Gradients alone do not tell an overflow in the first step of backward from a batch of
//   NaNs. Not by default: processes agree on infs of averaged gradients, but not on losses.
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
/// magnitude being `amax` then (0: not known). `Bool` like in after_update; `is_first`: of a run
/// of bad iterations; `lowers` and `grows`: whether scales do that are torch.amp's.
template <class Number, class Bool>
GradientForecast<Number> after_iteration(const GradScalerOptions& options,
                                         const GradientForecast<Number>& before,
                                         const Number& scale, const Bool& bad, const Bool& is_first,
                                         const Bool& lowers, const Bool& grows,
                                         const Number& amax) {
  using Constants = ForecastConstants;
  using std::log2, std::max, std::min, std::pow;
  GradientForecast<Number> after = before;
  const auto is_sample = choose(bad, choose(is_first, before.samples, 0.), amax) > 0.;
  const Number log_scale = log2(scale);
  const Number overflowed = min(Constants::overflow - log_scale, before.mean + Constants::surprise);
  const Number sample = choose(bad, max(overflowed, before.mean), log2(amax) - log_scale);
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
                       const Number& scale, const Bool& bad, const Number& amax) {
  using Constants = ForecastConstants;
  using std::exp2, std::floor, std::log2, std::max, std::min, std::sqrt;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const Number variance = clamp(now.slow_square - now.slow_mean * now.slow_mean, 0., infinity);
  const Number expected = now.mean + sqrt(variance) * Constants::sigmas;
  const Number latest = choose(bad, expected, log2(amax) - log2(scale));
  // Nothing is known of the latest if it is -inf.
  constexpr double rounding = 1e-6;  // so that a whole number stays one
  const Number target = exp2(floor(now.aim - max(expected, latest) + rounding));
  const Number lower = choose(
      scale > 1., choose(now.samples > 0., clamp(scale * Constants::retreat, 1., infinity), 1.),
      as_fp32(scale * options.backoff_factor));
  return choose(bad, choose(now.samples > 0., min(target, lower), lower), target);
}

/// Whether all outputs that were scaled in an iteration were finite.
class BadLosses final : public LossWatch {
 public:
  void note(const at::Tensor& output, at::Device home) override {
    if (!output.is_floating_point()) return;
    const InternalOps guard;
    at::Tensor bad = output.detach();
    bad = bad.sub(bad);  // 0, or NaN
    if (bad.dim() > 0) bad = bad.sum();
    bad = to_device_async(home, bad.to(at::kFloat));
    bad_ = bad_.defined() && body_ == current_body() ? bad_.add(bad) : bad;
    body_ = current_body();
  }

  /// An inf where a loss was not finite, and only there.
  void mark(at::Tensor& amax, const at::Tensor& scale) const override {
    constexpr double most = std::numeric_limits<float>::max();
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const InternalOps guard;
    if (amax.defined()) amax = at::nan_to_num(amax, most, most);
    if (!bad_.defined() || body_ != current_body()) return;
    if (!amax.defined()) amax = at::zeros({}, scale.options());
    amax = amax.masked_fill(to_device_async(amax.device(), at::isnan(bad_)), infinity);
  }

  void forget() override { bad_ = at::Tensor(); }

 private:
  static std::shared_ptr<const void> current_body() {
    return GraphBody::is_running() ? GraphBody::current()->identity : nullptr;
  }

  at::Tensor bad_;  // 0-dim fp32, NaN if one was not finite; undefined before the first
  std::shared_ptr<const void> body_;  // the body of a CudaGraph in which it was made; or null
};

/// See Note [A scale that looks ahead].
class PredictiveRule final : public ScaleRule {
 public:
  void check_options(const char* call, const GradScalerOptions& options) const override {
    TORCH_CHECK_VALUE(
        options.follows_gradients, call,
        ": forgives_bad_losses needs follows_gradients. Start from GradScalerOptions::predictive() "
        "and set forgives_bad_losses in what it returns.");
    TORCH_CHECK_VALUE(!options.agree_found_inf == !options.agree_largest, call,
                      ": follows_gradients is set with only one of agree_found_inf and "
                      "agree_largest. Set both, otherwise the processes' scales diverge.");
    TORCH_CHECK_VALUE(options.dynamic, call,
                      ": follows_gradients is set without dynamic, so the scale would never "
                      "change. Leave dynamic set, or use GradScalerOptions::fixed(scale).");
  }

  std::unique_ptr<LossWatch> watch_losses(const GradScalerOptions& options) const override {
    return options.forgives_bad_losses ? std::make_unique<BadLosses>() : nullptr;
  }

  /// No samples yet.
  std::vector<double> initial() const override {
    return {0., 0., 0., 0., ForecastConstants::highest_aim};
  }

  at::Tensor check_and_measure(const std::vector<GradientBatch>& batches, const at::Tensor& scale,
                               at::Tensor& found_inf) const override {
    at::Tensor amax;
    for (const GradientBatch& batch : batches) {
      const std::vector<at::Tensor> values = amaxes_of(batch).gradients;
      if (values.empty()) continue;
      const at::Tensor here = to_device_async(found_inf.device(), at::stack(values).amax());
      amax = amax.defined() ? at::maximum(amax, here) : here;
    }
    if (amax.defined()) {
      const at::Tensor divided = amax.div(to_device_async(amax.device(), scale));
      found_inf.add_(divided.isfinite().logical_not()).clamp_max_(1.);
    }
    return amax;
  }

  void agree(const GradScalerOptions& options, const Shards* shards, const at::Tensor& scale,
             at::Tensor& amax) const override {
    if (!options.agree_largest && !shards) return;
    const InternalOps guard;
    at::Tensor common = amax.defined() ? amax.to(scale.options(), false, /*copy=*/true)
                                       : at::zeros({}, scale.options());
    options.agree_largest ? options.agree_largest(common) : shards->agree_largest(common);
    TORCH_CHECK(common.defined() && common.numel() == 1,
                "GradScaler: agree_largest has left no tensor of one element.");
    amax = common.reshape({}).to(scale.options());
  }

  void update(const GradScalerOptions& options, const ScaleStep<double, bool>& step,
              ScaleMemory<double>& after) const override {
    predict(options, step, after);
  }
  void update(const GradScalerOptions& options, const ScaleStep<at::Tensor, at::Tensor>& step,
              ScaleMemory<at::Tensor>& after) const override {
    predict(options, step, after);
  }

 private:
  template <class Number, class Bool>
  static void predict(const GradScalerOptions& options, const ScaleStep<Number, Bool>& step,
                      ScaleMemory<Number>& after) {
    const auto& [before, bad, lowers, grows, amax] = step;
    constexpr double bad_loss = std::numeric_limits<double>::infinity();
    const Number known = options.forgives_bad_losses ? choose(amax == bad_loss, 0., amax) : amax;
    const GradientForecast<Number> forecast =
        after_iteration<Number, Bool>(options, forecast_of(before.of_rule), before.scale, bad,
                                      before.skips == 0., lowers, grows, known);
    const Number predicted = clamp(predicted_scale(options, forecast, before.scale, bad, known),
                                   options.min_scale, options.max_scale);
    // Where nothing is known of the gradients, good iterations raise the scale as ever.
    after.scale = choose(bad, choose(lowers, predicted, before.scale),
                         choose(forecast.samples > 0., predicted, after.scale));
    after.of_rule = numbers_of(forecast);
    if (!options.forgives_bad_losses) return;

    const Bool forgiven = bad & (amax == bad_loss);
    const auto forgive = [&](const char*, Number& now, const Number& then) {
      now = choose(forgiven, then, now);
    };
    const Number skips = after.skips;
    const Number since_change = choose(forgiven, before.since_change + 1., after.since_change);
    for_each_number(forgive, after, before);
    after.skips = skips;
    after.since_change = since_change;  // 0 would mean that the scale backed off
  }
};

template <>
struct PredictiveScale<bool> {
  static const ScaleRule* rule() {
    static const PredictiveRule predictive;
    return &predictive;
  }
};

}  // namespace torchamp::detail
