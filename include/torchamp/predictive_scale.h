// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief GradScalerOptions::predictive(): a scale that follows the gradients' magnitude.

#include <ATen/core/Tensor.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "torchamp/detail/device_work.h"
#include "torchamp/detail/gradients/attached.h"
#include "torchamp/detail/gradients/unscale.h"
#include "torchamp/detail/scaler/gradient_forecast.h"
#include "torchamp/detail/scaler/loss_scale.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

/// @file
/// With this header a program can set GradScalerOptions::follows_gradients and forgives_bad_losses,
/// and call GradScalerOptions::predictive(), where they are explained.

namespace torchamp::detail {

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
    const std::uint64_t body = GraphBody::current_number();
    bad_ = bad_.defined() && body == body_ ? bad_.add(bad) : bad;
    body_ = body;
  }

  /// An inf where a loss was not finite, and only there.
  void mark(at::Tensor& largest, const at::Tensor& scale) const override {
    constexpr double most = std::numeric_limits<float>::max();
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const InternalOps guard;
    if (largest.defined()) largest = at::nan_to_num(largest, most, most);
    if (!bad_.defined() || body_ != GraphBody::current_number()) return;
    if (!largest.defined()) largest = at::zeros({}, scale.options());
    largest = largest.masked_fill(to_device_async(largest.device(), at::isnan(bad_)), infinity);
  }

  void forget() override { bad_ = at::Tensor(); }

 private:
  at::Tensor bad_;          // 0-dim fp32, NaN if one was not finite; undefined before the first
  std::uint64_t body_ = 0;  // the body of a CudaGraph in which it was made
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
    at::Tensor largest;
    for (const GradientBatch& batch : batches) {
      const std::vector<at::Tensor> values = largest_values(batch).values.gradients;
      if (values.empty()) continue;
      const at::Tensor here = to_device_async(found_inf.device(), at::stack(values).amax());
      largest = largest.defined() ? at::maximum(largest, here) : here;
    }
    if (largest.defined()) {
      const at::Tensor divided = largest.div(to_device_async(largest.device(), scale));
      found_inf.add_(divided.isfinite().logical_not()).clamp_max_(1.);
    }
    return largest;
  }

  void agree(const GradScalerOptions& options, const Shards* shards, const at::Tensor& scale,
             at::Tensor& largest) const override {
    if (!options.agree_largest && !shards) return;
    const InternalOps guard;
    at::Tensor common = largest.defined() ? largest.to(scale.options(), false, /*copy=*/true)
                                          : at::zeros({}, scale.options());
    options.agree_largest ? options.agree_largest(common) : shards->agree_largest(common);
    TORCH_CHECK(common.defined() && common.numel() == 1,
                "GradScaler: agree_largest has left no tensor of one element.");
    largest = common.reshape({}).to(scale.options());
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
    const auto& [before, bad, lowers, grows, largest] = step;
    constexpr double bad_loss = std::numeric_limits<double>::infinity();
    const Number known =
        options.forgives_bad_losses ? choose(largest == bad_loss, 0., largest) : largest;
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

    const Bool forgiven = bad & (largest == bad_loss);
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
