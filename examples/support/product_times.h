// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>

#include "format.h"

namespace support {

/// How long a CPU takes for a product of two matrices of 512 x 512, in seconds.
struct ProductTimes {
  double fp32, lower;
  double speedup() const { return fp32 / lower; }
};

/// Times products in fp32 and in `dtype`, with as many threads as LibTorch now has: the best of a
/// few, since other programs on the machine make single ones slow.
inline ProductTimes time_products(c10::ScalarType dtype) {
  using Clock = std::chrono::steady_clock;
  const auto best_of = [](c10::ScalarType type) {
    const torch::Tensor a = torch::ones({512, 512}, type), b = torch::ones({512, 512}, type);
    double best = std::numeric_limits<double>::infinity(), all = 0.;
    for (int i = 0; i < 20 && all < 0.3; ++i) {
      const Clock::time_point start = Clock::now();
      torch::mm(a, b);
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      best = std::min(best, seconds);
      all += seconds;
    }
    return best;
  };
  return {best_of(c10::kFloat), best_of(dtype)};
}

/// "A product of 512 x 512 matrices takes 3 ms in fp32 and 1.5 ms in bf16: 2.0 times as fast."
inline std::string describe(const ProductTimes& times, c10::ScalarType dtype) {
  return format(
      "A product of 512 x 512 matrices takes %s in fp32 and %s in %s: %.1f times as fast.",
      format_seconds(times.fp32).c_str(), format_seconds(times.lower).c_str(),
      dtype == c10::kHalf ? "fp16" : "bf16", times.speedup());
}

}  // namespace support
