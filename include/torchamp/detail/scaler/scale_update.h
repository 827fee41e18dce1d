// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "torchamp/grad_scaler_options.h"

namespace torchamp::detail {

struct GradientBatch;
class Shards;

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

inline double clamp(double x, double low, double high) {
  return std::clamp(x, low, high);
}
inline at::Tensor clamp(const at::Tensor& x, double low, double high) {
  return at::clamp(x, low, high);
}

inline bool is_finite(double x) {
  return std::isfinite(x);
}
inline at::Tensor is_finite(const at::Tensor& x) {
  return at::isfinite(x);
}

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

/// The same for all numbers but a rule's.
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

  const Bool lowers = bad & (after.credit <= 0.) &
                      (after.overflows / after.since_change >= options.overflow_tolerance);
  const Bool grows = after.growth_tracker == static_cast<double>(options.growth_interval);
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
  if (const ScaleRule* const rule = options.follows_gradients.rule()) {
    rule->update(options, ScaleStep<Number, Bool>{before, bad, lowers, grows, largest}, after);
  }
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
