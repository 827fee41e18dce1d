// SPDX-License-Identifier: BSD-3-Clause
#pragma once

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
  return policy == nullptr ? WeightKeep() : policy->keep;
}

}  // namespace torchamp::detail
