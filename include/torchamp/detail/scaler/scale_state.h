// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nan_to_num.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "torchamp/detail/brought_to.h"
#include "torchamp/detail/internal_ops.h"
#include "torchamp/detail/scaler/scale_bound.h"
#include "torchamp/detail/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

// Note [Where the scale is known]
//
// The scale lives in a 0-dim fp32 tensor on the device of the first loss. While the host has been
// told every overflow flag so far (an ordinary optimizer's step reads it; on a CPU it lies in host
// memory), it can compute the scale by itself: it keeps a copy of all that the rule remembers,
// applies the rule to that copy and writes the tensor only when the scale changes. update() then
// launches nothing, and asking for the scale reads nothing.
//
// The first flag that the host does not know, after a fused optimizer's step on a GPU, ends this:
// the rule's memory moves to the device for good, where update() is a few kernels in place. (Not
// back again: a captured CUDA graph may replay those kernels without the host's knowledge.)

inline RuleState<double> initial_state(const GradScalerOptions& rule) {
  return {.scale = as_fp32(rule.init_scale),
          .growth_tracker = static_cast<double>(rule.growth_tracker_start),
          .credit = static_cast<double>(rule.hysteresis),
          .since_change = 0.,
          .overflows = 0.,
          .skips = 0.};
}

/// Whether ATen's kernel for torch.amp is the whole rule. It keeps no credit and no rate of
/// overflows.
inline bool is_torch_rule(const GradScalerOptions& rule) {
  return rule.dynamic && rule.hysteresis == 1 && rule.overflow_tolerance == 0. &&
         rule.growth_tracker_start == 0;
}

/// A GradScaler's scale and what its rule remembers, on the host or on a device.
class ScaleState {
 public:
  explicit ScaleState(const GradScalerOptions& rule) : host_(initial_state(rule)) {}

  bool created() const { return scale_.defined(); }
  /// 0-dim fp32; undefined before create().
  const at::Tensor& scale() const { return scale_; }
  at::Tensor scale_on(at::Device device) const { return brought_to(device, scale_); }
  /// The host's copy; null where only the device knows.
  const RuleState<double>* host() const { return host_ ? &*host_ : nullptr; }

  void create(at::Device device) {
    const c10::InferenceMode no_inference(false);
    news_ = at::full({2}, host_->scale, at::TensorOptions(device).dtype(at::kFloat));
    scale_ = news_.select(0, 0);
    skips_ = news_.select(0, 1);
  }

  /// The scale and the bad iterations in a row, fp32.
  const at::Tensor& news() const { return news_; }

  /// All of it; reads the device where the host does not know.
  RuleState<double> read() const {
    if (host_) return *host_;
    return {.scale = scale_.item<double>(),
            .growth_tracker = growth_tracker_.item<double>(),
            .credit = credit_.item<double>(),
            .since_change = since_change_.item<double>(),
            .overflows = overflows_.item<double>(),
            .skips = skips_.item<double>()};
  }
  /// Where it needs no rule to know: the scale as it stays until it is set; 0 if not known.
  double scale_if_fixed() { return host_ ? host_->scale : replayed_ ? 0. : bound_.value(); }
  /// Whether it may be; see Note [A scale below 1].
  bool may_be_below_one(const GradScalerOptions& rule) {
    if (host_) return host_->scale < 1.;
    return rule.min_scale < 1. && (replayed_ || bound_.value() < 1.);
  }
  /// Whether the scale may be more than `limit`; see Note [A large scale and a clip].
  bool may_exceed(double limit, const GradScalerOptions& rule) const {
    if (host_) return host_->scale > limit;
    return rule.max_scale > limit && (replayed_ || at_most_ > limit);
  }
  /// From now on the device may change the scale without the host's knowledge.
  void expect_replays() { replayed_ = true; }

  double read_scale() const { return host_ ? host_->scale : scale_.item<double>(); }
  double read_skips() const { return host_ ? host_->skips : skips_.item<double>(); }
  /// 0-dim, on the device; only where the host does not know.
  const at::Tensor& skips() const { return skips_; }

  /// 1/scale as a 0-dim fp32 tensor on `device`, computed in fp64 as torch.amp does.
  at::Tensor inverse(at::Device device) const {
    if (host_) {
      return at::full({}, 1. / host_->scale, at::TensorOptions(device).dtype(at::kFloat));
    }
    return brought_to(device, scale_.to(number_type()).reciprocal().to(at::kFloat));
  }

  /// Puts these values in place of all that is there. The host must know them.
  void set(const RuleState<double>& values) {
    if (host_) {
      const bool changes = values.scale != host_->scale;
      host_ = values;
      if (created() && changes) scale_.fill_(values.scale);
      return;
    }
    scale_.fill_(values.scale);
    bound_.set(values.scale);
    at_most_ = values.scale;
    good_in_a_row_ = static_cast<int64_t>(values.growth_tracker);
    growth_tracker_.fill_(values.growth_tracker);
    credit_.fill_(values.credit);
    since_change_.fill_(values.since_change);
    overflows_.fill_(values.overflows);
    skips_.fill_(values.skips);
  }

  /// Takes the scale from a tensor that only the device can read; what is not a number within the
  /// limits becomes the nearest limit.
  void set_scale(const at::Tensor& scale, const GradScalerOptions& rule) {
    leave_host();
    bound_.set(0.);
    at_most_ = rule.max_scale;
    scale_.copy_(
        at::nan_to_num(scale.reshape({}), rule.min_scale).clamp(rule.min_scale, rule.max_scale),
        /*non_blocking=*/true);
  }

  /// As the scale is written by hand.
  void set_scale(double scale) {
    if (host_) {
      RuleState<double> values = *host_;
      values.scale = scale;
      set(values);
    } else {
      scale_.fill_(scale);
      bound_.set(scale);
      at_most_ = scale;
      good_in_a_row_ = std::numeric_limits<int64_t>::max() - 1;  // it may grow at once
    }
  }

  /// Lowers the scale at once, whatever hysteresis says.
  void back_off(const GradScalerOptions& rule) {
    RuleState<double> values = read();
    values.scale =
        clamp(as_fp32(values.scale * rule.backoff_factor), rule.min_scale, rule.max_scale);
    values.growth_tracker = static_cast<double>(rule.growth_tracker_start);
    values.since_change = 0.;
    values.overflows = 0.;
    set(values);
  }

  /// Keeps the tracker below a shorter interval, so that it is met at the next good iteration.
  void limit_growth_tracker(int64_t growth_interval) {
    const int64_t last = growth_interval - 1;
    if (host_) {
      host_->growth_tracker = std::min(host_->growth_tracker, static_cast<double>(last));
    } else {
      growth_tracker_.clamp_max_(last);
    }
  }

  /// One iteration whose flag only the device knows: 0-dim fp32 on the scale's device, non-zero if
  /// bad. In place, without a read.
  void advance(const GradScalerOptions& rule, const at::Tensor& found_inf) {
    leave_host();
    if (is_torch_rule(rule)) {
      at::_amp_update_scale_(scale_, growth_tracker_, found_inf, rule.growth_factor,
                             rule.backoff_factor, rule.growth_interval);
      scale_.clamp_(rule.min_scale, rule.max_scale);
      at::addcmul_out(skips_, found_inf, skips_, found_inf);
      follow(rule);
      return;
    }
    const at::ScalarType number = number_type();
    const RuleState<at::Tensor> after = next_state(
        rule,
        RuleState<at::Tensor>{scale_.to(number), growth_tracker_.to(number), credit_.to(number),
                              since_change_.to(number), overflows_.to(number), skips_.to(number)},
        found_inf != 0.);
    scale_.copy_(after.scale);
    growth_tracker_.copy_(after.growth_tracker);
    credit_.copy_(after.credit);
    since_change_.copy_(after.since_change);
    overflows_.copy_(after.overflows);
    skips_.copy_(after.skips);
    follow(rule);
  }

  /// Moves what the rule remembers to the device, for good.
  void leave_host() {
    if (!host_) return;
    const c10::InferenceMode no_inference(false);
    const auto on_device = [this](double value, at::ScalarType dtype) {
      return at::full({}, value, scale_.options().dtype(dtype));
    };
    growth_tracker_ = on_device(host_->growth_tracker, at::kInt);
    credit_ = on_device(host_->credit, number_type());
    since_change_ = on_device(host_->since_change, number_type());
    overflows_ = on_device(host_->overflows, number_type());
    skips_.fill_(host_->skips);
    bound_.set(host_->scale);
    at_most_ = host_->scale;
    good_in_a_row_ = static_cast<int64_t>(host_->growth_tracker);
    host_.reset();
  }

 private:
  at::ScalarType number_type() const { return scale_.is_mps() ? at::kFloat : at::kDouble; }

  void follow(const GradScalerOptions& rule) {
    const bool matters = rule.dynamic && rule.min_scale < 1. && !replayed_;
    if (matters) bound_.lower(rule.backoff_factor, rule.min_scale, scale_);
    if (!rule.dynamic) return;
    if (!is_torch_rule(rule)) {  // which may grow sooner
      at_most_ = rule.max_scale;
    } else if (++good_in_a_row_ >= rule.growth_interval) {
      good_in_a_row_ = 0;
      at_most_ *= rule.growth_factor;
    }
  }

  std::optional<RuleState<double>> host_;
  at::Tensor news_;           // what the host may want to hear of, in one piece: scale_ and skips_
  at::Tensor scale_, skips_;  // its elements
  // Where the host does not know; growth_tracker_ is int32, as _amp_update_scale_ wants it.
  at::Tensor growth_tracker_, credit_, since_change_, overflows_;
  ScaleBound bound_;
  double at_most_ = 0.;        // the scale is not above this
  int64_t good_in_a_row_ = 0;  // what growth_tracker_ may be where it is so
  bool replayed_ = false;
};

}  // namespace torchamp::detail
