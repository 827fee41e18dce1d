// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [What a clip leaves]
// LibTorch's clips write to data(), which no version counts, and a program may clip by hand. So a
// clip is detected by its results: the norm of all gradients equals a limit such as 1. or 0.25, and
// was larger before. A clip by norm multiplies all gradients by one factor; after a clip by value
// the largest magnitude is the limit. A division by the number of processes or micro-batches also
// multiplies all gradients by one factor, so the inverse of an integer does not count as a clip.

/// The norms of some gradients at the end of a scaled backward, for a comparison with their norms
/// when they are divided. Reads no device.
class GradientNorms {
 public:
  GradientNorms() = default;
  /// Takes the norms of gradients of 32 or 16 bits that are on the device of the first such
  /// gradient.
  explicit GradientNorms(const std::vector<at::Tensor>& gradients) {
    for (const at::Tensor& gradient : gradients) {
      const bool counts =
          gradient.defined() && gradient.layout() == at::kStrided &&
          (gradient.scalar_type() == at::kFloat || is_16_bit(gradient.scalar_type())) &&
          gradient.numel() > 0;
      if (!counts || (!gradients_.empty() && gradient.device() != device_)) continue;
      device_ = gradient.device();
      gradients_.emplace_back(gradient);
    }
    norms_ = norms_of(locked());
  }

  /// Compares them with the present norms of the same gradients: of the gradients for which
  /// `counts(gradient)` is true, and of all.
  template <class Counts>
  void compare(const Counts& counts, bool all) {
    compares_all_ = all;
    const std::vector<at::Tensor> now = locked();
    const bool any_gone =
        std::any_of(now.begin(), now.end(), [](const at::Tensor& one) { return !one.defined(); });
    if (now.empty() || any_gone) return;
    counted_.clear();
    for (const at::Tensor& gradient : now) counted_.push_back(counts(gradient));
    const InternalOps guard;
    mirror_ = {};
    mirror_.send(at::stack({norms_, norms_of(now)}), not_here_yet);
  }

  /// Whether the comparison has arrived on the host. True at once if the gradients are on the host.
  bool is_here() const { return !mirror_.empty() && mirror_[0] != not_here_yet; }
  /// Whether the comparison shows a clip of all gradients, or of the gradients that counted.
  bool show_clip() const {
    return is_here() && ((compares_all_ && shows_clip(false)) || shows_clip(true));
  }

 private:
  static constexpr float not_here_yet = -1.F;

  std::vector<at::Tensor> locked() const {
    std::vector<at::Tensor> gradients;
    for (const WeakTensor& gradient : gradients_) gradients.push_back(gradient.lock());
    return gradients;
  }

  /// Two numbers for each: the 2-norm, and the largest magnitude. {2, n}
  static at::Tensor norms_of(const std::vector<at::Tensor>& gradients) {
    if (gradients.empty()) return {};
    const InternalOps guard;
    constexpr double infinity = std::numeric_limits<double>::infinity();
    return at::stack({at::stack(at::_foreach_norm(gradients, 2., at::kFloat)),
                      at::stack(at::_foreach_norm(gradients, infinity, at::kFloat))});
  }

  double number(int time, int kind, std::size_t i) const {
    const auto n = static_cast<std::int64_t>(gradients_.size());
    return mirror_[(2 * time + kind) * n + static_cast<std::int64_t>(i)];
  }

  bool shows_clip(bool only_counted) const {
    double before = 0., after = 0., max_before = 0., max_after = 0.;
    double least = std::numeric_limits<double>::infinity(), most = 0.;  // factors
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      if (only_counted && !counted_[i]) continue;
      const double norm = number(0, 0, i), max = number(0, 1, i);
      const double new_norm = number(1, 0, i), new_max = number(1, 1, i);
      before += norm * norm;
      after += new_norm * new_norm;
      max_before = std::max(max_before, max);
      max_after = std::max(max_after, new_max);
      if (!(norm > 0.)) continue;
      least = std::min({least, new_norm / norm, new_max / max});
      most = std::max({most, new_norm / norm, new_max / max});
    }
    if (!std::isfinite(before) || !(after > 0.) || !(max_after < 0.999 * max_before)) return false;
    const bool is_multiplied = most - least <= 1e-4 * most;
    if (is_multiplied && is_integer(1. / most, 2e-6)) return false;  // an average
    const bool by_norm = is_multiplied && is_round(std::sqrt(after));
    return by_norm || is_round(max_after);
  }

  static bool is_integer(double x, double tolerance) {
    return std::abs(x - std::round(x)) <= tolerance * x;
  }
  /// Whether `x` has at most two decimal digits.
  static bool is_round(double x) {
    return is_integer(x / std::pow(10., std::floor(std::log10(x) + 1e-6) - 1.), 2e-5);
  }

  at::Device device_ = at::kCPU;
  std::vector<WeakTensor> gradients_;
  std::vector<bool> counted_;
  bool compares_all_ = false;
  at::Tensor norms_;
  HostMirror mirror_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
