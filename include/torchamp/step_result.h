// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief StepResult: what came of GradScaler::step.

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

/// What came of a GradScaler::step.
///
///     if (!scaler.step(optimizer)) std::cout << "skipped\n";
///
/// A question is answered from what the host knows, or else by one read of the device, which waits
/// for it; the answer is remembered. A result that is never queried costs nothing. The answers are
/// those of the step, whatever update() did since. Copies share them. Not for use by several
/// threads at once.
class StepResult {
 public:
  /// Whether the optimizer stepped. False: a gradient held an inf or a NaN, or there was no
  /// gradient.
  bool stepped() const { return record_->had_gradients && !record_->found_inf.read(); }
  /// Whether the optimizer stepped: stepped().
  explicit operator bool() const { return stepped(); }

  /// The overflow flag where it lies, to decide by it on the device: 0-dim fp32, non-zero if the
  /// step was skipped for an inf or a NaN. Undefined for a disabled scaler. Never reads.
  at::Tensor found_inf() const { return record_->found_inf.tensor; }

  /// What the gradients were scaled by; 1 for a disabled scaler.
  double scale() const { return record_->scale.read(); }

  /// How many iterations in a row, this one included, held an inf or a NaN; 0 if it stepped.
  int64_t skips_in_a_row() const {
    const bool bad = record_->found_inf.read();
    if (!bad && record_->had_gradients) return 0;
    return static_cast<int64_t>(record_->read_skips_before()) + (bad ? 1 : 0);
  }

  /// False if none of the optimizer's parameters had a gradient. Never reads.
  bool had_gradients() const { return record_->had_gradients; }

  /// If there was none: every parameter, with the reason. Never reads.
  const std::vector<MissingGradient>& missing_gradients() const { return record_->missing; }

  /// What the optimizer's step returned: undefined in general, and if it did not step; with a
  /// closure, the loss.
  const at::Tensor& value() const { return record_->value; }

  /// With a closure: how often the loss was evaluated before all its gradients were finite; 1 means
  /// that the first attempt was good.
  int64_t attempts() const { return record_->attempts; }

 private:
  friend class GradScaler;
  friend struct detail::ScalerParts;
  explicit StepResult(std::shared_ptr<detail::StepRecord> record) : record_(std::move(record)) {}

  std::shared_ptr<detail::StepRecord> record_;
};

}  // namespace TORCHAMP_NAMESPACE
