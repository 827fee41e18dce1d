// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdint>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// How many steps some parameters of one device have taken. The exact number is on the device,
/// because the device decides which steps are skipped. The host has bounds, which are equal as long
/// as no step could be skipped.
struct StepCounter final : ReplayedState {
  StepCounter(at::Device device, int64_t steps)
      : value(at::full({}, static_cast<float>(steps), at::device(device).dtype(at::kFloat))),
        at_least(steps),
        at_most(steps) {}

  /// A copy of the count, for parameters on `device` whose steps are counted separately from now
  /// on.
  StepCounter copy_to(at::Device device) const {
    StepCounter copy(device, at_most);
    copy.value.copy_(value);
    copy.at_least = at_least;
    return copy;
  }

  /// Counts a step. If not `surely`, the step may have been skipped, as in a replay.
  void count(bool surely) {
    if (surely) ++at_least;
    ++at_most;
  }

  /// Whether the host does not know if any step was taken.
  bool may_be_first() const { return at_least == 0 && at_most > 0; }

  /// Updates the bounds from a copy that has arrived, or directly if the count is on the host.
  void learn() {
    if (!may_be_first()) return;
    float steps = 0.F;
    if (value.is_cpu()) {
      steps = *value.const_data_ptr<float>();
    } else if (asked && mirror[0] != not_here_yet) {
      steps = mirror[0];
      asked = false;
    }
    if (steps > 0.F) at_least = 1;
  }

  // A capture from before the first step is valid until the first step is taken: after it there is
  // less work.
  void settle() override {
    if (may_be_first() && value.item<float>() > 0.F) at_least = 1;
  }
  bool holds() override {
    learn();
    return may_be_first();
  }
  /// A CPU's count is at hand.
  bool wants_look() const override { return may_be_first() && !asked && !value.is_cpu(); }
  /// Starts a copy of the count to the host. Does not wait.
  void look() override {
    if (!wants_look()) return;
    mirror.send(value, not_here_yet);
    asked = true;
  }

  at::Tensor value;  ///< the count, 0-dim fp32
  int64_t at_least, at_most;

  HostMirror mirror{};  ///< of the count
  bool asked = false;   ///< whether a copy has been started

 private:
  static constexpr float not_here_yet = -1.F;
};

}  // namespace TORCHAMP_NAMESPACE::detail
