// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <utility>
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

  /// A row of choices, each with less lowered than the one before, as what is taken back.
  class Choices {
   public:
    std::size_t size() const { return us_.size(); }
    /// What choice `index` lowers.
    Lowered operator[](std::size_t index) const {
      Lowered lowered = most_;
      for (std::size_t i = 0; i < ends_[index]; ++i) lowered[taken_back_[i]] = false;
      return lowered;
    }
    /// What a step takes under it, in microseconds.
    double us(std::size_t index) const { return us_[index]; }

   private:
    friend class Chooser;
    Lowered most_;
    std::vector<std::size_t> taken_back_;
    std::vector<std::size_t> ends_;  // of each choice, in taken_back_
    std::vector<double> us_;
  };

  Chooser(std::vector<Choosable> all, std::vector<ChoosableEdge> edges)
      : all_(std::move(all)), edges_(std::move(edges)), edges_of_(all_.size()) {
    for (std::size_t e = 0; e < edges_.size(); ++e) {
      if (edges_[e].producer == edges_[e].consumer) continue;  // a cast is never needed
      edges_of_[edges_[e].consumer].push_back(e);
      if (edges_[e].producer) edges_of_[*edges_[e].producer].push_back(e);
    }
  }

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
  Choices choices() const {
    TakingBack now(*this);
    now.take_back_what_costs();
    Choices row;
    row.most_ = now.lowered;
    row.ends_.push_back(0);
    row.us_.push_back(us(now.lowered));
    now.taken_back.clear();
    now.costs = 0.;
    while (!now.by_rate.empty()) {
      now.take_back(now.by_rate.begin()->second);
      now.take_back_what_costs();
      row.ends_.push_back(now.taken_back.size());
      row.us_.push_back(row.us_.front() + now.costs);
    }
    row.taken_back_ = std::move(now.taken_back);
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

  /// The other end of an edge of `i`; nothing if that is never lowered.
  static std::optional<std::size_t> other_end(const ChoosableEdge& edge, std::size_t i) {
    return edge.consumer == i ? edge.producer : edge.consumer;
  }

  /// What lowering `i` saves with the others as they are; below 0 if it costs.
  double saved_by(std::size_t i, const Lowered& lowered) const {
    double saved = all_[i].fp32_us - all_[i].low_us;
    for (const std::size_t e : edges_of_[i]) {
      const std::optional<std::size_t> other = other_end(edges_[e], i);
      saved += other && lowered[*other] ? edges_[e].us : -edges_[e].us;
    }
    return saved;
  }

  /// What is lowered, in order of what each saves and of its error for that: each time that one is
  /// taken back, its neighbours save less.
  struct TakingBack {
    explicit TakingBack(const Chooser& of) : chooser(of), saved(of.all_.size(), 0.) {
      for (const Choosable& one : of.all_) lowered.push_back(one.may_be_lowered);
      for (std::size_t i = 0; i < lowered.size(); ++i) {
        if (!lowered[i]) continue;
        saved[i] = of.saved_by(i, lowered);
        insert(i);
      }
    }

    void take_back(std::size_t i) {
      erase(i);
      lowered[i] = false;
      taken_back.push_back(i);
      costs += saved[i];
      for (const std::size_t e : chooser.edges_of_[i]) {
        const std::optional<std::size_t> other = other_end(chooser.edges_[e], i);
        if (!other || !lowered[*other]) continue;
        erase(*other);
        saved[*other] -= 2. * chooser.edges_[e].us;
        insert(*other);
      }
    }

    /// The most costly first, until nothing lowered costs more than it saves.
    void take_back_what_costs() {
      while (!by_saved.empty() && by_saved.begin()->first < 0.) take_back(by_saved.begin()->second);
    }

    const Chooser& chooser;
    Lowered lowered;
    std::vector<double> saved;                            // by each
    std::set<std::pair<double, std::size_t>> by_saved{};  // the least first
    std::set<std::pair<double, std::size_t>> by_rate{};   // the most harmful first
    std::vector<std::size_t> taken_back{};
    double costs = 0.;  // of taking these back

   private:
    double rate(std::size_t i) const {
      constexpr double least_us = 1e-3;
      return chooser.all_[i].error / std::max(saved[i], least_us);
    }
    void insert(std::size_t i) {
      by_saved.emplace(saved[i], i);
      by_rate.emplace(-rate(i), i);
    }
    void erase(std::size_t i) {
      by_saved.erase({saved[i], i});
      by_rate.erase({-rate(i), i});
    }
  };

  std::vector<Choosable> all_;
  std::vector<ChoosableEdge> edges_;
  std::vector<std::vector<std::size_t>> edges_of_;  // of each, in edges_
};

}  // namespace torchamp::detail
