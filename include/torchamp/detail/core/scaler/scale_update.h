// SPDX-License-Identifier: BSD-3-Clause
// The numbers of a scale update, and the formula of the next scale.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string_view>
#include <vector>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/gradient_batch.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/scaler/read_once.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The numbers that scale updates carry from one iteration to the next. Number is double on the
/// host, and a 0-dim tensor on a device, so that both use one formula. Each number has a row in
/// scale_memory_rows.
template <class Number>
struct ScaleMemory {
  Number scale;
  Number growth_tracker;
  Number credit;  ///< bad iterations until the scale backs off
  Number skips;   ///< bad iterations in a row
};

/// The description of a number in ScaleMemory.
template <class Number>
struct ScaleMemoryRow {
  std::string_view name;  ///< in archives
  bool is_whole;
  Number ScaleMemory<Number>::*number;
  double (*initial)(const GradScalerOptions& options);

  /// Whether torch.amp does not have the number, so that GradScalerState has no place for it.
  bool is_own() const { return name.starts_with("torchamp_"); }
};

/// One row for each number, in the order of the archives' checksum. A new number is a member above,
/// a row at the end, and its effect in after_update(): loading an archive of an earlier version,
/// which does not hold it, gives it the initial value.
template <class Number>
inline constexpr ScaleMemoryRow<Number> scale_memory_rows[] = {
    {"scale", /*is_whole=*/false, &ScaleMemory<Number>::scale,
     [](const GradScalerOptions& options) -> double {
       return static_cast<float>(options.init_scale);
     }},
    {"growth_tracker", /*is_whole=*/true, &ScaleMemory<Number>::growth_tracker,
     [](const GradScalerOptions& options) {
       return static_cast<double>(options.growth_tracker_start);
     }},
    {"torchamp_credit", /*is_whole=*/true, &ScaleMemory<Number>::credit,
     [](const GradScalerOptions& options) { return static_cast<double>(options.hysteresis); }},
    {"torchamp_skips_in_a_row", /*is_whole=*/true, &ScaleMemory<Number>::skips,
     [](const GradScalerOptions& /*options*/) { return 0.; }},
};
static_assert(std::size(scale_memory_rows<double>) * sizeof(double) == sizeof(ScaleMemory<double>),
              "Each number has a row.");

/// The numbers that the checks of an iteration's gradients have measured, of one optimizer or of
/// several, for the update. Each is on the scale's device, and has a row in measured_rows. A number
/// that no option needs is undefined.
struct Measured {
  ReadOnce found_inf{};  ///< 1 for an inf or a NaN, else 0
};

/// The description of a number in Measured.
struct MeasuredRow {
  ReadOnce Measured::*number;
  /// The number of two optimizers.
  ReadOnce (*of_both)(const ReadOnce& one, const ReadOnce& other);
  /// The option with a function by which processes agree on the number; null if there is none.
  std::function<void(at::Tensor&)> GradScalerOptions::*function;
  /// Makes this process's number the number of all processes, by the program's function or by
  /// `shards`, which is null without shards.
  void (*agree)(const GradScalerOptions& options, const Shards* shards, at::Tensor& number);
  /// Measures the number, 0-dim, of gradients that must still be divided by `scale`, or that are
  /// unscaled if `scale` is undefined. Returns an undefined tensor if no option needs the number;
  /// otherwise a number even without gradients. Null: each check of gradients has the number.
  at::Tensor (*measure)(const std::vector<GradientBatch>& gradients, const at::Tensor& scale,
                        const GradScalerOptions& options) = nullptr;
};

inline ReadOnce larger(const ReadOnce& one, const ReadOnce& other) {
  const std::optional<double> a = one.without_reading(), b = other.without_reading();
  if (a && b) return *a < *b ? other : one;
  return {.tensor = at::maximum(one.tensor, other.tensor)};
}

/// See GradScalerOptions::agree_found_inf.
inline void agree_on_flag(const GradScalerOptions& options, const Shards* shards,
                          at::Tensor& found_inf) {
  if (!options.agree_found_inf) {
    if (shards != nullptr) shards->agree_largest(found_inf);
    return;
  }
  const at::TensorOptions of_flag = found_inf.options();
  options.agree_found_inf(found_inf);
  TORCHAMP_CHECK(found_inf.defined() && found_inf.numel() == 1,
                 "GradScaler: found_inf is not a tensor of one element after agree_found_inf. "
                 "Write to it in place, or assign a tensor of one element.");
  found_inf = found_inf.reshape({}).ne(0).to(of_flag);
}

/// One row for each number.
inline constexpr MeasuredRow measured_rows[] = {
    {.number = &Measured::found_inf,
     .of_both = larger,
     .function = &GradScalerOptions::agree_found_inf,
     .agree = agree_on_flag},
};
static_assert(std::size(measured_rows) * sizeof(ReadOnce) == sizeof(Measured),
              "Each number has a row.");

/// Stores each number's value in ReadOnce::on_host, if the host has all numbers without a read.
/// Returns whether it has.
inline bool bring_to_host(Measured& measured) {
  return std::all_of(std::begin(measured_rows), std::end(measured_rows), [&](const auto& row) {
    ReadOnce& number = measured.*row.number;
    number.on_host = number.without_reading();
    return number.on_host || !number.tensor.defined();
  });
}
/// Adds the numbers of an optimizer, without a read.
inline void merge(Measured& measured, const Measured& other) {
  for (const MeasuredRow& row : measured_rows) {
    ReadOnce& number = measured.*row.number;
    number = number.tensor.defined() ? row.of_both(number, other.*row.number) : other.*row.number;
  }
}

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
/// numbers. (The structured binding names every option, so a new option does not compile until it
/// is here. If the kernel does not have the option's effect, compare it with its default.)
inline bool is_torch_update(const GradScalerOptions& options) {
  const auto& [init_scale, growth_factor, backoff_factor, growth_interval, enabled, dynamic,
               min_scale, max_scale, at_min_scale, hysteresis, growth_tracker_start,
               max_skips_in_a_row, at_max_skips, on_limit, agree_found_inf, recheck, check_order] =
      options;
  return dynamic && hysteresis == 1 && growth_tracker_start == 0;
}

/// The numbers after an iteration. This formula is used on the host for every rule, and on a device
/// for all rules except torch.amp's, for which ATen has a kernel.
template <class Number>
ScaleMemory<Number> after_update(const GradScalerOptions& options,
                                 const ScaleMemory<Number>& before, const Measured& measured) {
  auto bad = measured.found_inf.as<Number>() != 0.;
  using Bool = decltype(bad);
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

}  // namespace TORCHAMP_NAMESPACE::detail
