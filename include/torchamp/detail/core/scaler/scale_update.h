// SPDX-License-Identifier: BSD-3-Clause
// The formula of the next scale, for numbers of the host and for tensors.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "torchamp/detail/core/scaler/scale_memory.h"
#include "torchamp/grad_scaler_options.h"
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

// at:: has functions of these names for tensors.
using std::clamp;
using std::isfinite;

inline double as_fp32(double x) {
  return static_cast<float>(x);
}
inline at::Tensor as_fp32(const at::Tensor& x) {
  return x.to(at::kFloat).to(x.scalar_type());
}

/// The numbers before the first update.
inline ScaleMemory<double> initial_memory(const GradScalerOptions& options) {
  ScaleMemory<double> memory{};
  for (const auto& row : scale_memory_rows<double>) memory.*row.number = row.initial(options);
  return memory;
}

/// Whether ATen's kernel for torch.amp does the whole update. It does not change torchamp's own
/// numbers.
inline bool is_torch_update(const GradScalerOptions& options) {
  return options.dynamic && options.growth_tracker_start == 0 &&
         std::none_of(std::begin(scale_memory_rows<double>), std::end(scale_memory_rows<double>),
                      [&](const auto& row) { return row.wanted(options); });
}

/// The numbers after an iteration that was `bad` or not (a bool, or a 0-dim bool tensor). This
/// formula is used on the host for every rule, and on a device for all rules except torch.amp's,
/// for which ATen has a kernel.
template <class Number, class Bool>
ScaleMemory<Number> after_update(const GradScalerOptions& options,
                                 const ScaleMemory<Number>& before, const Bool& bad) {
  ScaleMemory<Number> after = before;
  after.skips = choose(bad, before.skips + 1., 0.);
  if (!options.dynamic) return after;

  const auto full_credit = static_cast<double>(options.hysteresis);
  after.growth_tracker =
      choose(bad, static_cast<double>(options.growth_tracker_start), before.growth_tracker + 1.);
  after.credit = choose(bad, clamp(before.credit - 1., 0., full_credit), before.credit);

  const Bool lowers = bad & (after.credit <= 0.);
  // The tracker was below the interval (set_growth_interval() and restore() see to that), and
  // starts at 0 or less, so a bad iteration does not grow.
  const Bool grows = after.growth_tracker == static_cast<double>(options.growth_interval);
  const Number lowered =
      clamp(as_fp32(before.scale * options.backoff_factor), options.min_scale, options.max_scale);
  const Number raised = as_fp32(before.scale * options.growth_factor);
  const Number kept =
      choose(isfinite(raised), clamp(raised, options.min_scale, options.max_scale), before.scale);
  after.scale = choose(lowers, lowered, choose(grows, kept, before.scale));
  after.growth_tracker = choose(grows, 0., after.growth_tracker);
  after.credit = choose(grows, full_credit, after.credit);
  return after;
}

}  // namespace torchamp::detail
