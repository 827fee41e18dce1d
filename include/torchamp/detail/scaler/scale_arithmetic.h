// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>

#include "torchamp/version.h"

namespace torchamp::detail {

// The arithmetic of a scale update, for doubles on the host and 0-dim tensors on a device.

inline double choose(bool condition, double yes, double no) {
  return condition ? yes : no;
}
inline at::Tensor choose(const at::Tensor& condition, const at::Tensor& yes, const at::Tensor& no) {
  return at::where(condition, yes, no);
}
// Not at::where, which would copy the number to the device.
inline at::Tensor choose(const at::Tensor& condition, double yes, const at::Tensor& no) {
  return no.masked_fill(condition, yes);
}
inline at::Tensor choose(const at::Tensor& condition, const at::Tensor& yes, double no) {
  return yes.masked_fill(condition.logical_not(), no);
}

inline double clamp(double x, double low, double high) {
  return std::clamp(x, low, high);
}
inline at::Tensor clamp(const at::Tensor& x, double low, double high) {
  return at::clamp(x, low, high);
}

inline bool is_finite(double x) {
  return std::isfinite(x);
}
inline at::Tensor is_finite(const at::Tensor& x) {
  return at::isfinite(x);
}

inline double as_fp32(double x) {
  return static_cast<float>(x);
}
inline at::Tensor as_fp32(const at::Tensor& x) {
  return x.to(at::kFloat).to(x.scalar_type());
}

inline double maximum_of(double a, double b) {
  return std::max(a, b);
}
inline at::Tensor maximum_of(const at::Tensor& a, const at::Tensor& b) {
  return at::maximum(a, b);
}

inline double minimum_of(double a, double b) {
  return std::min(a, b);
}
inline at::Tensor minimum_of(const at::Tensor& a, const at::Tensor& b) {
  return at::minimum(a, b);
}

inline double log2_of(double x) {
  return std::log2(x);
}
inline at::Tensor log2_of(const at::Tensor& x) {
  return at::log2(x);
}

inline double exp2_of(double x) {
  return std::exp2(x);
}
inline at::Tensor exp2_of(const at::Tensor& x) {
  return at::exp2(x);
}

inline double floor_of(double x) {
  return std::floor(x);
}
inline at::Tensor floor_of(const at::Tensor& x) {
  return at::floor(x);
}

inline double square_root_of(double x) {
  return std::sqrt(x);
}
inline at::Tensor square_root_of(const at::Tensor& x) {
  return at::sqrt(x);
}

inline double power_of(double base, double exponent) {
  return std::pow(base, exponent);
}
inline at::Tensor power_of(double base, const at::Tensor& exponent) {
  return at::pow(base, exponent);
}

}  // namespace torchamp::detail
