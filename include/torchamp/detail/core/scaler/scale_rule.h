// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

struct GradientBatch;
class Shards;

/// What a scale update remembers from one iteration to the next. Number is double on the host, and
/// a 0-dim tensor on a device, so that one text of the update serves both.
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
  const Number& amax;
};

/// What keeps, without a read, what was scaled in an iteration.
class LossWatch {
 public:
  virtual ~LossWatch() = default;
  /// `output` is scaled by a scale that lives on `home`.
  virtual void note(const at::Tensor& output, at::Device home) = 0;
  /// Puts what was noted into the largest magnitude of the gradients, which may be undefined.
  virtual void mark(at::Tensor& amax, const at::Tensor& scale) const = 0;
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
  /// Makes `amax`, which may be undefined, that of all processes. `shards` may be null.
  virtual void agree(const GradScalerOptions& options, const Shards* shards,
                     const at::Tensor& scale, at::Tensor& amax) const = 0;

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

}  // namespace torchamp::detail
