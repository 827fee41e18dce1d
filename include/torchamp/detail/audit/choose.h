// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

// Note [How an audit chooses]
// At first, all that may be lowered is. Then whatever costs more in casts, between it and its
// neighbours as they then are, than it saves is taken back, one after the other, the most costly
// first. From there on, what has most error for each microsecond that it saves is taken back, and
// with it what is no longer worth its casts, until nothing is lowered. This gives a row of choices;
// errors do not add up, so the audit measures the step under some of them and takes the first that
// keeps to the budget. What that leaves of the budget may serve others: beginning with this choice,
// and once more with nothing lowered, the audit adds what saves most as long as the whole, measured
// again, keeps to the budget. The faster of the two, as the single times tell, is chosen.

/// Something that is lowered as a whole.
struct Choosable {
  double fp32_us = 0., low_us = 0.;
  double error = 0.;
  bool may_be_lowered = true;
};

/// A cast that is needed if of two neighbours one is lowered; no producer is one that is not.
struct ChoosableEdge {
  std::optional<std::size_t> producer;
  std::size_t consumer;
  double us;
};

class Chooser {
 public:
  using Lowered = std::vector<bool>;

  Chooser(std::vector<Choosable> all, std::vector<ChoosableEdge> edges)
      : all_(std::move(all)), edges_(std::move(edges)) {}

  /// What a step takes, in microseconds, of what was measured.
  double us(const Lowered& lowered) const {
    double sum = 0.;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      sum += lowered[i] ? all_[i].low_us : all_[i].fp32_us;
    }
    for (const ChoosableEdge& edge : edges_) {
      if (needs_cast(edge, lowered)) sum += edge.us;
    }
    return sum;
  }

  double error(const Lowered& lowered) const {
    double sum = 0.;
    for (std::size_t i = 0; i < all_.size(); ++i) sum += lowered[i] ? all_[i].error : 0.;
    return sum;
  }

  /// From the most that is worth it to nothing, each with less error than the one before.
  std::vector<Lowered> choices() const {
    Lowered now;
    for (const Choosable& one : all_) now.push_back(one.may_be_lowered);
    take_back_what_costs(now);
    std::vector<Lowered> row{now};
    while (std::find(now.begin(), now.end(), true) != now.end()) {
      std::size_t worst = all_.size();
      double most = -1.;
      for (std::size_t i = 0; i < all_.size(); ++i) {
        if (!now[i]) continue;
        constexpr double least_us = 1e-3;
        const double rate = all_[i].error / std::max(saved_by(i, now), least_us);
        if (worst == all_.size() || rate > most) worst = i, most = rate;
      }
      now[worst] = false;
      take_back_what_costs(now);
      row.push_back(now);
    }
    return row;
  }

  /// What saves most if it is lowered beside what is, and has not been tried; nothing if nothing
  /// saves anything.
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
  static bool needs_cast(const ChoosableEdge& edge, const Lowered& lowered) {
    return (edge.producer && lowered[*edge.producer]) != lowered[edge.consumer];
  }

  /// What lowering `i` saves with the others as they are; below 0 if it costs.
  double saved_by(std::size_t i, const Lowered& lowered) const {
    double saved = all_[i].fp32_us - all_[i].low_us;
    for (const ChoosableEdge& edge : edges_) {
      const bool takes = edge.consumer == i, gives = edge.producer == i;
      if (takes == gives) continue;  // none, or both: a cast is never needed
      const bool other = takes ? edge.producer && lowered[*edge.producer] : lowered[edge.consumer];
      saved += other ? edge.us : -edge.us;
    }
    return saved;
  }

  void take_back_what_costs(Lowered& lowered) const {
    for (;;) {
      std::size_t worst = all_.size();
      double least = 0.;
      for (std::size_t i = 0; i < all_.size(); ++i) {
        if (!lowered[i]) continue;
        const double saved = saved_by(i, lowered);
        if (saved < least) worst = i, least = saved;
      }
      if (worst == all_.size()) return;
      lowered[worst] = false;
    }
  }

  std::vector<Choosable> all_;
  std::vector<ChoosableEdge> edges_;
};

}  // namespace torchamp::detail
