// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief StepResult: the result of GradScaler::step.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/scaler/step_ledger.h"
#include "torchamp/missing_gradients.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

class GradScaler;
namespace detail {
struct ScalerParts;
}

/// The result of GradScaler::step.
///
///     if (!scaler.step(optimizer)) std::cout << "skipped\n";
///
/// A query uses what the host knows, or else reads the device once, which waits for it; the answer
/// is remembered. A result that is never queried costs nothing. The answers describe the step,
/// whatever update() has done since. Copies share them. Not for concurrent use.
class StepResult {
 public:
  /// Whether the optimizer stepped. False: a gradient held an inf or a NaN, or there was no
  /// gradient.
  bool stepped() const { return record_->had_gradients && !record_->found_inf.read(); }
  /// As stepped().
  explicit operator bool() const { return stepped(); }

  /// The overflow flag, for decisions on the device: 0-dim fp32, non-zero if the step was skipped
  /// for an inf or a NaN. Undefined for a disabled scaler. Never reads.
  at::Tensor found_inf() const { return record_->found_inf.tensor; }

  /// The scale of the gradients; 1 for a disabled scaler.
  double scale() const { return record_->scale.read(); }

  /// Number of consecutive bad iterations, including this one; 0 if it stepped.
  int64_t skips_in_a_row() const {
    const bool bad = record_->found_inf.read();
    if (!bad && record_->had_gradients) return 0;
    return static_cast<int64_t>(record_->read_skips_before()) + (bad ? 1 : 0);
  }

  /// False if none of the optimizer's parameters had a gradient. Never reads.
  bool had_gradients() const { return record_->had_gradients; }

  /// If there was none: all parameters, with the reasons. Never reads.
  const std::vector<MissingGradient>& missing_gradients() const { return record_->missing; }

  /// The return value of the optimizer's step: with a closure the loss, otherwise undefined in
  /// general; undefined if it did not step.
  const at::Tensor& value() const { return record_->value; }

  /// With a closure: the largest number of attempts that one evaluation needed to be finite; 1 if
  /// none overflowed.
  int64_t attempts() const { return record_->attempts; }

 private:
  friend class GradScaler;
  friend struct detail::ScalerParts;
  explicit StepResult(std::shared_ptr<detail::StepRecord> record) : record_(std::move(record)) {}

  std::shared_ptr<detail::StepRecord> record_;
};

}  // namespace TORCHAMP_NAMESPACE
