// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>

#include "torchamp/detail/bodies.h"
#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/weight_casts.h"

namespace torchamp::detail {

TORCHAMP_BODY DropWeightCasts::~DropWeightCasts() {
  at::autocast::clear_cache();
  KeptWeights* const kept = kept_weights();
  if (kept == nullptr) return;
  kept->end_window();
  if (optimizer_ == nullptr) return;
  for (const auto& group : optimizer_->param_groups()) kept->changed(group.params());
}

}  // namespace torchamp::detail
