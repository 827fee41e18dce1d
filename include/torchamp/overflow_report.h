// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief overflow_report: which gradients hold infs and NaNs, and how many.

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/unscale.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// A parameter whose gradient holds infs or NaNs.
struct Overflow {
  std::string name;                   ///< in the module; for an optimizer "group 0, parameter 3"
  at::ScalarType dtype = at::kFloat;  ///< of the gradient
  std::vector<int64_t> sizes;         ///< of the gradient
  at::Device device = at::kCPU;       ///< of the gradient
  int64_t infs = 0;                   ///< elements that are inf or -inf
  int64_t nans = 0;                   ///< elements that are NaN
  int64_t elements = 0;               ///< all; of a sparse gradient, those stored
  double largest_finite = 0.;         ///< absolute value, scaled or unscaled as stored
};

/// The result of overflow_report().
struct OverflowReport {
  std::vector<Overflow> overflows;   ///< in parameter order
  std::size_t gradients = 0;         ///< examined
  std::size_t without_elements = 0;  ///< empty gradients

  /// Whether all gradients are finite.
  bool empty() const { return overflows.empty(); }
};

namespace detail {

/// Three fp64 numbers: infs, NaNs, largest finite absolute value.
inline at::Tensor count_non_finite(const at::Tensor& values) {
  const at::Tensor wide =
      resolved(values).to(values.is_complex() ? at::kComplexDouble : at::kDouble);
  const at::Tensor inf = wide.isinf();
  const at::Tensor nan = wide.isnan().logical_and(inf.logical_not());  // inf + NaN i is an inf
  return at::stack({inf.sum().to(at::kDouble), nan.sum().to(at::kDouble),
                    wide.abs().masked_fill(inf.logical_or(nan), 0.).max()});
}

}  // namespace detail

/// overflow_report() for any range of pairs of a name and a parameter. Reads each device once.
template <class NamedParameters>
OverflowReport overflow_report_of(const NamedParameters& named) {
  const detail::InternalOps guard;
  std::vector<Overflow> found;
  std::vector<at::Tensor> counts;
  OverflowReport report;
  for (const auto& [name, parameter] : named) {
    if (!parameter.defined()) continue;
    const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
    if (!gradient.defined()) continue;
    const at::Tensor values = detail::stored_values(gradient);
    const int64_t elements = values.defined() ? values.numel() : 0;
    if (elements == 0) {
      ++report.without_elements;
      continue;
    }
    counts.push_back(detail::count_non_finite(values));
    found.push_back({.name = name,
                     .dtype = gradient.scalar_type(),
                     .sizes = gradient.sizes().vec(),
                     .device = gradient.device(),
                     .elements = elements});
  }
  report.gradients = found.size();
  const std::vector<at::Tensor> read = detail::read_together(counts);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto* const row = read[i].const_data_ptr<double>();
    found[i].infs = static_cast<int64_t>(row[0]);
    found[i].nans = static_cast<int64_t>(row[1]);
    found[i].largest_finite = row[2];
    if (found[i].infs + found[i].nans > 0) report.overflows.push_back(std::move(found[i]));
  }
  return report;
}

/// Reports which gradients of a module (including submodules) or an optimizer hold infs or NaNs,
/// how many, and the largest finite value. Call it after a skipped step, before the gradients are
/// cleared:
///
///     if (!scaler.step(optimizer)) std::cout << torchamp::overflow_report(model);
///
/// A module's parameters are named as in the module, an optimizer's by position. `owner` is a
/// module or optimizer, any pointer to one, or a module holder; a null one is an error. Makes one
/// pass over the gradients, does not change them, and reads each device once.
template <class Owner>
OverflowReport overflow_report(const Owner& owner) {
  return overflow_report_of(detail::named_parameters_of(owner, "overflow_report"));
}

/// One line for each gradient: `fc1.weight (Float [64, 32] on cpu): 3 inf, 1 NaN of 2048, largest
/// finite 1.5e+38`
inline std::ostream& operator<<(std::ostream& out, const OverflowReport& report) {
  if (report.gradients + report.without_elements == 0) {
    return out << "no parameter has a gradient: report after backward(), before zero_grad()\n(or a "
                  "step that drops them, see drop_gradients_after_step())\n";
  }
  out << report.overflows.size() << " of " << report.gradients << " gradients hold infs or NaNs";
  if (report.without_elements > 0) {
    out << " (and " << report.without_elements << " have no elements)";
  }
  out << '\n';
  for (const Overflow& one : report.overflows) {
    out << "  " << one.name << " (" << one.dtype << ' ' << at::IntArrayRef(one.sizes) << " on "
        << one.device << "): " << one.infs << " inf, " << one.nans << " NaN of " << one.elements
        << ", largest finite " << one.largest_finite << '\n';
  }
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
