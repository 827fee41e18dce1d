// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/race.h"
#include "benchmark/comparison/verdict.h"
#include "support/format.h"
#include "support/table.h"

/// What the report says of the machine and of how it was made.
struct Circumstances {
  std::string device_name;  ///< "NVIDIA H200", "AMD EPYC 9R14"
  std::string device;       ///< a sentence or two
  std::string command;
  std::string recorded;  ///< of earlier runs: what is said of them, in place of these two
};

/// The library that the C++ workers named.
inline std::string libtorch_of(const std::deque<Race>& races) {
  for (const Race& race : races) {
    for (const Contestant& contestant : race.contestants) {
      if (!contestant.way().is_python()) return "LibTorch " + contestant.libtorch();
    }
  }
  return "LibTorch";
}

/// "7,703,497"
inline std::string with_commas(std::int64_t number) {
  std::string text = std::to_string(number);
  for (std::ptrdiff_t at = std::ssize(text) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), 1, ',');
  }
  return text;
}

inline std::string sizes_text(const Sizes& sizes) {
  std::string text;
  for (const auto& [name, value] : sizes) {
    text += (text.empty() ? "" : ", ") + name + " " + std::to_string(value);
  }
  return text;
}

inline std::string ratio_cell(const std::optional<double>& ratio) {
  return ratio ? support::format("%.2f", *ratio) : "";
}

/// The fastest of a language's ways that count, of any dtype.
inline const Verdict* best_of(const std::vector<Verdict>& verdicts, const std::string& casts,
                              const std::string& optimizer, const std::string& launch,
                              const std::string& variant = "plain",
                              const std::string& language = "cpp") {
  const Verdict* best = nullptr;
  for (const Verdict& verdict : verdicts) {
    const Way& way = verdict.contestant->way();
    if (way.language != language || way.casts != casts || way.optimizer != optimizer ||
        way.launch != launch || way.variant != variant || !verdict.counts()) {
      continue;
    }
    if (!best || verdict.seconds < best->seconds) best = &verdict;
  }
  return best;
}

/// A way of torchamp's, as a column of the summary.
struct SummaryColumn {
  const char *casts, *optimizer, *launch, *variant, *title;

  const Verdict* best(const std::vector<Verdict>& verdicts) const {
    return best_of(verdicts, casts, optimizer, launch, variant);
  }
};

inline std::vector<SummaryColumn> summary_columns(const std::deque<Race>& races, bool cuda) {
  std::vector<SummaryColumn> columns{{"standard", "stock", "eager", "plain", "stock optimizer"},
                                     {"standard", "fused", "eager", "plain", "fused"}};
  if (cuda) {
    columns.push_back({"standard", "fused", "captured", "plain", "captured"});
  } else {
    columns.push_back({"standard", "fused", "eager", "kept", "fused, memory kept"});
  }
  const SummaryColumn audited{"audited", "fused", "eager", cuda ? "plain" : "kept",
                              cuda ? "audited, fused" : "audited, fused, memory kept"};
  for (const Race& race : races) {
    if (!audited.best(judge(race))) continue;
    columns.push_back(audited);
    break;
  }
  return columns;
}

inline double mean(const std::vector<double>& values) {
  double sum = 0.;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// One line for each model: what torchamp takes of Python's time and saves against fp32, beside
/// what torch.amp saved elsewhere.
inline void write_summary(std::ostream& out, const std::deque<Race>& races, bool cuda) {
  const std::vector<SummaryColumn> columns = summary_columns(races, cuda);
  out << "| model ";
  for (const SummaryColumn& column : columns) {
    out << "| " << column.title << " | saved against fp32 ";
  }
  out << "| torch.amp saved on GPUs |\n|---";
  for (std::size_t i = 0; i < columns.size(); ++i) out << "|---:|---:";
  out << "|---:|\n";
  std::vector<std::vector<double>> ratios(columns.size());
  for (const Race& race : races) {
    out << "| " << race.model->title;
    const auto verdicts = judge(race);
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const Verdict* const best = columns[i].best(verdicts);
      out << " | " << (best ? ratio_cell(best->to_python) : "") << " | "
          << (best && best->saved ? support::format("%.0f %%", *best->saved * 100.) : "");
      if (best && best->to_python) ratios[i].push_back(*best->to_python);
    }
    out << " | " << race.model->saved_elsewhere << " |\n";
  }
  if (races.size() < 2 || ratios.front().empty()) return;
  out << "| *in the mean*";
  for (const auto& of_column : ratios) {
    out << " | " << (of_column.empty() ? "" : support::format("%.2f", mean(of_column))) << " | ";
  }
  out << " | |\n";
}

/// What keeping the host's memory gains over a Python that does not.
inline void write_kept_over_plain(std::ostream& out, const std::deque<Race>& races) {
  for (const SummaryColumn& column : summary_columns(races, /*cuda=*/false)) {
    if (column.variant != std::string("kept")) continue;
    std::vector<double> ratios;
    for (const Race& race : races) {
      const auto verdicts = judge(race);
      const Verdict* const best = column.best(verdicts);
      if (!best) continue;
      Way plain = python_twin(best->contestant->way());
      plain.variant = "plain";
      if (const Contestant* const python = find(race, plain)) {
        ratios.push_back(time_ratio(*best->contestant, *python));
      }
    }
    if (ratios.empty()) continue;
    out << "\nOver a Python that does not keep its memory, \"" << column.title << "\" takes ";
    for (std::size_t i = 0; i < ratios.size(); ++i) {
      out << (i == 0 ? "" : ", ") << support::format("%.2f", ratios[i]);
    }
    out << support::format("; in the mean %.2f.\n", mean(ratios));
  }
}

/// The distance between the quartiles of a contestant's rounds, in seconds.
inline double spread(const Contestant& contestant) {
  std::vector<double> seconds;
  for (const Round& round : contestant.rounds()) seconds.push_back(round.seconds);
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() * 3 / 4] - seconds[seconds.size() / 4];
}

/// A line for each model and optimizer: an audit's choice beside Policy::torch(). Nothing if
/// nothing was audited.
inline void write_audited(std::ostream& out, const std::deque<Race>& races) {
  using support::format;
  using support::format_seconds;
  std::string lines;
  for (const Race& race : races) {
    for (const Contestant& contestant : race.contestants) {
      Way way = contestant.way();
      if (way.casts != "audited" || contestant.failed()) continue;
      way.casts = "torch";
      const Contestant* const torchs = find(race, way);
      const Contestant* const fp32 = find(race, fp32_twin(way));
      const Verdict chosen = judge(race, contestant);
      if (torchs == nullptr || !chosen.counts()) continue;
      const double seconds = judge(race, *torchs).seconds;
      const double noise = 2. * std::max(spread(contestant), spread(*torchs));
      const bool is_enough = contestant.rounds().size() >= 4;  // to have quartiles
      const char* const result = !is_enough                         ? "too few rounds"
                                 : chosen.seconds < seconds - noise ? "faster"
                                 : chosen.seconds > seconds + noise ? "slower"
                                                                    : "within noise";
      lines += "| " + race.model->title + " | " + way.dtype + ", " + way.optimizer + " | " +
               (fp32 ? format_seconds(judge(race, *fp32).seconds) : "") + " | " +
               format_seconds(seconds) + " | " + format_seconds(chosen.seconds) + " | " +
               format("%.2f", time_ratio(contestant, *torchs)) + " | " + format_seconds(noise) +
               " | " + result + " |\n";
    }
  }
  if (lines.empty()) return;
  out << "### An audited policy beside Policy::torch()\n\n"
         "What PrecisionAudit chose for each model before the ways took turns; the files "
         "MODEL-DTYPE.policy "
         "beside this page have every rule\nwith its reason. Noise is twice the larger distance "
         "between the quartiles of the two ways' rounds.\n\n"
         "| model | | fp32 | Policy::torch() | audited | ratio | noise | |\n"
         "|---|---|---:|---:|---:|---:|---:|---|\n"
      << lines << '\n';
}

/// A way that stands beside torch.compile, with the same dtype and optimizer.
struct BesideCompiled {
  const char *title, *language, *casts, *launch, *variant;
};
inline std::vector<BesideCompiled> beside_compiled(bool cuda) {
  if (cuda) {
    return {{"Python, captured", "python", "torch", "captured", "plain"},
            {"torchamp", "cpp", "standard", "eager", "plain"},
            {"torchamp, captured", "cpp", "standard", "captured", "plain"}};
  }
  return {{"torchamp, torch policy", "cpp", "torch", "eager", "plain"},
          {"standard policy", "cpp", "standard", "eager", "plain"},
          {"audited policy", "cpp", "audited", "eager", "plain"},
          {"standard, memory kept", "cpp", "standard", "eager", "kept"},
          {"audited, memory kept", "cpp", "audited", "eager", "kept"}};
}

/// A line for each model that torch.compile trained. Nothing if there is none.
inline void write_compiled(std::ostream& out, const std::deque<Race>& races, bool cuda) {
  std::string lines;
  for (const Race& race : races) {
    const auto verdicts = judge(race);
    for (const Verdict& compiled : verdicts) {
      const Way& way = compiled.contestant->way();
      if (!way.is_compiled() || !compiled.counts()) continue;
      lines += "| " + race.model->title + ", " + way.dtype + " | " +
               support::format_seconds(compiled.seconds) + " | " + ratio_cell(compiled.to_python);
      for (const BesideCompiled& one : beside_compiled(cuda)) {
        const Contestant* const other = find(
            race, {one.language, one.casts, way.dtype, way.optimizer, one.launch, one.variant});
        lines += " | " + (other ? ratio_cell(time_ratio(*other, *compiled.contestant)) : "");
      }
      const double first = compiled.contestant->first_call();
      lines += " | " + (first > 0. ? support::format_seconds(first) : "") + " |\n";
    }
  }
  if (lines.empty()) return;
  out << "### torch.compile\n\n"
         "Python's torch.amp with the loss function under `torch.compile`, whose compiler fuses "
         "chains of pointwise ops and the casts\namong them into one loop; with a fused optimizer, "
         "as the others of this table. The first call compiles. The columns between are the times "
         "of other ways over that of torch.compile.\n\n"
         "| model | time per step | ratio to eager Python |";
  std::string rule = "|---|---:|---:|";
  for (const BesideCompiled& one : beside_compiled(cuda)) {
    out << ' ' << one.title << " |";
    rule += "---:|";
  }
  out << " first call |\n" << rule << "---:|\n" << lines << '\n';
}

inline void write_table(std::ostream& out, const Race& race) {
  using support::format;
  out << "| way | time per step | ratio to Python | saved against fp32 | peak memory | final loss "
         "|\n|---|---:|---:|---:|---:|---:|\n";
  for (const Verdict& verdict : judge(race)) {
    const Contestant& contestant = *verdict.contestant;
    out << "| " << contestant.way().name() << " | ";
    if (contestant.failed()) {
      out << verdict.wrong << " | | | | |\n";
      continue;
    }
    const std::string loss = format("%.4g", contestant.final_loss());
    if (!verdict.counts()) {
      out << "**wrong** | | | " << support::format_bytes(contestant.peak_bytes()) << " | **" << loss
          << "**: " << verdict.wrong << " |\n";
      continue;
    }
    out << support::format_seconds(verdict.seconds) << " | " << ratio_cell(verdict.to_python)
        << " | " << (verdict.saved ? format("%.0f %%", *verdict.saved * 100.) : "") << " | "
        << support::format_bytes(contestant.peak_bytes()) << " | " << loss << " |\n";
  }
}

/// Where the time of a step goes, of the ways that were asked.
inline void write_profiles(std::ostream& out, const Race& race) {
  bool any = false;
  for (const Contestant& contestant : race.contestants) {
    if (contestant.shares().empty()) continue;
    if (!any) {
      out << "| % of the time of a step ";
      for (const char* kind : kOpKinds) out << "| " << kind << ' ';
      out << "|\n|---";
      for (std::size_t i = 0; i < kOpKinds.size(); ++i) out << "|---:";
      out << "|\n";
    }
    any = true;
    out << "| " << contestant.way().name();
    for (const double share : contestant.shares()) out << support::format(" | %.0f", share * 100.);
    out << " |\n";
  }
  if (any) out << '\n';
}

/// Where, with what and how it was measured.
inline void write_origin(std::ostream& out, const Plan& plan, const Circumstances& circumstances,
                         const std::deque<Race>& races) {
  if (!circumstances.recorded.empty()) {
    out << circumstances.recorded << "\n\n";
    return;
  }
  std::string cpp, python;
  for (const Race& race : races) {
    for (const Contestant& contestant : race.contestants) {
      (contestant.way().is_python() ? python : cpp) = contestant.libtorch();
    }
  }
  out << circumstances.device << " C++ with LibTorch " << cpp
      << (python.empty()
              ? std::string(", no Python")
              : ", Python with torch " + python + (python == cpp ? "" : " (**another version**)"))
      << ". " << plan.rounds << " rounds in turns"
      << (plan.at_once > 0
              ? support::format(" of %lld ways at a time", static_cast<long long>(plan.at_once))
              : "")
      << ", after one to warm up. Made by\n\n    " << circumstances.command << "\n\n";
}

inline void write_report(std::ostream& out, const Plan& plan, const Circumstances& circumstances,
                         const std::deque<Race>& races) {
  write_origin(out, plan, circumstances, races);
  out << "Every configuration starts from the same weights, takes the same batches and the "
         "same number of steps. "
      << (plan.clock == "wall" ? "Times are" : "Times are the workers' own processor time,")
      << " medians of\nthe rounds. A *ratio to Python* is the median over the "
         "rounds of the time over that of Python with the same dtype and\nkind of optimizer, run "
         "eagerly (\"fused\": `fused=True`, else PyTorch's own choice); *saved against fp32* is "
         "measured against\nthe same configuration in fp32. Peak memory is "
      << (plan.device == "cpu" ? "by how much the process has grown"
                               : "what tensors held at most on the device")
      << ". The final loss is the mean of the last round; a configuration whose loss disagrees "
         "with\n"
         "Python's or with fp32's is marked as wrong and has no time. \"at::autocast by hand\" "
         "switches LibTorch's own autocast and uses\ntorchamp's GradScaler, as LibTorch has "
         "none. "
      << (plan.device == "cpu"
              ? "LibTorch's own record of ops, in steps apart from the rounds, tells where the "
                "time of a step goes. \"optimizer\"\nhas fused and `_foreach_` kernels and the "
                "scaler's; \"norms\" also has softmax and losses; \"rest\" is all that is no op: "
                "autograd, the\nprogram, and torchamp outside of ops.\n\n"
              : "\n\n");
  if (std::find(plan.casts.begin(), plan.casts.end(), "standard") != plan.casts.end()) {
    out << "### Summary: torchamp's time over Python's\n\n"
           "The standard policy, in the faster dtype where there are two. The last column is what "
           "torch.amp saved against fp32 on NVIDIA's V100 and\nT4 when it was new, by a well-known "
           "measurement (ResidentMario's spell-feedforward-rossman, spell-unet-bob-ross and\n"
           "spell-tweet-sentiment-extraction).\n\n";
    write_summary(out, races, plan.device == "cuda");
    if (plan.device != "cuda") write_kept_over_plain(out, races);
    out << '\n';
  }
  write_audited(out, races);
  write_compiled(out, races, plan.device == "cuda");
  out << "![Time per step, relative to fp32](time.png)\n\n"
         "![Peak memory, relative to fp32](memory.png)\n\n";
  if (!plan.python.empty()) out << "![Time over Python's](ratio.png)\n\n";
  for (const Race& race : races) {
    std::int64_t parameters = 0;
    for (const Contestant& contestant : race.contestants) {
      parameters = std::max(parameters, contestant.parameters());
    }
    out << "### " << race.model->title << "\n\n"
        << with_commas(parameters) << " parameters; " << sizes_text(race.sizes) << "; "
        << race.steps << " steps a round.\n\n";
    write_table(out, race);
    out << '\n';
    write_profiles(out, race);
    for (const std::string& sentence : skipped_text(race)) out << sentence << "\n\n";
  }
}

/// Every round of every way.
inline void write_csv(std::ostream& out, const std::deque<Race>& races) {
  out << "model,language,casts,dtype,optimizer,launch,variant,round,steps,seconds_per_step,loss,"
         "peak_bytes,"
         "wrong\n";
  for (const Race& race : races) {
    for (const Verdict& verdict : judge(race)) {
      const Way& way = verdict.contestant->way();
      std::int64_t number = 0;
      for (const Round& round : verdict.contestant->rounds()) {
        out << race.model->name << (race.variant.empty() ? "" : " " + race.variant) << ','
            << way.language << ',' << way.casts << ',' << way.dtype << ',' << way.optimizer << ','
            << way.launch << ',' << way.variant << ',' << ++number << ',' << race.steps << ','
            << support::format("%.6g,%.6g,%lld", round.seconds, round.loss,
                               static_cast<long long>(round.peak_bytes))
            << ',' << (verdict.counts() ? "no" : "yes") << '\n';
      }
    }
  }
}

/// The table for the screen. Returns whether all ways came to their end and to the same loss.
inline bool print_table(std::ostream& out, const Race& race) {
  support::Table table({"", "time/step", "to Python", "saved", "memory", "final loss"});
  std::string complaints;
  for (const Verdict& verdict : judge(race)) {
    const Contestant& contestant = *verdict.contestant;
    const std::string name = contestant.way().name();
    if (!verdict.counts()) complaints += "  " + name + ": " + verdict.wrong + "\n";
    if (contestant.failed()) {
      table.add({name, "failed"});
      continue;
    }
    table.add({name, verdict.counts() ? support::format_seconds(verdict.seconds) : "wrong",
               ratio_cell(verdict.to_python),
               verdict.saved ? support::format("%.0f %%", *verdict.saved * 100.) : "",
               support::format_bytes(contestant.peak_bytes()),
               support::format("%.4g", contestant.final_loss())});
  }
  out << table << complaints;
  for (const std::string& sentence : skipped_text(race)) out << "  " << sentence << '\n';
  return complaints.empty();
}
