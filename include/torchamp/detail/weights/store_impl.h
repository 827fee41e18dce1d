// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>

#include "torchamp/detail/bodies.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/weights/derived.h"
#include "torchamp/detail/weights/store.h"

namespace torchamp::detail {

TORCHAMP_BODY DerivedWeights& derived_weights() {
  return shared_runtime().derived_weights;
}

TORCHAMP_BODY WeightKeep keep_of_this_thread() {
  const ThreadPolicy* policy = thread_policy();
  if (policy == nullptr || !at::autocast::is_autocast_cache_enabled()) return {};
  return policy->keep;
}

}  // namespace torchamp::detail
