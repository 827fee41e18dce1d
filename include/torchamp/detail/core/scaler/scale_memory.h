// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <iterator>

#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace torchamp::detail {

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
  enum class Kind {
    state,  ///< torch.amp also has it: part of GradScalerState
    count,  ///< torchamp's own, a whole number that is not negative
  };
  const char* name;  ///< in archives
  Kind kind;
  Number ScaleMemory<Number>::*number;
  double (*initial)(const GradScalerOptions& options);
  /// Whether the update with these options depends on the number (not for the scale and
  /// growth_tracker).
  bool (*wanted)(const GradScalerOptions& options);
};

/// One row for each number, in the order of the archives' checksum. A new number is a member above,
/// a row at the end, and its effect in after_update(): loading an archive of an earlier version,
/// which does not hold it, gives it the initial value.
template <class Number>
inline constexpr ScaleMemoryRow<Number> scale_memory_rows[] = {
    {"scale", ScaleMemoryRow<Number>::Kind::state, &ScaleMemory<Number>::scale,
     [](const GradScalerOptions& options) -> double {
       return static_cast<float>(options.init_scale);
     },
     [](const GradScalerOptions& /*options*/) { return false; }},
    {"growth_tracker", ScaleMemoryRow<Number>::Kind::state, &ScaleMemory<Number>::growth_tracker,
     [](const GradScalerOptions& options) {
       return static_cast<double>(options.growth_tracker_start);
     },
     [](const GradScalerOptions& /*options*/) { return false; }},
    {"torchamp_credit", ScaleMemoryRow<Number>::Kind::count, &ScaleMemory<Number>::credit,
     [](const GradScalerOptions& options) { return static_cast<double>(options.hysteresis); },
     [](const GradScalerOptions& options) { return options.hysteresis != 1; }},
    {"torchamp_skips_in_a_row", ScaleMemoryRow<Number>::Kind::count, &ScaleMemory<Number>::skips,
     [](const GradScalerOptions& /*options*/) { return 0.; },
     [](const GradScalerOptions& /*options*/) { return false; }},
};
static_assert(std::size(scale_memory_rows<double>) * sizeof(double) == sizeof(ScaleMemory<double>),
              "Each number has a row.");

}  // namespace torchamp::detail
