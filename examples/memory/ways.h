// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/master_weights.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

/// How a model is trained with AdamW.
struct Way {
  std::string name;
  bool autocast = false;  ///< an fp32 model under a guard
  bool masters = false;   ///< a bf16 model with masters
  torchamp::MasterStorage storage = torchamp::MasterStorage::full;
  bool main_gradients = false;
  bool sharded = false;  ///< masters, states and gradients over all processes
  bool recomputed = false;
};

inline const std::vector<Way>& all_ways() {
  constexpr auto full = torchamp::MasterStorage::full, split = torchamp::MasterStorage::split;
  static const std::vector<Way> ways{
      {.name = "fp32"},
      {.name = "autocast", .autocast = true},
      {.name = "autocast, recomputed", .autocast = true, .recomputed = true},
      {.name = "masters", .masters = true, .storage = full},
      {.name = "masters, main gradients", .masters = true, .storage = full, .main_gradients = true},
      {.name = "split, main gradients", .masters = true, .storage = split, .main_gradients = true},
      {.name = "sharded", .masters = true, .storage = full, .sharded = true},
      {.name = "all together",
       .masters = true,
       .storage = split,
       .sharded = true,
       .recomputed = true},
  };
  return ways;
}

/// What weights take, in bytes, or in bytes per weight.
struct Bytes {
  double model = 0., masters = 0., states = 0.;
  double gradients = 0.;  ///< at the end of a backward pass, when there are most

  double kept() const { return model + masters + states; }
  double sum() const { return kept() + gradients; }

  Bytes operator*(double weights) const {
    return {model * weights, masters * weights, states * weights, gradients * weights};
  }
  Bytes operator+(const Bytes& other) const {
    return {model + other.model, masters + other.masters, states + other.states,
            gradients + other.gradients};
  }
};

/// Of a weight that a way with masters keeps in 16 bits, on each of so many processes.
inline Bytes bytes_a_weight(const Way& way, int processes) {
  if (!way.masters) return {.model = 4., .states = 8., .gradients = 4.};
  const double share = way.sharded ? 1. / processes : 1.;
  const double narrow_gradients = way.main_gradients || way.sharded ? 0. : 2.;
  return {.model = 2.,
          .masters = (way.storage == torchamp::MasterStorage::split ? 2. : 4.) * share,
          .states = 8. * share,
          .gradients = narrow_gradients + 4. * share};
}

/// Of a weight that stays fp32: norms.
inline Bytes bytes_an_fp32_weight(const Way& way, int processes) {
  const double share = way.sharded ? 1. / processes : 1.;
  return {.model = 4.,
          .masters = way.sharded ? 4. * share : 0.,
          .states = 8. * share,
          .gradients = 4. * share};
}
