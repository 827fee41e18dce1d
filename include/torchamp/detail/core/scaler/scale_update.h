// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// What an update makes of a scale, on the host and on a device.

struct GradientBatch;
class Shards;

/// What a scale update remembers from one iteration to the next. Number is double on the host, and
/// a 0-dim tensor on a device where a ScaleRule changes the scale, so that one text of the update
/// serves both; without a rule, a device has CountedUpdate.
template <class Number>
struct ScaleMemory {
  Number scale;
  Number growth_tracker;
  Number credit;        ///< bad iterations that are still forgiven, plus one
  Number since_change;  ///< iterations since the scale last changed
  Number overflows;     ///< bad ones since it was last lowered
  Number skips;         ///< bad ones in a row
  /// What a ScaleRule remembers besides; empty without one.
  std::vector<Number> of_rule{};
};

/// One update, as torch.amp's rule makes it. Bool is a bool or a 0-dim bool tensor.
template <class Number, class Bool>
struct ScaleStep {
  const ScaleMemory<Number>& before;
  const Bool& bad;
  const Bool& lowers;
  const Bool& grows;
  /// The largest magnitude of the scaled gradients, 0 where it is not known.
  const Number& largest;
};

/// What keeps, without a read, what was scaled in an iteration.
class LossWatch {
 public:
  virtual ~LossWatch() = default;
  /// `output` is scaled by a scale that lives on `home`.
  virtual void note(const at::Tensor& output, at::Device home) = 0;
  /// Puts what was noted into the largest magnitude of the gradients, which may be undefined.
  virtual void mark(at::Tensor& largest, const at::Tensor& scale) const = 0;
  virtual void forget() = 0;
};

/// What updates remember on a device beside the scale and the skips in a row, and how they are made
/// there. Without a read, unless said.
class DeviceUpdate {
 public:
  virtual ~DeviceUpdate() = default;
  virtual void set(const ScaleMemory<double>& values) = 0;
  /// Reads the device.
  virtual void read(ScaleMemory<double>& values) const = 0;
  virtual void limit_growth_tracker(int64_t last) = 0;
  /// Changes `scale` in place, but does not see to its limits. `found_inf` is 0-dim fp32, 0 or 1;
  /// `largest` the largest magnitude of the scaled gradients, undefined where it is not known;
  /// `skips` what there were in a row before.
  virtual void make(const GradScalerOptions& options, const at::Tensor& scale,
                    const at::Tensor& found_inf, const at::Tensor& largest,
                    const at::Tensor& skips) = 0;
};

/// How a scale follows more than infs and NaNs: the largest magnitude of the gradients. It has no
/// state of its own.
class ScaleRule {
 public:
  /// Throws for options that contradict it.
  virtual void check_options(const char* call, const GradScalerOptions& options) const = 0;
  /// Null where the options want none.
  virtual std::unique_ptr<LossWatch> watch_losses(const GradScalerOptions& options) const = 0;
  /// ScaleMemory::of_rule at first; as many numbers as rule_numbers names.
  virtual std::vector<double> initial() const = 0;

  /// Sets `found_inf`, 0-dim fp32, 0 or 1, to 1 if any gradient is not finite, or would not be when
  /// divided by `scale`. Returns the largest magnitude of all: 0-dim, with at least the precision
  /// of fp32, where `found_inf` lies; not finite where one is not, undefined if they have no
  /// element.
  virtual at::Tensor check_and_measure(const std::vector<GradientBatch>& batches,
                                       const at::Tensor& scale, at::Tensor& found_inf) const = 0;
  /// Makes `largest`, which may be undefined, that of all processes. `shards` may be null.
  virtual void agree(const GradScalerOptions& options, const Shards* shards,
                     const at::Tensor& scale, at::Tensor& largest) const = 0;

  /// Changes what is remembered `after` an update.
  virtual void update(const GradScalerOptions& options, const ScaleStep<double, bool>& step,
                      ScaleMemory<double>& after) const = 0;
  virtual void update(const GradScalerOptions& options,
                      const ScaleStep<at::Tensor, at::Tensor>& step,
                      ScaleMemory<at::Tensor>& after) const = 0;
  /// For a scale that lives on the device of `scale`, and keeps within its limits by itself.
  virtual std::unique_ptr<DeviceUpdate> on_device(const ScaleMemory<double>& values,
                                                  const at::Tensor& scale) const = 0;

 protected:
  ~ScaleRule() = default;
};

/// What rules remember, by its names in archives, which are read without a rule, too.
inline constexpr const char* rule_numbers[] = {"torchamp_samples", "torchamp_log_mean",
                                               "torchamp_log_slow_mean", "torchamp_log_slow_square",
                                               "torchamp_log_aim"};

// The arithmetic of a scale update, for doubles on the host and 0-dim tensors on a device.

inline double choose(bool condition, double yes, double no) {
  return condition ? yes : no;
}
inline at::Tensor choose(const at::Tensor& condition, const at::Tensor& yes, const at::Tensor& no) {
  return at::where(condition, yes, no);
}
// Not at::where, which would copy the number to the device.
inline at::Tensor choose(const at::Tensor& condition, double yes, const at::Tensor& no) {
  return no.masked_fill(condition, yes);
}
inline at::Tensor choose(const at::Tensor& condition, const at::Tensor& yes, double no) {
  return yes.masked_fill(condition.logical_not(), no);
}

// at:: has these, too.
using std::clamp;
using std::isfinite;

inline double as_fp32(double x) {
  return static_cast<float>(x);
}
inline at::Tensor as_fp32(const at::Tensor& x) {
  return x.to(at::kFloat).to(x.scalar_type());
}

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
template <class F, class First, class... Others>
void for_each_number(const F& f, First& first, Others&... others) {
  f("scale", first.scale, others.scale...);
  f("growth_tracker", first.growth_tracker, others.growth_tracker...);
  for_each_own_number(f, first, others...);
  for (std::size_t i = 0; i < first.of_rule.size(); ++i) {
    f(rule_numbers[i], first.of_rule[i], others.of_rule[i]...);
  }
}

/// What an update starts from.
inline ScaleMemory<double> initial_memory(const GradScalerOptions& options) {
  return {.scale = static_cast<float>(options.init_scale),
          .growth_tracker = static_cast<double>(options.growth_tracker_start),
          .credit = static_cast<double>(options.hysteresis),
          .since_change = 0.,
          .overflows = 0.,
          .skips = 0.,
          .of_rule = options.follows_gradients ? options.follows_gradients.rule()->initial()
                                               : std::vector<double>()};
}

/// Whether ATen's kernel for torch.amp is the whole update. It keeps no credit and no rate of
/// overflows.
inline bool is_torch_update(const GradScalerOptions& options) {
  return options.dynamic && !options.follows_gradients && options.hysteresis == 1 &&
         options.overflow_tolerance == 0. && options.growth_tracker_start == 0;
}

/// What is remembered after an iteration that was `bad` or not (a bool, or a 0-dim bool tensor).
/// `largest` is the largest magnitude of the scaled gradients, 0 where it is not known; it matters
/// only to a ScaleRule.
template <class Number, class Bool>
[[gnu::cold]] ScaleMemory<Number> after_update(const GradScalerOptions& options,
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

  const Bool lowers = bad & (after.credit <= 0.) &
                      (after.overflows / after.since_change >= options.overflow_tolerance);
  const Bool grows = after.growth_tracker == static_cast<double>(options.growth_interval);
  const Number lowered =
      clamp(as_fp32(before.scale * options.backoff_factor), options.min_scale, options.max_scale);
  const Number raised = as_fp32(before.scale * options.growth_factor);
  const Number kept =
      choose(isfinite(raised), clamp(raised, options.min_scale, options.max_scale), before.scale);
  after.scale = choose(lowers, lowered, choose(grows, kept, before.scale));
  after.growth_tracker = choose(grows, 0., after.growth_tracker);
  after.since_change = choose(lowers | grows, 0., after.since_change);
  after.overflows = choose(lowers, 0., after.overflows);
  after.credit = choose(grows, full_credit, after.credit);
  if (options.hysteresis_refill == HysteresisRefill::good_or_backed_off) {
    after.credit = choose(lowers, full_credit, after.credit);
  }
  if (!before.of_rule.empty()) {
    options.follows_gradients.rule()->update(
        options, ScaleStep<Number, Bool>{before, bad, lowers, grows, largest}, after);
  }
  return after;
}

// ---- On a device --------------------------------------------------------------------------------

// Note [Hysteresis on a device]
// A device has one kernel for a whole update, torch.amp's, which takes any factors and knows
// nothing of hysteresis. Called some times more it does that, too, in 5 launches to 8 instead of
// some 45:
//   spent     as a scale that is 2^n after n bad iterations: "backed off" by 2, and, where the
//             credit is refilled, "grown" to next to nothing; then clamped to 1 to 2^hysteresis
//             (a smaller base serves a hysteresis above 60: up to some 10^4 it counts exactly)
//   the scale backed off by 1 and grown
//   the scale backed off where the iteration was bad and all credit is spent, and grown by 1
// An overflow_tolerance takes some ops more; what it needs to know is kept up to date for it alone.

/// The precision in which a device computes an update.
inline at::ScalarType number_type_on(at::Device device) {
  return facts_of(device.type()).fp64 == Fp64::no ? at::kFloat : at::kDouble;
}

/// The update of a scale that no ScaleRule changes.
class CountedUpdate final : public DeviceUpdate {
 public:
  [[gnu::cold]] CountedUpdate(const GradScalerOptions& options, const ScaleMemory<double>& values,
                              const at::Tensor& scale)
      : hysteresis_(static_cast<double>(options.hysteresis)),
        bits_(std::min(1., 60. / hysteresis_)),
        tracks_credit_(options.hysteresis_refill == HysteresisRefill::growth),
        trackers_(at::full({3}, 0, scale.options().dtype(at::kInt))),
        tracker_(trackers_.select(0, 0)),
        credit_tracker_(trackers_.select(0, 1)),
        unused_(trackers_.select(0, 2)),
        own_trackers_(trackers_.narrow(0, 0, tracks_credit_ ? 2 : 1)) {
    if (!is_torch_update(options)) spent_ = at::full({}, 1., scale.options());
    if (options.overflow_tolerance > 0.) {
      const auto number = scale.options().dtype(number_type_on(scale.device()));
      since_change_ = at::full({}, 0., number);
      overflows_ = at::full({}, 0., number);
    }
    CountedUpdate::set(values);
  }

  [[gnu::cold]] void set(const ScaleMemory<double>& values) override {
    own_trackers_.fill_(values.growth_tracker);
    if (spent_.defined()) spent_.fill_(std::exp2((hysteresis_ - values.credit) * bits_));
    if (!since_change_.defined()) return;
    since_change_.fill_(values.since_change);
    overflows_.fill_(values.overflows);
  }

  [[gnu::cold]] void read(ScaleMemory<double>& values) const override {
    values.growth_tracker = tracker_.item<double>();
    values.credit = hysteresis_;
    if (spent_.defined()) values.credit -= std::round(std::log2(spent_.item<double>()) / bits_);
    if (!since_change_.defined()) return;
    values.since_change = since_change_.item<double>();
    values.overflows = overflows_.item<double>();
  }

  [[gnu::cold]] void limit_growth_tracker(int64_t last) override { trackers_.clamp_max_(last); }

  [[gnu::cold]] void make(const GradScalerOptions& options, const at::Tensor& scale_tensor,
                          const at::Tensor& found_inf, const at::Tensor& /*largest*/,
                          const at::Tensor& /*skips*/) override {
    at::Tensor scale = scale_tensor;
    if (!spent_.defined()) {
      at::_amp_update_scale_(scale, tracker_, found_inf, options.growth_factor,
                             options.backoff_factor, options.growth_interval);
      return;
    }
    constexpr int64_t never = std::numeric_limits<int32_t>::max();
    constexpr double next_to_nothing = 0x1p-100;
    at::_amp_update_scale_(spent_, credit_tracker_, found_inf, next_to_nothing, std::exp2(bits_),
                           tracks_credit_ ? options.growth_interval : 1);
    at::Tensor lowers =
        at::threshold_backward(found_inf, spent_, std::exp2((hysteresis_ - 0.5) * bits_));
    if (since_change_.defined()) lowers = tolerate(options, found_inf, lowers);
    if (options.hysteresis_refill == HysteresisRefill::good_or_backed_off) {
      at::_amp_update_scale_(spent_, unused_, lowers, 1., next_to_nothing, never);
    }
    spent_.clamp_(1., std::exp2(hysteresis_ * bits_));
    at::_amp_update_scale_(scale, tracker_, found_inf, options.growth_factor, 1.,
                           options.growth_interval);
    at::_amp_update_scale_(scale, unused_, lowers, 1., options.backoff_factor, never);
    if (options.growth_tracker_start != 0) {
      own_trackers_.add_(found_inf.to(at::kInt), options.growth_tracker_start);
    }
  }

 private:
  /// What is left of `lowers` where few iterations were bad. Before the growth tracker changes.
  [[gnu::cold]] at::Tensor tolerate(const GradScalerOptions& options, const at::Tensor& found_inf,
                                    const at::Tensor& lowers) {
    since_change_.add_(1.);
    overflows_.add_(found_inf);
    const at::Tensor many = overflows_.div(since_change_).ge(options.overflow_tolerance);
    const at::Tensor grows = tracker_.eq(options.growth_interval - 1).mul(found_inf.eq(0.));
    at::Tensor still = lowers.mul(many);
    const at::Tensor stays = still.eq(0.);
    overflows_.mul_(stays);
    since_change_.mul_(stays.logical_and(grows.logical_not()));
    return still;
  }

  double hysteresis_;
  double bits_;          // of the factor by which `spent_` counts
  bool tracks_credit_;   // until it is refilled
  at::Tensor spent_;     // 0-dim fp32; undefined where one bad iteration lowers the scale
  at::Tensor trackers_;  // int32: the scale's, the credit's, and one that does not matter
  at::Tensor tracker_, credit_tracker_, unused_;  // the same, 0-dim
  at::Tensor own_trackers_;                       // those that start anew after a bad iteration
  at::Tensor since_change_, overflows_;           // undefined without an overflow_tolerance
};

}  // namespace torchamp::detail
