// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/utils.h>

#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "benchmark/comparison/options.h"
#include "benchmark/comparison/race.h"
#include "benchmark/comparison/report.h"
#include "support/arguments.h"
#include "support/cpu_features.h"
#include "support/device.h"
#include "support/product_times.h"

/// What a shell command writes, up to the first line's end; empty if it fails.
inline std::string first_line_of(const std::string& command) {
  std::string line;
  std::FILE* const pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (!pipe) return line;
  char buffer[512];
  if (std::fgets(buffer, sizeof buffer, pipe)) line = buffer;
  while (std::fgets(buffer, sizeof buffer, pipe)) {
  }
  if (pclose(pipe) != 0) return "";
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  return line;
}

/// The Python to compare with: the one that was asked for, which must have torch; else python3 if
/// it has. Empty: none.
inline std::string choose_python(const std::string& wish) {
  if (wish == "none") return "";
  const std::string path = wish == "auto" ? "python3" : wish;
  const bool has_torch =
      first_line_of(
          "'" + path +
          "' -c \"import importlib.util as u; print(u.find_spec('torch') is not None)\"") == "True";
  if (has_torch) return path;
  if (wish == "auto") return "";
  throw support::UsageError("--python: '" + wish + "' is no Python that has torch");
}

/// The command line to repeat a comparison with. Paths are this machine's own.
inline std::string command_without_paths(int argc, const char* const* argv) {
  std::string command = "comparison";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--python" || argument == "--out") {
      ++i;
    } else if (!argument.starts_with("--python=") && !argument.starts_with("--out=")) {
      command += " " + argument;
    }
  }
  return command;
}

inline constexpr std::pair<const char*, Preset> presets[] = {
    {"small", Preset::small}, {"large", Preset::large}, {"full", Preset::full}};

/// Nothing for "auto".
inline std::optional<Preset> preset_named(const std::string& wish) {
  for (const auto& [name, preset] : presets) {
    if (wish == name) return preset;
  }
  return std::nullopt;
}

inline const char* name_of(Preset wanted) {
  for (const auto& [name, preset] : presets) {
    if (preset == wanted) return name;
  }
  return "";
}

/// The preset that was asked for; else the one that fits the device. On a CPU products are timed.
inline void choose_preset(Plan& plan, const std::string& wish) {
  plan.why.clear();
  if (plan.device != "cpu") {
    plan.preset = Preset::full;
  } else {
    torch::set_num_threads(static_cast<int>(plan.threads));
    const auto dtype = plan.dtypes.back() == "fp16" ? at::kHalf : at::kBFloat16;
    const support::ProductTimes times = support::time_products(dtype);
    plan.preset = times.speedup() >= 1.3 ? Preset::large : Preset::small;
    plan.why = support::describe(times, dtype) + " ";
  }
  plan.preset = preset_named(wish).value_or(plan.preset);
  plan.why += std::string("The preset is ") + name_of(plan.preset);
  plan.why += wish == "auto" ? "." : ", as was asked for.";
}

/// All that is settled before the first worker starts. Throws support::UsageError.
inline Plan make_plan(const Options& options) {
  Plan plan;
  plan.device = options.device.chosen_device().str();
  const bool cuda = plan.device == "cuda";
  plan.predicts = options.task == "inference";
  plan.self = std::filesystem::read_symlink("/proc/self/exe").string();
  plan.python = choose_python(options.python);
  plan.worker_script = BENCHMARK_SOURCE_DIR "/worker.py";
  plan.compiled = options.compile == "yes";
  if (plan.compiled && plan.python.empty()) {
    throw support::UsageError("--compile yes: needs a Python that has torch (--python PATH)");
  }
  plan.casts = options.casts;
  plan.dtypes = options.dtypes;
  if (plan.dtypes.empty()) {
    const auto is_fast = [cuda](at::ScalarType dtype) {
      return cuda || !support::fast_matmul_units(dtype).empty();
    };
    if (is_fast(at::kHalf)) plan.dtypes.emplace_back("fp16");
    if (is_fast(at::kBFloat16) || plan.dtypes.empty()) plan.dtypes.emplace_back("bf16");
  }
  plan.rounds = options.rounds;
  plan.at_once = options.at_once.value_or(cuda ? 6 : 0);  // below 70 GiB with the largest model
  plan.limit = static_cast<double>(options.limit);
  plan.compile_limit = static_cast<double>(options.compile_limit);
  plan.threads = options.threads > 0 || cuda ? options.threads : torch::get_num_threads();
  choose_preset(plan, options.preset);
  plan.clock = options.clock;
  if (plan.clock == "processor" && (cuda || plan.threads != 1)) {
    throw support::UsageError("--clock processor: needs --device cpu --threads 1");
  }
  plan.out = options.out;
  std::error_code error;
  std::filesystem::create_directories(plan.out, error);
  if (error) {
    throw support::UsageError("--out: cannot make the folder '" + plan.out.string() +
                              "': " + error.message());
  }
  std::filesystem::remove(plan.out / "workers.log", error);
  return plan;
}

inline Circumstances describe(const Plan& plan, const std::string& command) {
  Circumstances circumstances;
  circumstances.command = command;
#ifndef NDEBUG
  circumstances.command += "    (built for debugging: the times of C++ do not count)";
#endif
  if (plan.device == "cuda") {
    const std::string name = first_line_of("nvidia-smi --query-gpu=name --format=csv,noheader");
    circumstances.device_name = name.empty() ? "CUDA device" : name;
    circumstances.device = circumstances.device_name + ". " + plan.why;
    return circumstances;
  }
  circumstances.device_name = support::cpu_name();
  circumstances.device =
      support::format("%s, %lld thread%s", support::cpu_name().c_str(),
                      static_cast<long long>(plan.threads), plan.threads == 1 ? "" : "s");
  for (const std::string& name : plan.dtypes) {
    std::string units;
    for (const auto& unit :
         support::fast_matmul_units(name == "fp16" ? at::kHalf : at::kBFloat16)) {
      units += (units.empty() ? "" : ", ") + unit;
    }
    circumstances.device += units.empty() ? ", without fast " + name + " products"
                                          : ", with fast " + name + " products (" + units + ")";
  }
  circumstances.device += ". " + plan.why;
  return circumstances;
}
