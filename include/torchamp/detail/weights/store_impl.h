// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <memory>

#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/thread_policy.h"
#include "torchamp/detail/weights/derived.h"
#include "torchamp/detail/weights/store.h"
#include "torchamp/version.h"

namespace torchamp::detail {

TORCHAMP_BODY DerivedWeights& derived_weights() {
  static DerivedWeights& store = []() -> DerivedWeights& {
    std::atomic<KeptWeights*>& shared = shared_runtime().kept_weights;
    auto made = std::make_unique<DerivedWeights>();
    KeptWeights* known = nullptr;
    if (shared.compare_exchange_strong(known, made.get(), std::memory_order_acq_rel)) {
      return *made.release();
    }
    return static_cast<DerivedWeights&>(*known);  // of another library with the same layout
  }();
  return store;
}

TORCHAMP_BODY WeightKeep keep_of_this_thread() {
  const ThreadPolicy* policy = thread_policy();
  if (policy == nullptr) return {};
  const bool has_no_end =
      policy->keep.until == WeightKeep::Until::region_ends && policy->keep.region == 0;
  return has_no_end ? WeightKeep() : policy->keep;
}

}  // namespace torchamp::detail
