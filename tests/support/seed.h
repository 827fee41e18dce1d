// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/utils.h>

#include <cstdint>

#include "torchamp/detail/extras/shared/rng_state.h"

/// torch::manual_seed() for all devices: before LibTorch 2.8 it leaves a backend's generators out.
inline void seed_all(std::uint64_t seed) {
  torch::manual_seed(seed);
  for (at::Generator generator : torchamp::detail::default_generators()) {
    generator.set_current_seed(seed);
  }
}
