// SPDX-License-Identifier: BSD-3-Clause
// What scripts cost under at::autocast, under a guard and without: a BERT and a ResNet, traced and
// scripted by Python (script_benchmark.py), as loaded, frozen and optimised for inference; beside
// them the same model in C++. Without a Python that has torch: a small script of this program's.
#include <torch/script.h>
#include <torch/torch.h>
#include <torchamp/torchamp.h>
#include <torchamp/weight_cache.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "benchmark/comparison/machine.h"
#include "benchmark/comparison/measure.h"
#include "benchmark/comparison/page.h"
#include "benchmark/comparison/raw_autocast.h"
#include "benchmark/models/script_twins.h"
#include "support/arguments.h"
#include "support/cpu_features.h"
#include "support/format.h"

namespace {

using torch::jit::Module;
using Inputs = std::vector<c10::IValue>;

struct Options {
  std::string python = "auto", preset = "small", out = "torchamp-scripts";
  std::int64_t rounds = 30, calls = 3;
};

/// A script, how it is made ready, and what it is used for.
struct Subject {
  std::string name, kind;  // "BERT", "traced"
  bool trains = false;
  std::function<Module()> load;
  Inputs inputs{};
  std::function<at::Tensor(const ScriptTwin&, const Inputs&)> twin{};
  std::string preparation = "as loaded";
  Module (*prepare)(Module) = [](Module module) { return module; };

  std::string title() const {
    return name + ", " + kind + ", " + preparation + (trains ? ", training" : ", inference");
  }
};

// ---- Scripts ------------------------------------------------------------------------------------

/// A script that C++ compiles, with the parameters that ScriptTwin::small() has.
Module compile_small() {
  Module stem("Stem"), head("Head"), module("Small");
  torch::manual_seed(0);
  const auto add = [](Module& to, const char* name, const at::Tensor& value) {
    to.register_parameter(name, value.requires_grad_(), /*is_buffer=*/false);
  };
  add(stem, "weight", torch::randn({16, 3, 3, 3}) / 5.2);
  add(head, "weight", torch::randn({10, 16}) / 4.);
  add(head, "bias", torch::zeros({10}));
  module.register_module("stem", stem);
  module.register_module("head", head);
  module.define(R"(
def forward(self, x):
    x = torch.relu(torch.conv2d(x, self.stem.weight, None, [1, 1], [1, 1]))
    return torch.linear(x.mean([2, 3]), self.head.weight, self.head.bias)
)");
  return module;
}

Inputs load_inputs(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue list = torch::pickle_load(bytes);
  return list.toList().vec();
}

/// Adds a script as it is, and for inference in all its preparations.
void add(std::vector<Subject>& subjects, Subject subject) {
  subjects.push_back(subject);
  if (subject.trains) return;
  subject.preparation = "frozen";
  subject.prepare = [](Module module) { return torch::jit::freeze(module); };
  subjects.push_back(subject);
  subject.preparation = "optimised for inference";
  subject.prepare = [](Module module) { return torch::jit::optimize_for_inference(module); };
  subjects.push_back(std::move(subject));
}

std::vector<Subject> make_subjects(const Options& options) {
  std::vector<Subject> subjects;
  const std::string python = choose_python(options.python);
  const std::filesystem::path folder = options.out;
  std::filesystem::create_directories(folder);
  if (python.empty()) {
    torch::manual_seed(1);
    const at::Tensor images = torch::randn({4, 3, 8, 8});
    for (const bool trains : {false, true}) {
      const auto load = [trains] {
        Module module = compile_small();
        module.train(trains);
        return module;
      };
      add(subjects, {"Small", "compiled", trains, load, {images}, [](auto& twin, auto& inputs) {
                       return twin.small(inputs[0].toTensor());
                     }});
    }
    return subjects;
  }
  const std::string command =
      "'" + python + "' -B -W ignore " BENCHMARK_SOURCE_DIR "/script_benchmark.py --preset " +
      options.preset + " --out '" + folder.string() + "'";
  TORCH_CHECK(std::system(command.c_str()) == 0, "failed: ", command);
  for (const std::string name : {"BERT", "ResNet"}) {
    const bool is_bert = name == "BERT";
    const std::string file = (folder / (is_bert ? "bert" : "resnet")).string();
    for (const bool trains : {false, true}) {
      for (const std::string kind : {"traced", "scripted"}) {
        const std::string path = file + "-" + kind + (trains ? "-training.pt" : "-inference.pt");
        add(subjects, {name, kind, trains, [path] { return torch::jit::load(path); },
                       load_inputs(file + "-inputs.pt"),
                       [is_bert](auto& twin, auto& inputs) {
                         const at::Tensor first = inputs[0].toTensor();
                         return is_bert ? twin.bert(first, inputs[1].toTensor())
                                        : twin.resnet(first);
                       }});
      }
    }
  }
  return subjects;
}

// ---- Ways ---------------------------------------------------------------------------------------

/// One way to run a subject. Each has its own script, because the JIT keeps optimised code.
struct Way {
  std::string name;
  bool raw = false, eager = false;
  std::optional<torchamp::AutocastOptions> guard{};
  std::vector<double> seconds{};  // of each round
  at::Tensor result{};
};

std::vector<Way> make_ways(const Subject& subject) {
  using torchamp::Policy, torchamp::WeightCache;
  std::vector<Way> ways{{"fp32, eager", false, true}, {"fp32"}, {"at::autocast", true}};
  const auto add = [&](const char* name, const Policy& policy, bool eager, bool kept) {
    torchamp::AutocastOptions guard{.dtype = at::kBFloat16, .policy = policy};
    if (kept) guard.cache = WeightCache::kept;
    ways.push_back({name, false, eager, guard});
  };
  add("guard, torch policy", Policy::torch(), false, false);
  if (!subject.trains) add("guard, torch policy, kept", Policy::torch(), false, true);
  if (subject.kind == "traced" && subject.name == "ResNet") {
    add("guard, torch policy and _convolution", Policy::torch().lower_precision("_convolution"),
        false, false);
  }
  add("guard, eager", Policy::standard(), true, false);
  add("guard", Policy::standard(), false, false);
  if (!subject.trains) add("guard, kept", Policy::standard(), false, true);
  return ways;
}

class Runner {
 public:
  Runner(const Subject& subject, Way& way)
      : subject_(subject), way_(way), script_(subject.load()), twin_(script_, subject.trains) {
    for (const auto& parameter : script_.parameters()) parameters_.push_back(parameter);
    script_ = subject.prepare(script_);  // a frozen script has no parameters
  }

  void run() {
    if (!subject_.trains) {
      const c10::InferenceMode inference;
      way_.result = forward();
      return;
    }
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
    const at::Tensor result = forward();
    result.to(at::kFloat).square().mean().backward();
    way_.result = result.detach();
  }

 private:
  at::Tensor forward() {
    std::optional<RawAutocast> raw;
    std::optional<torchamp::AutocastGuard> guard;
    if (way_.raw) raw.emplace(at::kCPU, at::kBFloat16);
    if (way_.guard) guard.emplace(at::kCPU, *way_.guard);
    if (way_.eager) return subject_.twin(twin_, subject_.inputs);
    return script_.forward(subject_.inputs).toTensor();
  }

  const Subject& subject_;
  Way& way_;
  Module script_;
  ScriptTwin twin_;
  std::vector<at::Tensor> parameters_;
};

// ---- Measurements -------------------------------------------------------------------------------

/// Enough for the JIT to have optimised what it does.
constexpr int warm_up_runs = 4;

/// The median of the rounds' ratios.
double ratio(const Way& way, const Way& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < way.seconds.size(); ++i) {
    ratios.push_back(way.seconds[i] / other.seconds[i]);
  }
  return median(std::move(ratios));
}

double error_of(const at::Tensor& result, const at::Tensor& expected) {
  const at::Tensor reference = expected.to(at::kFloat);
  return ((result.to(at::kFloat) - reference).norm() / reference.norm()).item<double>();
}

/// Runs all ways in turns, and writes a table. Returns whether all agree with fp32.
bool measure(const Subject& subject, const Options& options, std::ostream& out) {
  std::vector<Way> ways = make_ways(subject);
  std::vector<Runner> runners;
  for (Way& way : ways) runners.emplace_back(subject, way);
  for (Runner& runner : runners) {
    for (int i = 0; i < warm_up_runs; ++i) runner.run();
  }
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    for (std::size_t i = 0; i < ways.size(); ++i) {
      const RunClock clock(at::kCPU);
      for (std::int64_t call = 0; call < options.calls; ++call) runners[i].run();
      ways[i].seconds.push_back(clock.read().processor / static_cast<double>(options.calls));
    }
  }
  const auto find = [&](const char* name) -> const Way& {
    return *std::find_if(ways.begin(), ways.end(), [&](auto& way) { return way.name == name; });
  };
  bool all_agree = true;
  out << "### " << subject.title()
      << "\n\n| way | time | to at::autocast | to the guard, eager | error |\n"
         "|---|---:|---:|---:|---:|\n";
  for (const Way& way : ways) {
    const double error = error_of(way.result, ways.front().result);
    const bool agrees = error < 0.05;  // not for NaN
    all_agree &= agrees;
    out << "| " << way.name << " | " << support::format_seconds(median(way.seconds)) << " | "
        << support::format("%.3f", ratio(way, find("at::autocast"))) << " | "
        << support::format("%.3f", ratio(way, find("guard, eager"))) << " | "
        << support::format(agrees ? "%.1e" : "**%.1e: wrong**", error) << " |\n";
  }
  out << std::endl;
  return all_agree;
}

/// Lets glibc's malloc keep freed memory, so that no call waits for new pages.
void keep_host_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

int run_main(int argc, char** argv) {
  Options options;
  support::Arguments arguments("script_benchmark",
                               "What scripts cost under at::autocast, under a guard and without.");
  arguments.add("--python", "PATH",
                "A Python with torch, which writes the scripts; none: this program's own. Default: "
                "python3, if it has torch.",
                options.python);
  arguments.add_choice("--preset", {"tiny", "small"}, "How large the models are. Default: small.",
                       options.preset);
  arguments.add_integer("--rounds", "In which all ways take turns. Default: 30.", options.rounds, 1,
                        1'000'000);
  arguments.add_integer("--calls", "In a round. Default: 3.", options.calls, 1, 1'000'000);
  arguments.add("--out", "DIR", "Where the scripts and the report go. Default: torchamp-scripts.",
                options.out);
  if (!arguments.parse(argc, argv)) return 0;
  torch::set_num_threads(1);
  keep_host_memory();
  const std::vector<Subject> subjects = make_subjects(options);
  std::ostringstream report;
  report << "LibTorch " << TORCH_VERSION
         << ". Processor time of one thread in bf16, host memory kept: medians of "
         << options.rounds
         << " rounds, and of the rounds' ratios. *Eager* is the same model in C++, with the "
            "script's weights. The error is\nthat of the result against fp32's.\n\n";
  bool all_agree = true;
  for (const Subject& subject : subjects) {
    std::ostringstream table;
    all_agree &= measure(subject, options, table);
    report << table.str();
    std::cout << table.str();
  }
  write_chapter(options.out, "scripts", support::cpu_name(), report.str());
  return all_agree ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return support::run_program("script_benchmark", [&] { return run_main(argc, argv); });
}
