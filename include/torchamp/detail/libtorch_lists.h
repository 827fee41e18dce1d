// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>

#include <string>
#include <string_view>

#include "torchamp/cast.h"
#include "torchamp/detail/overload_rules.h"

namespace torchamp::detail {

// "pow, Tensor_Scalar" -> "aten::pow.Tensor_Scalar"
inline std::string listed_name(std::string_view entry) {
  const auto comma = entry.find(',');
  std::string name = "aten::" + std::string(entry.substr(0, comma));
  if (comma != std::string_view::npos) {
    name += '.' + std::string(entry.substr(entry.find_first_not_of(' ', comma + 1)));
  }
  return name;
}

/// The rules on LibTorch's own CUDA lists, by full overload name ("aten::pow.Tensor_Scalar").
/// Read from the macros of ATen/autocast_mode.h, so that a newer LibTorch's lists are followed.
inline RuleMap read_libtorch_cuda_lists() {
  RuleMap lists;
  const auto add = [&](const char* entry, Cast cast) { lists[listed_name(entry)].cast = cast; };
#define TORCHAMP_LOWER(...) add(#__VA_ARGS__, Cast::lower_precision);
#define TORCHAMP_FP32(...) add(#__VA_ARGS__, Cast::fp32);
#define TORCHAMP_PROMOTE(...) add(#__VA_ARGS__, Cast::promote);
#define TORCHAMP_APPEND_DTYPE(function, name, ...) add(name, Cast::fp32);
  AT_FORALL_LOWER_PRECISION_FP(TORCHAMP_LOWER)
  AT_FORALL_FP32(TORCHAMP_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TORCHAMP_FP32)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(TORCHAMP_APPEND_DTYPE)
  AT_FORALL_PROMOTE(TORCHAMP_PROMOTE)
#undef TORCHAMP_LOWER
#undef TORCHAMP_FP32
#undef TORCHAMP_PROMOTE
#undef TORCHAMP_APPEND_DTYPE
  return lists;
}

inline const RuleMap& libtorch_cuda_lists() {
  static const auto& lists = *new RuleMap(read_libtorch_cuda_lists());  // never destroyed
  return lists;
}

/// The rule that LibTorch's CUDA lists have for an overload; native if they have none.
inline Cast listed_rule(std::string_view full_name) {
  const auto listed = libtorch_cuda_lists().find(full_name);
  return listed == libtorch_cuda_lists().end() ? Cast::native : *listed->second.cast;
}

}  // namespace torchamp::detail
