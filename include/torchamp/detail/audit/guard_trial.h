// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/overlay/environment.h"
#include "torchamp/detail/overlay/policy_scope.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// What the guards of a thread do while an audit runs a step.
struct GuardTrial final : GuardOverride {
  /// Of guards on this device that are to run in 16 bits: which dtype they have instead, if any.
  std::optional<at::DeviceType> device = std::nullopt;
  std::optional<at::ScalarType> dtype = std::nullopt;
  mutable std::atomic<int64_t> guards_made = 0;  ///< while it was in force
  /// The dtype that the first such guard asked for.
  mutable std::atomic<at::ScalarType> asked_dtype = at::ScalarType::Undefined;

  at::ScalarType dtype_of_guard(at::DeviceType on, at::ScalarType asked,
                                bool enabled) const override {
    ++guards_made;
    if (!enabled || on != device || !is_16_bit(asked)) return asked;
    at::ScalarType none = at::ScalarType::Undefined;
    asked_dtype.compare_exchange_strong(none, asked);
    return dtype.value_or(asked);
  }

  /// As if no guard had been made yet.
  void forget_guards() const {
    guards_made = 0;
    asked_dtype = at::ScalarType::Undefined;
  }
};

/// Puts a trial in force on the calling thread, and on those that take over its state.
class TrialScope {
 public:
  explicit TrialScope(std::shared_ptr<const GuardTrial> trial) : scope_(with(std::move(trial))) {}

 private:
  static std::shared_ptr<const ThreadPolicy> with(std::shared_ptr<const GuardTrial> trial) {
    auto inner = copy_of(thread_policy());
    inner->guards = std::move(trial);
    return inner;
  }

  PolicyScope scope_;
};

}  // namespace torchamp::detail
