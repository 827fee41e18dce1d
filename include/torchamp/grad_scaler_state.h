// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What torch.amp.GradScaler.state_dict() holds, by the same names (its growth_tracker has an
/// underscore in front). An empty state, as a disabled scaler gives it, has a scale of 0.
struct GradScalerState {
  double scale = 0.;
  double growth_factor = 2.;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  int64_t growth_tracker = 0;  ///< good iterations since the scale grew or a bad one

  bool empty() const { return scale == 0.; }
  bool operator==(const GradScalerState&) const = default;
};

}  // namespace TORCHAMP_NAMESPACE
