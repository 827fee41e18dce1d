// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

/// A random tensor that wants a gradient.
inline at::Tensor leaf(at::IntArrayRef sizes) {
  return at::randn(sizes).set_requires_grad(true);
}

/// One zero that wants a gradient.
inline at::Tensor zero() {
  return at::zeros({1}).set_requires_grad(true);
}
