// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/weight_cache.h
#include <torchamp/torchamp.h>

torchamp::AutocastOptions options() {
  return {.cache = torchamp::WeightCache::kept};
}
