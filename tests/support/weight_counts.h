// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/detail/extras/weights/derived.h"

/// How often casts and 8-bit forms of weights were found and made, and the bytes that are kept.
inline torchamp::detail::DerivedWeights::Counts weight_counts() {
  return torchamp::detail::derived_weights().counts();
}
