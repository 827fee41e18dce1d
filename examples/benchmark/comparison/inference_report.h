// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <ostream>
#include <string>

#include "benchmark/comparison/report.h"
#include "benchmark/comparison/verdict.h"
#include "support/format.h"

/// The ratio to the model that was cast by hand in the same dtype; nothing where there is none, or
/// where the way is that one itself.
inline std::optional<double> to_cast_model(const Race& race, const Verdict& verdict) {
  Way cast = verdict.contestant->way();
  if (cast.is_fp32() || (cast.casts == "cast" && !cast.is_python())) return std::nullopt;
  cast.language = "cpp";
  cast.casts = "cast";
  const Contestant* const other = find(race, cast);
  if (other == nullptr) return std::nullopt;
  return time_ratio(*verdict.contestant, *other);
}

inline void write_inference_table(std::ostream& out, const Race& race) {
  using support::format;
  out << "| way | time per call | ratio to the cast model | ratio to Python | saved against fp32 | "
         "first call | peak memory | mean output |\n|---|---:|---:|---:|---:|---:|---:|---:|\n";
  for (const Verdict& verdict : judge(race)) {
    const Contestant& contestant = *verdict.contestant;
    out << "| " << contestant.way().name() << " | ";
    if (contestant.failed()) {
      out << verdict.wrong << " | | | | | | |\n";
      continue;
    }
    const std::string size = format("%.4g", contestant.final_loss());
    if (!verdict.counts()) {
      out << "**wrong** | | | | | | **" << size << "**: " << verdict.wrong << " |\n";
      continue;
    }
    out << support::format_seconds(verdict.seconds) << " | "
        << ratio_cell(to_cast_model(race, verdict)) << " | " << ratio_cell(verdict.to_python)
        << " | " << (verdict.saved ? format("%.0f %%", *verdict.saved * 100.) : "") << " | "
        << support::format_seconds(contestant.first_call()) << " | "
        << support::format_bytes(contestant.peak_bytes()) << " | " << size << " |\n";
  }
}

/// The report of `--task inference`.
inline void write_inference_report(std::ostream& out, const Plan& plan,
                                   const Circumstances& circumstances,
                                   const std::deque<Race>& races) {
  write_origin(out, plan, circumstances, races);
  out << "Every way has the same weights and is given the same batches, in inference mode, with a "
         "guard around each call. "
      << (plan.clock == "wall" ? "Times are" : "Times are the workers' own processor time,")
      << " medians of the rounds, ratios\nmedians of the rounds' ratios. The *cast model* is one "
         "whose parameters and inputs the program has cast to 16 bits, "
         "all of whose ops run in\nthem; *all ops in 16 bits* is a policy under which they do in a "
         "model in fp32. *Python* is torch.autocast, or the cast model, under "
         "torch.inference_mode. The first call casts what later calls find. "
      << (plan.device == "cpu"
              ? "With *memory kept* the process gives no memory back to the kernel "
                "between calls (settings of glibc's malloc). "
              : "")
      << "Peak memory is\n"
      << (plan.device == "cpu" ? "by how much the process has grown"
                               : "what tensors held at most on the device")
      << ". The mean output is the mean absolute value of the last one; a way that disagrees with "
         "Python's or with\nfp32's is marked as wrong.\n\n";
  for (const Race& race : races) {
    std::int64_t parameters = 0;
    for (const Contestant& contestant : race.contestants) {
      parameters = std::max(parameters, contestant.parameters());
    }
    out << "### " << race.title() << "\n\n"
        << with_commas(parameters) << " parameters; " << sizes_text(race.sizes) << "; "
        << race.steps << " calls a round.\n\n";
    write_inference_table(out, race);
    out << '\n';
    write_profiles(out, race);
    for (const std::string& sentence : skipped_text(race)) out << sentence << "\n\n";
  }
}
