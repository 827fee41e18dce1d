// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. overflow_report: which gradients and buffers hold infs and NaNs, and how many
/// each.

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/unscale.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// A parameter whose gradient holds infs or NaNs, or a buffer that holds them.
struct Overflow {
  std::string name;                   ///< in the module; for an optimizer "group 0, parameter 3"
  at::ScalarType dtype = at::kFloat;  ///< of the gradient or buffer
  std::vector<int64_t> sizes;         ///< of the gradient or buffer
  at::Device device = at::kCPU;       ///< of the gradient or buffer
  int64_t infs = 0;                   ///< elements that are inf or -inf
  int64_t nans = 0;                   ///< elements that are NaN
  int64_t elements = 0;               ///< all elements; for a sparse gradient the stored elements
  /// The largest absolute value of a finite element, scaled or unscaled as stored; at most the
  /// largest fp64 number.
  double largest_finite = 0.;
};

/// The result of overflow_report().
struct OverflowReport {
  std::vector<Overflow> overflows;   ///< in parameter order
  std::size_t gradients = 0;         ///< number of gradients with elements
  std::size_t without_elements = 0;  ///< number of gradients without elements
  /// For a module: the buffers that hold infs or NaNs, such as running statistics of a batch norm.
  /// A skipped step does not restore them.
  std::vector<Overflow> buffers{};

  /// Whether all gradients and buffers are finite.
  bool empty() const { return overflows.empty() && buffers.empty(); }
};

namespace detail {

/// Returns three fp64 numbers: infs, NaNs, largest finite absolute value.
inline at::Tensor count_non_finite(const at::Tensor& values) {
  const at::Tensor wide =
      resolved(values).to(values.is_complex() ? at::kComplexDouble : at::kDouble);
  const at::Tensor inf = wide.isinf();
  const at::Tensor nan = wide.isnan().logical_and(inf.logical_not());  // inf + NaN i is an inf
  // The absolute value of a finite complex number may be more than fp64 holds.
  const at::Tensor largest = wide.abs()
                                 .masked_fill(inf.logical_or(nan), 0.)
                                 .max()
                                 .clamp_max(std::numeric_limits<double>::max());
  return at::stack({inf.sum().to(at::kDouble), nan.sum().to(at::kDouble), largest});
}

/// Counts infs and NaNs of tensors on their devices, and reads all counts together.
class NonFiniteCounts {
 public:
  /// False if `tensor` has no elements.
  bool add(const std::string& name, const at::Tensor& tensor) {
    const at::Tensor values = stored_values(tensor);
    const int64_t elements = values.defined() ? values.numel() : 0;
    if (elements == 0) return false;
    counts_.push_back(count_non_finite(values));
    all_.push_back({.name = name,
                    .dtype = tensor.scalar_type(),
                    .sizes = tensor.sizes().vec(),
                    .device = tensor.device(),
                    .elements = elements});
    return true;
  }
  std::size_t size() const { return all_.size(); }

  /// Returns the overflows among the first `count` tensors, and the overflows among the rest.
  /// Synchronises once with each device.
  std::pair<std::vector<Overflow>, std::vector<Overflow>> read(std::size_t count) {
    std::pair<std::vector<Overflow>, std::vector<Overflow>> found;
    const std::vector<at::Tensor> numbers = read_together(counts_);
    for (std::size_t i = 0; i < all_.size(); ++i) {
      const auto* const row = numbers[i].const_data_ptr<double>();
      all_[i].infs = static_cast<int64_t>(row[0]);
      all_[i].nans = static_cast<int64_t>(row[1]);
      all_[i].largest_finite = row[2];
      if (all_[i].infs + all_[i].nans == 0) continue;
      (i < count ? found.first : found.second).push_back(std::move(all_[i]));
    }
    return found;
  }

 private:
  std::vector<Overflow> all_;
  std::vector<at::Tensor> counts_;
};

/// The buffers of a module (itself, a pointer of any kind or a module holder); for anything else
/// none.
template <class Owner>
NamedParameters named_buffers_of(const Owner& owner) {
  NamedParameters named;
  if constexpr (std::derived_from<Owner, torch::nn::Module>) {
    const torch::nn::Module& module = owner;
    for (const auto& item : module.named_buffers()) named.emplace_back(item.key(), item.value());
  } else if constexpr (requires { *owner, static_cast<bool>(owner); }) {
    if (static_cast<bool>(owner)) return named_buffers_of(*owner);
  }
  return named;
}

}  // namespace detail

/// overflow_report() for two ranges: pairs of a name and a parameter, and pairs of a name and a
/// buffer. Synchronises once with each device.
template <class NamedParameters>
OverflowReport overflow_report_of(const NamedParameters& named,
                                  const detail::NamedParameters& buffers = {}) {
  const detail::InternalOps guard;
  detail::NonFiniteCounts counts;
  OverflowReport report;
  for (const auto& [name, parameter] : named) {
    if (!parameter.defined()) continue;
    const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
    if (gradient.defined() && !counts.add(name, gradient)) ++report.without_elements;
  }
  report.gradients = counts.size();
  for (const auto& [name, buffer] : buffers) {
    if (buffer.defined() && (buffer.is_floating_point() || buffer.is_complex())) {
      counts.add(name, buffer);
    }
  }
  std::tie(report.overflows, report.buffers) = counts.read(report.gradients);
  return report;
}

/// Reports which gradients of a module (including submodules) or an optimizer hold infs or NaNs,
/// how many, and the largest finite value. For a module it also reports buffers with infs or NaNs.
/// Call it after a skipped step, before the gradients are cleared:
///
///     if (!scaler.step(optimizer)) std::cout << torchamp::overflow_report(model);
///
/// Parameters of a module have their names in the module; parameters of an optimizer have their
/// positions. `owner` is a module or an optimizer, a pointer of any kind to one, or a module
/// holder. Error: it is null. Makes one pass over the gradients and buffers, does not change them,
/// and synchronises once with each device.
template <class Owner>
OverflowReport overflow_report(const Owner& owner) {
  const auto named = detail::named_parameters_of(owner, "overflow_report");
  return overflow_report_of(named, detail::named_buffers_of(owner));
}

namespace detail {

inline void print_overflows(std::ostream& out, const std::vector<Overflow>& overflows) {
  for (const Overflow& one : overflows) {
    out << "  " << one.name << " (" << one.dtype << ' ' << at::IntArrayRef(one.sizes) << " on "
        << one.device << "): " << one.infs << " inf, " << one.nans << " NaN of " << one.elements
        << ", largest finite " << one.largest_finite << '\n';
  }
}

}  // namespace detail

/// One line for each gradient and buffer: `fc1.weight (Float [64, 32] on cpu): 3 inf, 1 NaN of
/// 2048, largest finite 1.5e+38`
inline std::ostream& operator<<(std::ostream& out, const OverflowReport& report) {
  if (report.gradients + report.without_elements == 0) {
    out << "no parameter has a gradient: report after backward(), before zero_grad()\n(or a "
           "step that drops them, see drop_gradients_after_step())\n";
  } else {
    out << report.overflows.size() << " of " << report.gradients << " gradients hold infs or NaNs";
    if (report.without_elements > 0) {
      out << " (and " << report.without_elements << " have no elements)";
    }
    out << '\n';
    detail::print_overflows(out, report.overflows);
  }
  if (!report.buffers.empty()) {
    out << "buffers that hold infs or NaNs, which a skipped step does not undo:\n";
    detail::print_overflows(out, report.buffers);
  }
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
