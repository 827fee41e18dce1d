// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/child_process.h"
#include "benchmark/comparison/op_profile.h"
#include "benchmark/comparison/way.h"
#include "support/format.h"
#include "support/op_count.h"

/// What a worker tells of a run, see Note [Workers].
struct Round {
  double seconds = 0.;    ///< per step, or call
  double processor = 0.;  ///< the same of the processor's time
  double loss = 0.;       ///< the mean of the run's losses; see Predictor for inference
  double first_loss = 0.;
  std::int64_t peak_bytes = 0;
  std::int64_t sent_bytes = -1;  ///< by all steps; -1: nobody counted
};

/// What a file of raw numbers has of one way.
struct Record {
  std::int64_t parameters = 0;
  std::vector<Round> rounds{};
  bool is_wrong = false;  ///< so was it judged when it was measured
};

/// One way to train one model or to predict with it, done by a worker, and what came of it. A
/// worker that fails leaves the race with its reason.
class Contestant {
 public:
  /// One that ran earlier.
  Contestant(Way way, Record record)
      : way_(std::move(way)),
        parameters_(record.parameters),
        rounds_(std::move(record.rounds)),
        was_wrong_(record.is_wrong) {}

  /// `clock`: "seconds" or "processor", see Note [Workers]. After `limit` seconds of setting
  /// itself up, or of waiting for its turns, a worker is ended: it fails, or has the rounds that it
  /// has done.
  Contestant(Way way, std::vector<std::string> command, const std::filesystem::path& errors,
             std::string clock = "seconds", double limit = std::numeric_limits<double>::infinity())
      : way_(std::move(way)),
        clock_(std::move(clock)),
        limit_(limit),
        seconds_left_(limit),
        worker_(std::make_unique<ChildProcess>(std::move(command), errors)) {}

  const Way& way() const { return way_; }
  const std::string& failure() const { return failure_; }
  bool failed() const { return !failure_.empty(); }
  std::int64_t parameters() const { return parameters_; }
  const std::string& libtorch() const { return libtorch_; }
  /// How an earlier run was judged, whose first loss is not known; nothing if it is this run.
  std::optional<bool> was_wrong() const { return was_wrong_; }
  /// Seconds of the first call, where it predicts.
  double first_call() const { return first_call_; }

  /// The runs that count. The one before them warms up.
  const std::vector<Round>& rounds() const { return rounds_; }
  double first_loss() const { return first_loss_; }
  double final_loss() const { return rounds_.back().loss; }
  std::int64_t peak_bytes() const { return rounds_.back().peak_bytes; }

  /// Waits until the worker has set itself up, which may take the limit since its start, whichever
  /// worker was waited for meanwhile. Its turns may take the limit again.
  void wait_until_ready() {
    seconds_left_ = limit_ - seconds_since(started_);
    const auto answer = expect("ready");
    seconds_left_ = limit_;
    if (!answer) return;
    std::istringstream(field(*answer, "parameters")) >> parameters_;
    libtorch_ = field(*answer, "libtorch");
    std::istringstream(field(*answer, "first_call")) >> first_call_;
  }

  void warm_up(std::int64_t steps) {
    ask("run", steps);
    end_warm_up(steps);
  }
  void race(std::int64_t steps) {
    ask("run", steps);
    end_race(steps);
  }

  // The parts of these, for workers that run together.

  void ask(const std::string& command, std::int64_t steps) {
    if (!has_ended()) worker_->write_line(command + " " + std::to_string(steps));
  }
  void end_warm_up(std::int64_t steps) {
    if (const auto round = take_round(steps)) first_loss_ = round->first_loss;
  }
  void end_race(std::int64_t steps) {
    if (const auto round = take_round(steps)) rounds_.push_back(*round);
  }
  /// The answer to "trace".
  std::optional<std::string> end_trace() { return expect("traced"); }

  /// What an answer says of `name`.
  static std::string field(const std::string& answer, const std::string& name) {
    const std::size_t at = answer.find(" " + name + "=");
    if (at == std::string::npos) return "";
    const std::size_t begin = at + name.size() + 2;
    return answer.substr(begin, answer.find(' ', begin) - begin);
  }

  /// Asks a C++ worker where the time of its steps goes.
  void profile(std::int64_t steps) {
    ask("profile", steps);
    const auto answer = expect("profiled");
    if (!answer) return;
    for (const char* kind : kOpKinds) shares_.push_back(support::number_of(field(*answer, kind)));
  }
  /// Asks how often the worker calls each op: for the loss and its gradients, or in a whole step.
  support::OpCounts count_ops(bool whole) {
    ask("count", whole ? 1 : 0);
    const auto answer = expect("counted");
    support::OpCounts counts;
    std::istringstream fields(answer.value_or(""));
    std::string field;
    fields >> field;
    while (fields >> field) {
      const std::size_t equals = field.find('=');
      counts[field.substr(0, equals)] = std::stoll(field.substr(equals + 1));
    }
    return counts;
  }

  /// The share of each of kOpKinds in a step; empty if there is no profile.
  const std::vector<double>& shares() const { return shares_; }

  /// Ends the worker. What it told stays.
  void dismiss() { worker_.reset(); }

 private:
  std::optional<Round> take_round(std::int64_t steps) {
    const auto answer = expect("ran");
    if (!answer) return std::nullopt;
    Round round;
    std::istringstream(field(*answer, "peak")) >> round.peak_bytes;
    std::istringstream(field(*answer, "sent")) >> round.sent_bytes;
    std::istringstream(field(*answer, "processor")) >> round.processor;
    round.processor /= static_cast<double>(steps);
    round.seconds = support::number_of(field(*answer, clock_)) / static_cast<double>(steps);
    round.loss = support::number_of(field(*answer, "loss"));  // "nan" and "inf" too
    round.first_loss = support::number_of(field(*answer, "first"));
    return round;
  }

  bool has_ended() const { return failed() || worker_->was_killed(); }

  /// The answer that begins with `word`, or nothing, with the failure noted.
  std::optional<std::string> expect(const std::string& word) {
    if (has_ended()) return std::nullopt;
    while (const auto line = read_line()) {
      if (line->starts_with(word + " ")) return line;
      if (line->starts_with("error ")) {
        failure_ = line->substr(6);
        return std::nullopt;
      }
    }
    if (!worker_->was_killed()) {
      failure_ = "the worker ended unexpectedly (see workers.log)";
    } else if (rounds_.empty()) {
      failure_ = support::format("not a round in %g s (--limit)", limit_);
    }
    return std::nullopt;
  }

  /// The worker's next line, at the cost of its time.
  std::optional<std::string> read_line() {
    const auto begin = Clock::now();
    auto line = worker_->read_line(seconds_left_);
    seconds_left_ -= seconds_since(begin);
    return line;
  }

  using Clock = std::chrono::steady_clock;
  static double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  Way way_;
  std::string clock_;
  double limit_ = std::numeric_limits<double>::infinity(), seconds_left_ = limit_;
  Clock::time_point started_ = Clock::now();
  std::unique_ptr<ChildProcess> worker_;
  std::string failure_;
  std::int64_t parameters_ = 0;
  std::string libtorch_;
  double first_call_ = 0.;
  double first_loss_ = 0.;
  std::vector<Round> rounds_;
  std::optional<bool> was_wrong_;
  std::vector<double> shares_;
};
