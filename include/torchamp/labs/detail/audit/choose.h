// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [How an audit chooses]
// First all ops that may be lowered are lowered. Then rules are reverted if their casts to and from
// their present neighbours cost more than the rules save: one after the other, the most costly
// first. After that, the op with the largest error per saved microsecond is reverted, together with
// ops that are then not worth their casts, and so on until nothing is lowered.
//
// This gives a sequence of choices. Errors do not add up, so the audit measures the step under some
// of the choices, and takes the first within the budget. The rest of the budget may allow more. So
// the audit starts from this choice, and a second time from nothing lowered, and adds the op that
// saves most, as long as the measured error of the whole is within the budget. Of the two results
// it returns the faster one, by the single times.

/// A unit of lowering.
struct Choosable {
  double fp32_us = 0., low_us = 0.;
  double error = 0.;
  bool may_be_lowered = true;
};

/// A result that another op takes, and the cost of its cast per step. The cast is needed if only
/// one of the two ops is lowered. Without a producer, the result is never lowered, as for the
/// program's own tensors.
struct AuditEdge {
  std::optional<std::size_t> producer;
  std::size_t consumer;
  double us = 0.;

  bool operator==(const AuditEdge&) const = default;
};

class Chooser {
 public:
  using Lowered = std::vector<bool>;

  /// The units that a choice lowers, and the step's time under it in microseconds.
  struct Choice {
    Lowered lowered;
    double us;
  };

  Chooser(std::vector<Choosable> all, std::vector<AuditEdge> edges)
      : all_(std::move(all)), edges_(std::move(edges)), edges_of_(all_.size()) {
    for (std::size_t e = 0; e < edges_.size(); ++e) {
      if (edges_[e].producer == edges_[e].consumer) continue;  // a cast is never needed
      edges_of_[edges_[e].consumer].push_back(e);
      if (edges_[e].producer) edges_of_[*edges_[e].producer].push_back(e);
    }
  }

  /// The step's time in microseconds, for the measured ops.
  double us(const Lowered& lowered) const {
    double sum = 0.;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      sum += lowered[i] ? all_[i].low_us : all_[i].fp32_us;
    }
    for (const AuditEdge& edge : edges_) {
      if (needs_cast(edge, lowered)) sum += edge.us;
    }
    return sum;
  }

  /// From the most that pays to nothing, in descending order of error.
  std::vector<Choice> choices() const {
    Lowered lowered;
    for (const Choosable& one : all_) lowered.push_back(one.may_be_lowered);
    // The first lowered unit with the least such value.
    const auto least = [&](const auto& number_of) {
      std::optional<std::size_t> found;
      for (std::size_t i = 0; i < all_.size(); ++i) {
        if (lowered[i] && (!found || number_of(i) < number_of(*found))) found = i;
      }
      return found;
    };
    constexpr double least_us = 1e-3;
    std::vector<Choice> row;
    for (;;) {
      for (;;) {
        const auto costs_most = least([&](std::size_t i) { return saved_by(i, lowered); });
        if (!costs_most || saved_by(*costs_most, lowered) >= 0.) break;
        lowered[*costs_most] = false;
      }
      row.push_back({lowered, us(lowered)});
      const auto harms_most = least(
          [&](std::size_t i) { return -all_[i].error / std::max(saved_by(i, lowered), least_us); });
      if (!harms_most) return row;
      lowered[*harms_most] = false;
    }
  }

  /// The untried unit that saves most in addition to the lowered ones; none if none saves anything.
  std::optional<std::size_t> best_to_add(const Lowered& lowered,
                                         const std::vector<bool>& tried) const {
    std::optional<std::size_t> best;
    double most = 0.;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (lowered[i] || tried[i] || !all_[i].may_be_lowered) continue;
      const double saved = saved_by(i, lowered);
      if (saved > most) best = i, most = saved;
    }
    return best;
  }

 private:
  static bool needs_cast(const AuditEdge& edge, const Lowered& lowered) {
    return (edge.producer && lowered[*edge.producer]) != lowered[edge.consumer];
  }

  /// The time that lowering `i` saves, with the others unchanged; negative if it costs time.
  double saved_by(std::size_t i, const Lowered& lowered) const {
    double saved = all_[i].fp32_us - all_[i].low_us;
    for (const std::size_t e : edges_of_[i]) {
      const auto other = edges_[e].consumer == i ? edges_[e].producer : edges_[e].consumer;
      saved += other && lowered[*other] ? edges_[e].us : -edges_[e].us;
    }
    return saved;
  }

  std::vector<Choosable> all_;
  std::vector<AuditEdge> edges_;
  std::vector<std::vector<std::size_t>> edges_of_;  // of each, in edges_
};

}  // namespace TORCHAMP_NAMESPACE::detail
