// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "benchmark/comparison/contestant.h"
#include "benchmark/comparison/race.h"
#include "benchmark/comparison/way.h"

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.;
}

/// Per step, or call, the median of the rounds.
inline double median_seconds(const Contestant& contestant) {
  std::vector<double> seconds;
  for (const Round& round : contestant.rounds()) seconds.push_back(round.seconds);
  return median(std::move(seconds));
}

/// How far two ways' losses may lie apart, in parts of the first loss: that of the third step,
/// where only rounding and the order of sums differ, and that of the last round, of which training
/// has made more since.
struct LossTolerance {
  double first, final;
};
inline LossTolerance loss_tolerance(const std::string& dtype) {
  if (dtype == "fp32") return {.first = 0.001, .final = 0.03};
  // TF32 has as many digits as fp16.
  return dtype == "bf16" ? LossTolerance{.first = 0.03, .final = 0.05}
                         : LossTolerance{.first = 0.01, .final = 0.04};
}

/// What is said of a contestant in the report.
struct Verdict {
  const Contestant* contestant = nullptr;
  double seconds = 0.;  ///< per step, the median of the rounds
  std::optional<double>
      to_python{};                ///< the median of the rounds' ratios to Python's same way, eager
  std::optional<double> saved{};  ///< of the time of the same way in fp32
  std::string wrong{};            ///< why its result does not count; empty if it does

  bool counts() const { return wrong.empty(); }
};

inline const Contestant* find(const Race& race, const Way& way) {
  for (const Contestant& contestant : race.contestants) {
    if (contestant.way() == way && !contestant.failed()) return &contestant;
  }
  return nullptr;
}

/// What has variants in one of our ways alone is measured by plain ones.
inline Way without_own_variant(Way way) {
  if (way.variant != "kept") way.variant = "plain";
  return way;
}

/// Python's way to do the same, eagerly.
inline Way python_twin(Way way) {
  way = without_own_variant(std::move(way));
  way.language = "python";
  if (!way.is_fp32() && way.casts != "cast") way.casts = "torch";
  way.launch = "eager";
  return way;
}

inline Way fp32_twin(Way way) {
  way = without_own_variant(std::move(way));
  way.casts = way.dtype = "fp32";
  if (way.is_compiled()) way.launch = "eager";
  return way;
}

/// The median of the ratios of two contestants' times, round by round.
inline double time_ratio(const Contestant& a, const Contestant& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(a.rounds().size(), b.rounds().size()); ++i) {
    ratios.push_back(a.rounds()[i].seconds / b.rounds()[i].seconds);
  }
  return median(std::move(ratios));
}

/// Why the losses of `contestant` and `other` cannot both be right; empty if they can. Each is a
/// Contestant, or several that train together.
template <class Trained>
std::string disagreement(const Trained& contestant, const Trained& other) {
  const double loss = contestant.final_loss(), expected = other.final_loss();
  if (!std::isfinite(loss)) return "the final loss is not finite";
  if (contestant.parameters() != other.parameters()) return "another number of parameters";
  const double scale = std::abs(other.first_loss());
  const LossTolerance tolerance = loss_tolerance(contestant.way().dtype);
  if (std::abs(contestant.first_loss() - other.first_loss()) > tolerance.first * scale) {
    return "another first loss than " + other.way().name();
  }
  if (std::abs(loss - expected) > tolerance.final * scale) {
    return "another final loss than " + other.way().name();
  }
  return "";
}

/// A way is measured by Python's same way, and every mixed precision also by fp32 of its language.
inline Verdict judge(const Race& race, const Contestant& contestant) {
  Verdict verdict{.contestant = &contestant};
  if (contestant.failed()) {
    verdict.wrong = "failed: " + contestant.failure();
    return verdict;
  }
  verdict.seconds = median_seconds(contestant);

  const Way& way = contestant.way();
  const Contestant* const python = find(race, python_twin(way));
  const Contestant* const fp32 = find(race, fp32_twin(way));
  if (python && python != &contestant) verdict.to_python = time_ratio(contestant, *python);
  if (fp32 && fp32 != &contestant) verdict.saved = 1. - time_ratio(contestant, *fp32);
  if (const auto was_wrong = contestant.was_wrong()) {
    if (*was_wrong) verdict.wrong = "so it was judged when it was measured";
    return verdict;
  }
  for (const Contestant* const other : {python, fp32}) {
    if (other && verdict.counts()) verdict.wrong = disagreement(contestant, *other);
  }
  return verdict;
}

inline std::vector<Verdict> judge(const Race& race) {
  std::vector<Verdict> verdicts;
  for (const Contestant& contestant : race.contestants) verdicts.push_back(judge(race, contestant));
  return verdicts;
}
