// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/cuda_graph.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/child_process.h"
#include "benchmark/comparison/contestant.h"
#include "benchmark/comparison/make_optimizer.h"
#include "benchmark/comparison/way.h"
#include "benchmark/models.h"
#include "support/format.h"
#include "support/progress_bar.h"

/// All that is settled before the first worker starts.
struct Plan {
  bool predicts = false;      ///< inference, not training
  std::string device;         ///< "cpu", "cuda"
  std::string self;           ///< this program
  std::string python;         ///< empty: none
  std::string worker_script;  ///< its twin
  bool compiled = false;      ///< torch.compile, too
  std::vector<std::string> dtypes, casts;
  Preset preset = Preset::small;
  std::string why;  ///< this preset, for the reader
  std::int64_t rounds = 7;
  std::int64_t threads = 0;
  std::int64_t at_once = 0;    ///< ways of a model that take turns; 0: all
  double limit = 0.;           ///< seconds of each way, see Contestant; 0: none
  double compile_limit = 0.;   ///< the same of a way with torch.compile
  std::string clock = "wall";  ///< wall, processor
  std::filesystem::path out;
};

/// A way that cannot be gone here.
struct LeftOut {
  Way way;
  std::string reason;
};

/// One model's race.
struct Race {
  const ModelEntry* model = nullptr;
  Sizes sizes;
  std::int64_t steps = 0;                ///< per round; calls, where it predicts
  std::deque<Contestant> contestants{};  ///< Python's first
  std::vector<LeftOut> left_out{};
  std::string variant{};  ///< of the model: "batch 16"

  std::string title() const { return model->title + (variant.empty() ? "" : ", " + variant); }
};

/// Why `way` cannot be gone with this model on this device; empty if it can.
inline std::string why_not(const Plan& plan, const ModelEntry& model, const Way& way) {
  const auto make = [&] { return model.make(model.sizes.at(Preset::small)); };
  if (way.variant == "recomputed" && !make()->recompute()) return "its layers cannot be recomputed";
  if (way.variant == "unfused" && !make()->add_biases_apart()) {
    return "its layers cannot add biases apart";
  }
  if (way.optimizer == "muon") {
    const NamedParameters parameters = named_parameters(make()->module());
    if (std::none_of(parameters.begin(), parameters.end(),
                     [](const auto& one) { return is_for_muon(one.first, one.second); })) {
      return "it has no list of layers with matrices";
    }
  }
  if (way.variant == "masters" && make()->recipe().weight_average) {
    return "the average of the weights would be one of weights in 16 bits";
  }
  if (way.is_compiled() && only_predicts(model)) {
    return "torch.compile would compile each length of the text anew";
  }
  if (!way.is_captured()) return "";
  if (plan.device != "cuda") return "only a CUDA device has graphs";
  if (way.is_python()) {
    const bool averages = make()->recipe().weight_average;
    return averages ? "torch.amp tells nobody on the device whether a step was skipped, which the "
                      "average of the weights has to know"
                    : "";
  }
  return TORCHAMP_CUDA_GRAPHS ? "" : "this program was compiled without CUDA's headers";
}

/// "Skipped, since only a CUDA device has graphs: LibTorch, fp32, fused, captured; …", a sentence
/// for each reason.
inline std::vector<std::string> skipped_text(const Race& race) {
  std::map<std::string, std::string> names;  // by reason
  for (const LeftOut& left_out : race.left_out) {
    std::string& list = names[left_out.reason];
    list += (list.empty() ? "" : "; ") + left_out.way.name();
  }
  std::vector<std::string> sentences;
  for (const auto& [reason, list] : names) {
    sentences.push_back("Skipped, since " + reason + ": " + list + ".");
  }
  return sentences;
}

/// Where the policy of a model's audited ways lies.
inline std::string policy_file(const Plan& plan, const Race& race, const std::string& dtype) {
  return plan.out / (race.model->name + "-" + dtype + ".policy");
}

inline std::vector<std::string> worker_command(const Plan& plan, const Race& race, const Way& way) {
  std::vector<std::string> command;
  if (way.variant == "kept") {
    // glibc then returns no freed memory to the kernel; see recipes.md in the guide.
    command = {"env", "MALLOC_MMAP_MAX_=0", "MALLOC_TRIM_THRESHOLD_=2147483647",
               "MALLOC_TOP_PAD_=67108864"};
  }
  if (way.is_python()) {
    command.insert(command.end(), {plan.python, "-B", plan.worker_script});
  } else {
    command.insert(command.end(), {plan.self, "--worker"});
  }
  const auto add = [&](const char* name, const std::string& value) {
    command.emplace_back(name);
    command.push_back(value);
  };
  add("--model", race.model->name);
  add("--task", plan.predicts ? "inference" : "training");
  add("--casts", way.casts);
  if (!way.is_python()) add("--variant", way.variant);
  add("--dtype", way.dtype);
  add("--optimizer", way.optimizer);
  add("--launch", way.launch);
  if (way.casts == "audited") add("--policy", policy_file(plan, race, way.dtype));
  add("--device", plan.device);
  add("--threads", std::to_string(plan.threads));
  for (const auto& [name, value] : race.sizes) add("--set", name + "=" + std::to_string(value));
  return command;
}

/// Has a policy chosen for what is trained in `dtype`, before anything else runs. Returns why it
/// could not be; empty if it could.
inline std::string audit(const Plan& plan, const Race& race, const std::string& dtype) {
  const std::string file = policy_file(plan, race, dtype);
  std::vector<std::string> command = worker_command(
      plan, race, {.casts = "torch", .dtype = dtype, .optimizer = "stock", .launch = "eager"});
  command.insert(command.end(), {"--audit", file});
  ChildProcess worker(std::move(command), plan.out / "workers.log");
  std::string reason = "its audit ended unexpectedly (see workers.log)";
  while (const auto line = worker.read_line()) {
    if (*line == "audited") return "";
    if (line->starts_with("error ")) reason = "its audit failed: " + line->substr(6);
  }
  return reason;
}

/// The ways to go with this model, of which `compiled` says whether they use torch.compile. A way
/// that cannot be gone is left out with its reason.
inline std::vector<Way> choose_ways(const Plan& plan, Race& race, bool compiled) {
  std::vector<Way> ways;
  std::map<std::string, std::string> audits;  // by dtype
  const bool python = !plan.python.empty(), host = plan.device == "cpu";
  for (Way& way : plan.predicts ? inference_ways(plan.dtypes, python, plan.compiled, host)
                                : all_ways(plan.dtypes, python, plan.compiled, host)) {
    const bool is_wanted = plan.predicts || std::find(plan.casts.begin(), plan.casts.end(),
                                                      way.casts) != plan.casts.end();
    if (!is_wanted || way.is_compiled() != compiled) continue;
    std::string reason = why_not(plan, *race.model, way);
    if (way.casts == "audited") {
      const auto [found, is_new] = audits.try_emplace(way.dtype);
      if (is_new) found->second = audit(plan, race, way.dtype);
      if (reason.empty()) reason = found->second;
    }
    if (reason.empty()) {
      ways.push_back(std::move(way));
    } else {
      race.left_out.push_back({std::move(way), std::move(reason)});
    }
  }
  return ways;
}

/// Starts the workers of some ways, which set themselves up side by side. `limit`: see Contestant;
/// 0: none.
inline void start(const Plan& plan, Race& race, const std::vector<Way>& ways, double limit) {
  for (const Way& way : ways) {
    race.contestants.emplace_back(way, worker_command(plan, race, way), plan.out / "workers.log",
                                  plan.clock == "wall" ? "seconds" : plan.clock,
                                  limit > 0. ? limit : std::numeric_limits<double>::infinity());
  }
}

/// Waits until the workers that start() has started for `ways` are ready. `show` is called after
/// each.
template <class Show>
void wait_until_ready(Race& race, const std::vector<Way>& ways, Show&& show) {
  auto contestant = race.contestants.end() - std::ssize(ways);
  for (const Way& way : ways) {
    (contestant++)->wait_until_ready();
    show(way);
  }
}

/// Lets the last contestants, which go `ways`, take turns: in each round every one runs the same
/// number of steps, and each round begins with another one, so that what disturbs the machine
/// disturbs all alike. `show` is called after each turn.
template <class Show>
void take_turns(const Plan& plan, Race& race, const std::vector<Way>& ways, Show&& show) {
  const std::size_t count = ways.size(), first = race.contestants.size() - count;
  for (std::size_t i = 0; i < count; ++i) {
    race.contestants[first + i].warm_up(race.steps);
    show(ways[i]);
  }
  for (std::int64_t round = 0; round < plan.rounds; ++round) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t turn = (i + static_cast<std::size_t>(round)) % count;
      race.contestants[first + turn].race(race.steps);
      show(ways[turn]);
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    Contestant& contestant = race.contestants[first + i];
    // On a GPU an op's time on the host tells nothing.
    if (plan.device == "cpu" && !ways[i].is_python() &&
        (ways[i].optimizer == "fused" || plan.predicts)) {
      contestant.profile(race.steps);
    }
    contestant.dismiss();
  }
}

/// Shows how far the ways of a model are.
class RaceProgress {
 public:
  RaceProgress(const Plan& plan, const Race& race, std::int64_t ways)
      : bar_(support::format("%-13s", race.title().c_str()), ways * (plan.rounds + 2)) {}

  void operator()(const Way& way) {
    ++done_;
    if (bar_.is_due(done_)) bar_.show(done_, way.name());
  }

 private:
  support::ProgressBar bar_;
  std::int64_t done_ = 0;
};

/// Lets all ways without torch.compile run, `plan.at_once` of them at a time.
inline void run(const Plan& plan, Race& race) {
  const std::vector<Way> ways = choose_ways(plan, race, /*compiled=*/false);
  RaceProgress progress(plan, race, std::ssize(ways));
  const std::int64_t most = plan.at_once > 0 ? plan.at_once : std::ssize(ways);
  for (auto begin = ways.begin(); begin != ways.end();) {
    const auto end = begin + std::min(most, ways.end() - begin);
    const std::vector<Way> some(begin, end);
    start(plan, race, some, plan.limit);
    wait_until_ready(race, some, progress);
    take_turns(plan, race, some, progress);
    begin = end;
  }
}

/// Lets all models' ways with torch.compile run. The workers of all models compile at once, which
/// takes minutes; then those of one model after another take turns. `write` is called after each
/// model.
template <class Write>
void run_compiled(const Plan& plan, std::deque<Race>& races, const Write& write) {
  std::vector<std::vector<Way>> ways;
  std::deque<RaceProgress> progress;
  for (Race& race : races) {
    ways.push_back(choose_ways(plan, race, /*compiled=*/true));
    start(plan, race, ways.back(), plan.compile_limit);
    progress.emplace_back(plan, race, std::ssize(ways.back()));
  }
  const auto shown = [&](std::size_t i) { return [&, i](const Way& way) { progress[i](way); }; };
  for (std::size_t i = 0; i < races.size(); ++i) wait_until_ready(races[i], ways[i], shown(i));
  for (std::size_t i = 0; i < races.size(); ++i) {
    if (ways[i].empty()) continue;
    take_turns(plan, races[i], ways[i], shown(i));
    write();
  }
}
