// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/weights/derived.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// The process's store of what is derived from weights, which the first call makes: see there. Any
/// thread.
DerivedWeights& derived_weights();

/// How long the calling thread keeps what it derives from weights: not at all outside of guards, in
/// those without a cache, and for a region that began before the store.
WeightKeep keep_of_this_thread();

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/weights/store_impl.h"  // IWYU pragma: export
#endif
