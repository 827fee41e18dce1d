// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

#include "torchamp/detail/bodies.h"
#include "torchamp/detail/overlay/weight_casts.h"
#include "torchamp/detail/weights/derived.h"
#include "torchamp/detail/weights/store.h"

namespace torchamp::detail {

/// Null where another version of torchamp owns the process: what cannot make a guard derives
/// nothing either.
inline DerivedWeights* derived_weights_if_any() noexcept {
  try {
    return &derived_weights();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

TORCHAMP_BODY DropWeightCasts::~DropWeightCasts() {
  at::autocast::clear_cache();
  DerivedWeights* const derived = derived_weights_if_any();
  if (derived == nullptr || derived->is_empty()) return;
  derived->end_window();
  if (optimizer_ == nullptr) return;
  for (const auto& group : optimizer_->param_groups()) derived->changed(group.params());
}

}  // namespace torchamp::detail
