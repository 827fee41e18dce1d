// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/version.h"

namespace torchamp::detail {

/// What a scale update remembers from one iteration to the next. Number is double on the host, and
/// a 0-dim tensor on a device, so that one text of the update serves both.
template <class Number>
struct ScaleMemory {
  Number scale;
  Number growth_tracker;
  Number credit;        ///< bad iterations that are still forgiven, plus one
  Number since_change;  ///< iterations since the scale last changed
  Number overflows;     ///< bad ones since it was last lowered
  Number skips;         ///< bad ones in a row
};

/// Calls `f(name, number...)` for each number that torch.amp does not have, in all `memories`. The
/// names are those in archives, and the order that of their checksum.
template <class F, class... Memories>
void for_each_own_number(const F& f, Memories&... memories) {
  f("torchamp_credit", memories.credit...);
  f("torchamp_since_change", memories.since_change...);
  f("torchamp_overflows", memories.overflows...);
  f("torchamp_skips_in_a_row", memories.skips...);
}

/// The same for all numbers.
template <class F, class... Memories>
void for_each_number(const F& f, Memories&... memories) {
  f("scale", memories.scale...);
  f("growth_tracker", memories.growth_tracker...);
  for_each_own_number(f, memories...);
}

}  // namespace torchamp::detail
