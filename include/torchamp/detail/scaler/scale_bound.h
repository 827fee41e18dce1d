// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "torchamp/detail/host_values.h"

namespace torchamp::detail {

// Note [A scale below 1]
//
// Dividing by a scale below 1 may turn a finite gradient into an inf, which has to be found, too,
// and costs a second look at the gradients. A device's scale is not read for the sake of that. The
// host knows what it was once and by how much each update() may have lowered it since. Before this
// bound gets near 1, the scale is copied to host memory, and nobody waits for the copy: when it has
// arrived, the bound starts from it. So the second look is taken only where the scale is below 1 or
// just above it. Where a CUDA graph may replay updates that the host never sees, it is always
// taken, unless min_scale is 1 or more.

/// A number that a scale which only the device knows is not below.
class ScaleBound {
 public:
  double value() {
    if (copying_ && mirror_[0] != not_here_yet) {
      value_ = std::max(value_, static_cast<double>(mirror_[0]) * lowered_since_);
      copying_ = false;
    }
    return value_;
  }

  /// The host has set the scale; 0: to what it does not know.
  void set(double scale) {
    value_ = scale;
    lowered_since_ = 0.;  // what a copy under way will say is out of date
  }

  /// An update may have multiplied the scale by `factor`, and has not left it below `min_scale`.
  void lower(double factor, double min_scale, const at::Tensor& scale) {
    factor *= 1. - 0x1p-23;  // the device rounds
    value_ = std::max(value() * factor, min_scale);
    lowered_since_ *= factor;
    if (value_ < near_one && !copying_) {
      mirror_.send(scale, not_here_yet);
      copying_ = true;
      lowered_since_ = 1.;
    }
  }

 private:
  static constexpr float not_here_yet = -1.F;
  static constexpr double near_one = 0x1p10;

  double value_ = 0.;
  HostMirror mirror_;  // of the scale
  bool copying_ = false;
  double lowered_since_ = 0.;  // the copy was made
};

}  // namespace torchamp::detail
