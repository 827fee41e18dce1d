// SPDX-License-Identifier: BSD-3-Clause
// Six models, trained in every way that a user of LibTorch or PyTorch has, side by side: time,
// memory and final loss; or predicting. `comparison --help` lists the options.
#include <algorithm>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <locale>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/charts.h"
#include "benchmark/comparison/earlier_runs.h"
#include "benchmark/comparison/group_worker.h"
#include "benchmark/comparison/growth.h"
#include "benchmark/comparison/inference_report.h"
#include "benchmark/comparison/machine.h"
#include "benchmark/comparison/op_count.h"
#include "benchmark/comparison/options.h"
#include "benchmark/comparison/page.h"
#include "benchmark/comparison/processes.h"
#include "benchmark/comparison/processes_report.h"
#include "benchmark/comparison/race.h"
#include "benchmark/comparison/report.h"
#include "benchmark/comparison/worker.h"
#include "support/drawing/png_file.h"

namespace {

/// Writes a file of the report.
template <class Write>
void write_text(const Plan& plan, const char* name, const Write& write) {
  std::ofstream file(plan.out / name);
  file.imbue(std::locale::classic());
  write(file);
  std::cout << "Wrote " << (plan.out / name).string() << '\n';
}

template <class Write>
void write_chapter(const Plan& plan, const Circumstances& circumstances, const char* task,
                   const Write& write) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  write(text);
  ::write_chapter(plan.out, task, circumstances.device_name, text.str());
}

void write_chart(const Plan& plan, const char* name, const drawing::Canvas& canvas) {
  drawing::write_png(plan.out / name, canvas.image());
  std::cout << "Wrote " << (plan.out / name).string() << '\n';
}

int grow(const Plan& plan, const Circumstances& circumstances, std::int64_t largest) {
  const std::vector<GrownCost> costs = measure_growth(plan, largest);
  write_chapter(plan, circumstances, "growth",
                [&](auto& file) { write_growth_report(file, plan, circumstances, costs); });
  write_text(plan, "growth.csv", [&](auto& file) { write_growth_csv(file, costs); });
  return 0;
}

/// What --task processes makes of the options. Throws support::UsageError.
Options for_processes(Options options) {
#ifndef COMPARISON_HAS_GLOO
  throw support::UsageError(
      "--task processes: this program was compiled without Gloo's headers (apt install "
      "libgloo-dev)");
#endif
  if (options.device.device == "cuda") throw support::UsageError("--task processes: is for a CPU");
  options.device.device = "cpu";
  if (options.models.empty()) options.models = {"gpt"};
  for (const std::string& name : options.models) {
    if (name == "feed_forward" || name == "bert" || name == "gpt") continue;
    throw support::UsageError("--models: '" + name +
                              "' is not for --task processes, but feed_forward, bert, gpt");
  }
  if (options.threads == 0) options.threads = 1;
  return options;
}

int train_together(const Options& options, const Plan& plan, const Circumstances& circumstances) {
  std::deque<Race> models;
  std::deque<GroupRace> races;
  for (const std::string& name : options.models) {
    const ModelEntry& model = find_model(name);
    models.push_back({.model = &model,
                      .sizes = sizes_of(model, plan.preset, options.sizes),
                      .steps = options.steps.value_or(model.steps.at(plan.preset))});
    for (const std::string& processes : options.processes) {
      races.push_back({.race = &models.back(), .processes = std::stoll(processes)});
      run(plan, races.back(), options.bucket_bytes);
    }
  }
  const GroupRace* const drawn = drawn_race(races);
  write_chapter(plan, circumstances, "processes", [&](auto& file) {
    write_processes_report(file, plan, circumstances, races, drawn != nullptr);
  });
  write_text(plan, "processes.csv", [&](auto& file) { write_processes_csv(file, races); });
  if (drawn) {
    write_chart(plan, "processes.png",
                draw_processes(circumstances.device_name + ", LibTorch " TORCH_VERSION, *drawn));
  }
  bool all_right = true;
  for (const GroupRace& race : races) {
    std::cout << '\n' << race.race->title() << ", " << race.processes << " processes:\n";
    write_group_table(std::cout, race);
    for (const Gang& gang : race.gangs) all_right &= race.wrong(gang).empty();
  }
  return all_right ? 0 : 1;
}

/// The chapter (unless its charts alone are drawn again), the raw numbers and the charts.
void write_all(const Plan& plan, const Circumstances& circumstances, const std::deque<Race>& races,
               bool charts_only = false) {
  std::string below = circumstances.device_name;
  if (!circumstances.command.empty()) below += ", " + libtorch_of(races);  // this run's
  if (plan.device != "cuda") below += std::string(", ") + name_of(plan.preset) + " sizes";
  const std::string timed = below + (plan.clock == "wall" ? "" : ", processor time");
  const char* const task = plan.predicts ? "inference" : "training";
  const bool cuda = plan.device == "cuda";
  if (!charts_only) {
    write_chapter(plan, circumstances, task, [&](auto& file) {
      plan.predicts ? write_inference_report(file, plan, circumstances, races)
                    : write_report(file, plan, circumstances, races);
    });
    write_text(plan, plan.predicts ? "inference.csv" : "training.csv",
               [&](auto& file) { write_csv(file, races); });
  }
  if (plan.predicts) return;
  write_chart(plan, "time.png", draw_times(timed, races, cuda));
  write_chart(plan, "memory.png", draw_memory(below, races));
  if (!plan.python.empty()) write_chart(plan, "ratio.png", draw_ratios(timed, races, cuda));
}

/// The models that are wanted, each for each batch, without contestants.
std::deque<Race> make_races(const Options& options, const Plan& plan) {
  std::deque<Race> races;
  std::vector<std::string> names = options.models;
  for (const ModelEntry& model : all_models()) {
    const bool is_default = plan.predicts ? is_for_inference(model) : !only_predicts(model);
    if (options.models.empty() && is_default) names.push_back(model.name);
  }
  for (const std::string& name : names) {
    const ModelEntry& model = find_model(name);
    if (!plan.predicts && only_predicts(model)) {
      throw support::UsageError("--models: '" + model.name + "' is for --task inference");
    }
    Race race{.model = &model,
              .sizes = sizes_of(model, plan.preset, options.sizes),
              .steps = options.steps.value_or(model.steps.at(plan.preset))};
    if (!plan.predicts || !race.sizes.contains("batch")) {
      races.push_back(std::move(race));
      continue;
    }
    for (const std::int64_t batch : {1, 16}) {
      race.sizes["batch"] = batch;
      race.variant = "batch " + std::to_string(batch);
      races.push_back(Race{race.model, race.sizes, race.steps, {}, {}, race.variant});
    }
  }
  return races;
}

/// Draws the charts of earlier runs again, and writes their report if there is something to say.
int report_again(const Options& options) {
  const Circumstances circumstances = read_about(options.about);
  const Preset preset = preset_named(options.preset).value_or(Preset::small);
  const std::deque<Race> races = read_races(options, preset);
  write_all(plan_of_earlier_runs(options, races, preset), circumstances, races,
            circumstances.recorded.empty());
  return 0;
}

int compare(const Options& options, const std::string& command) {
  if (!options.from.empty()) return report_again(options);
  const Plan plan = make_plan(options);
  const Circumstances circumstances = describe(plan, command);
  if (options.task == "growth") return grow(plan, circumstances, options.largest);
  if (options.task == "processes") return train_together(options, plan, circumstances);
  if (options.task == "ops") {
    return count_ops(std::cout, plan, make_races(options, plan)) ? 0 : 1;
  }
  std::cout << circumstances.device << '\n'
            << (plan.python.empty()
                    ? std::string("Without Python; --python PATH names one that has torch.")
                    : "Python: " + plan.python)
            << "\n\n";

  // After each model, because the next may never end.
  std::deque<Race> races;
  const auto write = [&] {
    std::cout << '\n';
    write_all(plan, circumstances, races);
  };
  for (Race& race : make_races(options, plan)) {
    races.push_back(std::move(race));
    run(plan, races.back());
    write();
  }
  if (plan.compiled) run_compiled(plan, races, write);

  bool all_right = true;
  for (const Race& race : races) {
    std::cout << '\n' << race.title() << ":\n";
    all_right &= print_table(std::cout, race);
  }
  return all_right ? 0 : 1;
}

int run_main(int argc, char** argv) {
  if (argc > 1 && argv[1] == std::string("--worker")) {
    const WorkerOptions options = parse_worker_options(argc, argv);
#ifdef COMPARISON_HAS_GLOO
    if (options.is_grouped) {
      return serve_in_group(
          {options.model, options.way, options.sizes, options.threads, options.bucket_bytes});
    }
#endif
    return serve(options);
  }
  const std::optional<Options> options = parse_options(argc, argv);
  if (!options) return 0;
  return compare(options->task == "processes" ? for_processes(*options) : *options,
                 command_without_paths(argc, argv));
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("comparison", [&] { return run_main(argc, argv); });
}
