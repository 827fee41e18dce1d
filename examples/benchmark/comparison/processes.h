// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "benchmark/comparison/contestant.h"
#include "benchmark/comparison/race.h"
#include "benchmark/comparison/verdict.h"
#include "benchmark/comparison/way.h"
#include "support/format.h"

/// When one process of a group did what in one step: seconds since the step's begin.
struct StepTrace {
  double forward = 0., backward = 0., end = 0.;  ///< see Note [Workers in a group]
  std::vector<std::pair<double, std::int64_t>> sent{};
};

/// A port of 127.0.0.1 that nobody listens at.
inline int free_port() {
  const int number = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  const bool is_bound =
      number >= 0 && bind(number, any, size) == 0 && getsockname(number, any, &size) == 0;
  const int error = errno;
  if (number >= 0) close(number);
  if (!is_bound) throw std::system_error(error, std::generic_category(), "no free port");
  return ntohs(address.sin_port);
}

/// Several workers that train one model in one way.
class Gang {
 public:
  Gang(const Plan& plan, const Race& race, const Way& way, std::int64_t processes,
       std::int64_t bucket_bytes)
      : way_(way) {
    const std::string port = std::to_string(free_port());
    for (std::int64_t rank = 0; rank < processes; ++rank) {
      std::vector<std::string> command{"env",
                                       "RANK=" + std::to_string(rank),
                                       "LOCAL_RANK=" + std::to_string(rank),
                                       "WORLD_SIZE=" + std::to_string(processes),
                                       "MASTER_ADDR=127.0.0.1",
                                       "MASTER_PORT=" + port,
                                       "GLOO_SOCKET_IFNAME=lo"};
#ifdef SENT_BYTES_LIBRARY
      command.emplace_back("LD_PRELOAD=" SENT_BYTES_LIBRARY);
#endif
      const auto add = [&](const auto&... parts) { (command.emplace_back(parts), ...); };
      if (way.is_python()) {
        const std::filesystem::path script(plan.worker_script);
        add(plan.python, "-B", (script.parent_path() / "worker_processes.py").string());
      } else {
        add(plan.self, "--worker", "--task", "processes");
      }
      add("--model", race.model->name, "--variant", way.variant, "--dtype", way.dtype);
      add("--threads", std::to_string(plan.threads), "--bucket", std::to_string(bucket_bytes));
      for (const auto& [name, value] : race.sizes) add("--set", name + "=" + std::to_string(value));
      ranks_.emplace_back(way, std::move(command), plan.out / "workers.log");
    }
  }

  const Way& way() const {
    return way_;
  }
  std::int64_t processes() const {
    return std::ssize(ranks_);
  }
  std::int64_t parameters() const {
    return ranks_.front().parameters();
  }
  const std::string& libtorch() const {
    return ranks_.front().libtorch();
  }

  /// That of the first process that failed; empty if none did.
  std::string failure() const {
    for (const Contestant& rank : ranks_) {
      if (rank.failed()) return rank.failure();
    }
    return "";
  }

  void wait_until_ready() {
    for (Contestant& rank : ranks_) rank.wait_until_ready();
  }
  void warm_up(std::int64_t steps) {
    ask("run", steps);
    for (Contestant& rank : ranks_) rank.end_warm_up(steps);
  }
  void race(std::int64_t steps) {
    ask("run", steps);
    for (Contestant& rank : ranks_) rank.end_race(steps);
  }
  void trace() {
    ask("trace", 1);
    for (Contestant& rank : ranks_) {
      const auto answer = rank.end_trace();
      if (answer && &rank == &ranks_.front()) trace_ = parse_trace(*answer);
    }
  }
  /// What process 0 told; nothing if it told nothing.
  const std::optional<StepTrace>& step_trace() const {
    return trace_;
  }

  /// Ends the workers. What they told stays.
  void dismiss() {
    for (Contestant& rank : ranks_) rank.dismiss();
  }

  /// Rounds that all processes have made.
  std::size_t rounds() const {
    std::size_t count = ranks_.front().rounds().size();
    for (const Contestant& rank : ranks_) count = std::min(count, rank.rounds().size());
    return count;
  }
  /// Of one step: the slowest process's.
  double seconds(std::size_t round) const {
    double most = 0.;
    for (const Contestant& rank : ranks_) most = std::max(most, rank.rounds()[round].seconds);
    return most;
  }
  /// Of one step and process, on average.
  double processor(std::size_t round) const {
    return mean_of([&](const Contestant& rank) { return rank.rounds()[round].processor; });
  }
  /// By all steps of a round and one process, on average; below 0: nobody counted.
  double sent_bytes(std::size_t round) const {
    return mean_of([&](const Contestant& rank) {
      return static_cast<double>(rank.rounds()[round].sent_bytes);
    });
  }
  double loss(std::size_t round) const {
    return mean_of([&](const Contestant& rank) { return rank.rounds()[round].loss; });
  }
  double first_loss() const {
    return mean_of([](const Contestant& rank) { return rank.first_loss(); });
  }
  double final_loss() const {
    return loss(rounds() - 1);
  }
  /// Of the process that has grown the most.
  std::int64_t peak_bytes() const {
    std::int64_t most = 0;
    for (const Contestant& rank : ranks_) most = std::max(most, rank.peak_bytes());
    return most;
  }

 private:
  void ask(const char* command, std::int64_t steps) {
    for (Contestant& rank : ranks_) rank.ask(command, steps);
  }

  template <class Value>
  double mean_of(const Value& value) const {
    double sum = 0.;
    for (const Contestant& rank : ranks_) sum += value(rank);
    return sum / static_cast<double>(ranks_.size());
  }

  static StepTrace parse_trace(const std::string& answer) {
    const auto number = [&](const char* name) {
      return support::number_of(Contestant::field(answer, name));
    };
    const double start = number("start");
    StepTrace trace{.forward = number("forward") - start,
                    .backward = number("backward") - start,
                    .end = number("end") - start};
    std::istringstream entries(Contestant::field(answer, "sent"));
    for (std::string entry; std::getline(entries, entry, ',');) {
      const std::size_t colon = entry.find(':');
      trace.sent.emplace_back(support::number_of(entry.substr(0, colon)) - start,
                              std::stoll(entry.substr(colon + 1)));
    }
    return trace;
  }

  Way way_;
  std::deque<Contestant> ranks_;
  std::optional<StepTrace> trace_;
};

/// All ways of one model and one number of processes.
struct GroupRace {
  const Race* race = nullptr;  ///< model, sizes, steps
  std::int64_t processes = 1;
  bool has_cores = true;  ///< for all processes at once, so that wall-clock times mean something
  std::deque<Gang> gangs{};

  /// Python's gang that does the same, if it did.
  const Gang* twin_of(const Gang& gang) const {
    Way way = gang.way();
    way.language = "python";
    for (const Gang& other : gangs) {
      if (other.way() == way && &other != &gang && other.failure().empty()) return &other;
    }
    return nullptr;
  }

  /// Why the gang's result does not count; empty if it does. Without a twin it is measured by the
  /// first of its language, since all train with the same batches.
  std::string wrong(const Gang& gang) const {
    if (!gang.failure().empty()) return "failed: " + gang.failure();
    const Gang* expected = twin_of(gang);
    for (const Gang& other : gangs) {
      if (expected || !other.failure().empty() || &other == &gang) continue;
      if (other.way().dtype == gang.way().dtype) expected = &other;
    }
    return expected ? disagreement(gang, *expected) : "";
  }
};

/// What the arithmetic asks of one process to send in a step, in bytes. Averages of n processes:
/// 2 (n - 1) / n of the gradients, as in a ring. Where each process steps a share: (n - 1) / n of
/// the gradients, and as much of the weights, which ZeroRedundancyOptimizer keeps in fp32.
inline double least_sent(const Way& way, std::int64_t parameters, std::int64_t processes) {
  const double others = static_cast<double>(processes - 1) / static_cast<double>(processes);
  const double gradient = way.variant.ends_with("_16") ? 2. : 4.;
  const double weight = way.variant == "zero" ? 4. : 2.;
  const bool is_shared = !way.variant.starts_with("parallel");
  return others * static_cast<double>(parameters) * (is_shared ? gradient + weight : 2. * gradient);
}

/// Lets all ways of `race` take turns with that many processes, as run() does with one.
inline void run(const Plan& plan, GroupRace& race, std::int64_t bucket_bytes) {
  const auto cores = static_cast<std::int64_t>(std::thread::hardware_concurrency());
  race.has_cores = race.processes * std::max<std::int64_t>(plan.threads, 1) <= cores;
  const auto say = [&](const char* what, const Gang& gang) {
    std::cout << race.race->title() << ", " << race.processes << " processes: " << what << ' '
              << gang.way().name() << std::endl;
  };
  for (const Way& way : shared_ways(plan.dtypes, !plan.python.empty())) {
    race.gangs.emplace_back(plan, *race.race, way, race.processes, bucket_bytes);
    say("starts", race.gangs.back());
    race.gangs.back().wait_until_ready();
  }
  const std::int64_t steps = race.race->steps;
  for (Gang& gang : race.gangs) gang.warm_up(steps);
  const std::size_t count = race.gangs.size();
  for (std::size_t round = 0; round < static_cast<std::size_t>(plan.rounds); ++round) {
    for (std::size_t i = 0; i < count; ++i) {
      Gang& gang = race.gangs[(round + i) % count];
      say("runs", gang);
      gang.race(steps);
    }
  }
  for (Gang& gang : race.gangs) {
    gang.trace();
    gang.dismiss();
  }
}
