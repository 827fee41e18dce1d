// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "benchmark/comparison/worker.h"
#include "benchmark/models.h"
#include "support/arguments.h"
#include "support/device.h"

/// What the command line says.
struct Options {
  bool is_worker = false;
  WorkerOptions worker;

  support::DeviceOptions device;
  std::vector<std::string> models;  ///< empty: all
  std::vector<std::string> dtypes;  ///< empty: those that the device is fast in
  std::vector<std::string> casts{"fp32", "tf32", "raw", "torch", "standard"};
  std::string task = "training";
  std::string preset = "auto";
  std::string python = "auto";
  std::string compile = "no";
  std::vector<std::string> sizes;  ///< as given: MODEL.NAME=N
  std::optional<std::int64_t> steps;
  std::int64_t rounds = 7;
  std::int64_t threads = 0;
  std::optional<std::int64_t> at_once;
  std::int64_t limit = 0;
  std::int64_t compile_limit = 0;
  std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  std::vector<std::string> processes{"1", "2", "4"};
  std::int64_t bucket_bytes = 0;
  std::string clock = "wall";
  std::vector<std::string> from;  ///< files of earlier runs, which are reported again
  std::string about;
  std::filesystem::path out = "torchamp-comparison";
};

/// The parts of "a,b,c".
inline std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char letter : text) {
    if (letter == ',') {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  return parts;
}

/// Changes the size that "NAME=N" names. Throws support::UsageError.
inline void set_size(Sizes& sizes, const std::string& text) {
  const std::size_t equals = text.find('=');
  const auto size = sizes.find(text.substr(0, equals));
  std::string known;
  for (const auto& [name, value] : sizes) known += (known.empty() ? "" : ", ") + name;
  if (size == sizes.end()) {
    throw support::UsageError("'" + text + "' names no size; there are " + known);
  }
  std::size_t end = 0;
  try {
    size->second = std::stoll(text.substr(equals + 1), &end);
  } catch (const std::exception&) {
  }
  if (equals == std::string::npos || end == 0 || equals + 1 + end != text.size() ||
      size->second < 1) {
    throw support::UsageError("'" + text + "' gives no whole number above 0");
  }
}

/// The sizes of `preset`, with what the options change.
inline Sizes sizes_of(const ModelEntry& model, Preset preset,
                      const std::vector<std::string>& changes) {
  Sizes sizes = model.sizes.at(preset);
  for (const std::string& change : changes) {
    if (change.starts_with(model.name + ".")) set_size(sizes, change.substr(model.name.size() + 1));
  }
  return sizes;
}

/// The options, or nothing if --help was among them. Throws support::UsageError.
inline std::optional<Options> parse_options(int argc, const char* const* argv) {
  Options options;
  std::string out = options.out.string();
  support::Arguments arguments("comparison",
                               "Trains six models in fp32 and in mixed precision, with LibTorch "
                               "by hand, with torchamp and\n"
                               "with Python's torch.amp, all from the same weights and in turns, "
                               "and writes what each takes\n"
                               "as a table, as charts and as raw numbers; or lets them predict.");
  const auto list = [](std::vector<std::string>& values, std::vector<std::string> known) {
    return [&values, known = std::move(known)](const std::string& text) {
      values = split_list(text);
      for (const std::string& value : values) {
        if (std::find(known.begin(), known.end(), value) == known.end()) {
          std::string names;
          for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
          throw support::UsageError("'" + value + "' is none of " + names);
        }
      }
    };
  };
  std::vector<std::string> names;
  for (const ModelEntry& model : all_models()) names.push_back(model.name);
  arguments.add_choice("--task", {"training", "inference", "growth", "processes", "ops"},
                       "inference: the models predict, one call at a time, for batches of 1 and of "
                       "16. ops: how many ops a step\nof each model calls in either language. "
                       "growth: no models;\nhow the costs of guard, scaler, clip and policies "
                       "grow. processes: several train one model on a CPU.\nDefault: training.",
                       options.task);
  arguments.add_choice("--device", {"auto", "cpu", "cuda"}, "Default: CUDA where there is one.",
                       options.device.device);
  arguments.add("--models", "LIST",
                "Of feed_forward,unet,bert,gpt,yolo,checkerboard, in the order in which they run; "
                "for inference also\ngpt_generation,gpt_cached. "
                "Default: all; for inference all but feed_forward and checkerboard; for processes "
                "gpt.",
                list(options.models, names));
  arguments.add("--dtypes", "LIST",
                "Of fp16,bf16. Default: both on CUDA; on a CPU those it is fast in, else bf16.",
                list(options.dtypes, {"fp16", "bf16"}));
  arguments.add("--casts", "LIST",
                "Of fp32,tf32,raw,torch,standard,audited: none, none with TF32 products (CUDA), "
                "at::autocast by hand, and\nthree policies, the last of which PrecisionAudit "
                "chooses before the others start. Default: all but audited.",
                list(options.casts, {"fp32", "tf32", "raw", "torch", "standard", "audited"}));
  arguments.add_choice(
      "--preset", {"auto", "small", "large", "full"},
      "Sizes of models and batches. Default: full on CUDA; on a CPU large if 16-bit products are\n"
      "faster than fp32's, as measured at the start, else small.",
      options.preset);
  arguments.add("--set", "MODEL.SIZE=N", "Another size, such as bert.batch=8. May be repeated.",
                [&](const std::string& text) {
                  const std::string model = text.substr(0, text.find('.'));
                  sizes_of(find_model(model), Preset::small, {text});
                  options.sizes.push_back(text);
                });
  arguments.add("--python", "PATH",
                "The Python that has torch; none: without. Default: python3 if it has torch.",
                options.python);
  arguments.add_choice("--compile", {"no", "yes"},
                       "yes: also Python's torch.compile, after all other ways of all models. It "
                       "takes minutes and needs a C++\ncompiler and Python's headers. Default: no.",
                       options.compile);
  arguments.add_integer("--rounds", "How often each takes its turn. Default: 7.", options.rounds, 1,
                        1000);
  arguments.add_integer("--steps", "Steps of a turn. Default: depends on the model.", options.steps,
                        1, 100'000);
  arguments.add_integer("--at-once",
                        "How many ways of a model take turns, each with its process and its "
                        "memory; then the next.\nDefault: 6 on CUDA, else all.",
                        options.at_once, 1, 1000);
  arguments.add_integer("--limit",
                        "Seconds that a way may take to set itself up, and again for its turns; "
                        "then it is ended, and has the\nrounds that it has done. Default: none.",
                        options.limit, 1, 100'000);
  arguments.add_integer("--compile-limit", "The same of a way with torch.compile. Default: none.",
                        options.compile_limit, 1, 100'000);
  arguments.add_integer("--largest", "Of the sizes of --task growth. Default: all.",
                        options.largest, 1, options.largest);
  arguments.add("--processes", "LIST", "Of 1,2,4,8, for --task processes. Default: 1,2,4.",
                list(options.processes, {"1", "2", "4", "8"}));
  arguments.add_integer("--bucket",
                        "Bytes of gradients that --task processes sends at once. Default: each "
                        "library's choice.",
                        options.bucket_bytes, 1, std::int64_t{1} << 40);
  arguments.add_integer("--threads",
                        "Of each worker on a CPU. Default: LibTorch's choice; 1 for processes.",
                        options.threads, 1, 1024);
  arguments.add_choice("--clock", {"wall", "processor"},
                       "What is measured. processor: the workers' own processor time, to which "
                       "other programs on a\nbusy machine add little; on a CPU with --threads 1.",
                       options.clock);
  arguments.add(
      "--from", "LIST",
      "Files of raw numbers that earlier runs wrote: nothing is measured, their charts "
      "are drawn again, as one.\nMay be repeated. --task, --device, --preset and --set as "
      "they were then.",
      [&](const std::string& text) {
        for (std::string& path : split_list(text)) options.from.push_back(std::move(path));
      });
  arguments.add("--about", "FILE",
                "For --from: '# MACHINE, LIBRARY', which stands above the charts. If text follows, "
                "the chapter of the report\nis written again and begins with it.",
                options.about);
  arguments.add("--out", "DIR", "Where the report goes. Default: " + out + ".", out);
  if (!arguments.parse(argc, argv)) return std::nullopt;
  options.out = out;
  if (options.from.empty() != options.about.empty()) {
    throw support::UsageError("--from and --about are given together");
  }
  if (!options.from.empty() && (options.task == "processes" || options.task == "growth")) {
    throw support::UsageError("--from: is for --task training and inference");
  }
  return options;
}

/// The options of a worker, whose first argument is --worker. Nobody but comparison gives them.
inline WorkerOptions parse_worker_options(int argc, const char* const* argv) {
  WorkerOptions options;
  std::string task = "training";
  support::Arguments arguments("comparison --worker", "Serves the comparison.");
  arguments.add("--model", "NAME", "", [&](const std::string& text) {
    options.model = text;
    options.sizes = find_model(text).sizes.at(Preset::small);
  });
  arguments.add_choice("--task", {"training", "inference", "processes"}, "", task);
  arguments.add_choice("--casts",
                       {"fp32", "tf32", "raw", "torch", "standard", "audited", "torch_kept",
                        "standard_kept", "narrow_kept", "cast"},
                       "", options.way.casts);
  arguments.add("--policy", "FILE", "", options.policy);
  arguments.add("--audit", "FILE", "", options.audit);
  arguments.add_choice("--dtype", {"fp32", "tf32", "fp16", "bf16"}, "", options.way.dtype);
  arguments.add_choice("--optimizer", {"stock", "fused", "muon"}, "", options.way.optimizer);
  arguments.add_choice("--launch", {"eager", "captured"}, "", options.way.launch);
  arguments.add_choice("--variant",
                       {"plain", "masters", "recomputed", "together", "unfused", "kept", "parallel",
                        "parallel_16", "sharded", "sharded_16"},
                       "", options.way.variant);
  arguments.add_integer("--bucket", "", options.bucket_bytes, 0, std::int64_t{1} << 40);
  arguments.add("--device", "DEVICE", "", options.device);
  arguments.add_integer("--threads", "", options.threads, 0, 1024);
  arguments.add("--set", "SIZE=N", "",
                [&](const std::string& text) { set_size(options.sizes, text); });
  arguments.parse(argc - 1, argv + 1);
  options.predicts = task == "inference";
  options.is_grouped = task == "processes";
  return options;
}
