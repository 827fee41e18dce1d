// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/accumulate.h>

#include <cstddef>
#include <cstdint>
#include <vector>

/// The generator of parity/optim.py.
class Numbers {
 public:
  explicit Numbers(int64_t seed) : state_(seed) {}

  int64_t below(int64_t n) {
    state_ = (state_ * 1103515245 + 12345) % (int64_t{1} << 31);
    return (state_ >> 8) % n;
  }

  at::Tensor tensor(at::IntArrayRef sizes) {
    std::vector<float> values(static_cast<std::size_t>(c10::multiply_integers(sizes)));
    for (float& value : values) value = static_cast<float>(below(2001) - 1000) / 512.F;
    return at::tensor(values).reshape(sizes);
  }

 private:
  int64_t state_;
};
