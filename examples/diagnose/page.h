// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "diagnose/chart.h"
#include "diagnose/diagnose.h"
#include "diagnose/log.h"
#include "support/device.h"
#include "support/drawing/image.h"
#include "support/drawing/png_file.h"
#include "support/format.h"
#include "support/temporary_folder.h"

inline std::string base64(std::string_view bytes) {
  constexpr std::string_view letters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t three = 0;
    for (std::size_t k = 0; k < 3; ++k) {
      three = three << 8 | (i + k < bytes.size() ? static_cast<std::uint8_t>(bytes[i + k]) : 0U);
    }
    for (std::size_t k = 0; k < 4; ++k) {
      text += i + k <= bytes.size() ? letters[three >> (18 - 6 * k) & 63U] : '=';
    }
  }
  return text;
}

/// An image that needs no file beside the page.
inline std::string picture(const drawing::Image& image, const std::string& caption) {
  const support::TemporaryFolder folder("torchamp-diagnose");
  drawing::write_png(folder.path() / "one.png", image);
  std::ifstream file(folder.path() / "one.png", std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  return "<figure><img alt=\"" + escaped(caption) + "\" src=\"data:image/png;base64," +
         base64(bytes) + "\"><figcaption>" + escaped(caption) + "</figcaption></figure>\n";
}

inline std::string figure(const Chart& chart) {
  return "<figure>\n" + chart.svg() + "<figcaption>" + escaped(chart.title) +
         "</figcaption></figure>\n";
}

/// A table that scrolls in itself where it is wider than the page. The first `words` columns hold
/// words, the others numbers.
class HtmlTable {
 public:
  HtmlTable(const std::vector<std::string>& head, std::size_t words) : words_(words) {
    add(head, "th");
  }
  void add(const std::vector<std::string>& cells, const std::string& tag = "td") {
    text_ += "<tr>";
    for (std::size_t i = 0; i < cells.size(); ++i) {
      text_ += '<' + tag + (i < words_ ? " class=\"word\">" : ">") + escaped(cells[i]) + "</" +
               tag + '>';
    }
    text_ += "</tr>\n";
    ++rows_;
  }
  /// `otherwise`: what stands in place of a table without rows.
  std::string str(const std::string& otherwise) const {
    if (rows_ == 1) return "<p>" + escaped(otherwise) + "</p>\n";
    return "<div class=\"scroll\"><table>\n" + text_ + "</table></div>\n";
  }

 private:
  std::size_t words_, rows_ = 0;
  std::string text_;
};

inline std::string percent(double share) {
  if (!(share <= 1.)) return "overflow";
  return share == 0. ? "-" : support::format(share < 1e-4 ? "%.1e %%" : "%.2f %%", 100. * share);
}

/// "2^24", or the number itself where it is no such power.
inline std::string scale_text(double scale) {
  const double power = std::log2(scale);
  return power == std::floor(power) ? support::format("2^%g", power)
                                    : support::format("%.4g", scale);
}

inline std::string audit_section(const Diagnosis& found) {
  using support::format;
  constexpr std::size_t most = 15;
  HtmlTable table(
      {"op", "module", "error", "gradients lost", "overflow", "fp32 us", "16 bits us", "casts us"},
      2);
  Chart chart{.title =
                  "What lowering each op costs (error) and saves; orange: stays in fp32 "
                  "whatever it saves",
              .x_label = "milliseconds saved in a step, casts not counted",
              .points = {},
              .joined = false,
              .log_y = true};
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    const torchamp::AuditRow& row = found.rows[i];
    const bool harms =
        torchamp::detail::is_harmful(row, torchamp::AuditBudget{}.gradient_loss_limit);
    chart.points.push_back(
        {(row.fp32_us - row.low_us) * 1e-3, row.error, i < 3 ? row.op : "", harms});
    if (i >= most) continue;
    table.add({row.op, row.module, format("%.2e", row.error), percent(row.gradient_loss),
               percent(row.overflow), format("%.1f", row.fp32_us), format("%.1f", row.low_us),
               format("%.1f", row.cast_us)});
  }
  const std::string rest =
      found.rows.size() <= most
          ? std::string()
          : format("<p>The most harmful %zu of %zu.</p>\n", most, found.rows.size());
  const torchamp::AuditedPolicy& chosen = found.chosen;
  HtmlTable times({"", "step", "error of the gradients"}, 1);
  times.add({"fp32", support::format_seconds(chosen.fp32_us * 1e-6), "0"});
  times.add({"Policy::torch()", support::format_seconds(chosen.torch_us * 1e-6),
             format("%.2e", chosen.torch_error)});
  times.add({"chosen", support::format_seconds(chosen.us * 1e-6), format("%.2e", chosen.error)});
  HtmlTable rules({"rule", "op", "module", "why"}, 4);
  for (const torchamp::AuditDecision& decision : chosen.decisions) {
    rules.add({decision.lowered ? "lower_precision" : "fp32", decision.op, decision.module,
               decision.reason});
  }
  return "<h3>Audit</h3>\n<p>Each op in 16 bits, its error weighed by the gradient that arrives "
         "there.</p>\n" +
         table.str("No op can be cast.") + rest + figure(chart) + "<h3>Policy chosen</h3>\n" +
         format("<p>Quartiles of a step's time are up to %.0f us apart.</p>\n", chosen.spread_us) +
         times.str("") + rules.str("Policy::torch() as it is.");
}

inline std::string casts_section(const Diagnosis& found) {
  constexpr std::size_t most = 12;
  HtmlTable table({"phase", "op", "module", "casts", "KiB", "undone"}, 3);
  for (std::size_t i = 0; i < found.casts.size() && i < most; ++i) {
    const auto& row = found.casts[i];
    if (row.casts == 0) break;
    table.add({row.backward ? "backward" : "forward", row.op, row.module, std::to_string(row.casts),
               support::format("%.1f", static_cast<double>(row.cast_bytes) / 1024.),
               std::to_string(row.undone)});
  }
  return "<h3>Casts</h3>\n<p>Of the last step; those that moved most bytes.</p>\n" +
         table.str("Nothing was cast.");
}

inline std::string underflow_section(const Diagnosis& found) {
  constexpr std::size_t most = 12;
  HtmlTable table({"module", "gradients", "share", "zero", "elements"}, 2);
  const auto& rows = found.underflow.rows;
  for (std::size_t i = 0; i < rows.size() && i < most; ++i) {
    table.add({rows[i].module.empty() ? "(between modules)" : rows[i].module,
               rows[i].of_weights ? "of weights" : "of inputs", percent(rows[i].share()),
               std::to_string(rows[i].lost), std::to_string(rows[i].elements)});
  }
  Chart chart{.title = "Elements of 16-bit gradients that underflow, in per cent",
              .x_label = "step",
              .points = {}};
  for (const auto& step : found.underflow.steps) {
    chart.points.push_back({static_cast<double>(step.step), 100. * step.share()});
  }
  return "<h3>Underflow</h3>\n<p>Elements that are zero in 16 bits only.</p>\n" +
         table.str("No gradient has 16 bits.") + figure(chart);
}

/// What `of` was in each step; orange: skipped ones.
inline std::string curve(const std::string& title, const std::vector<LoggedStep>& steps,
                         double LoggedStep::*of) {
  Chart chart{.title = title, .x_label = "step", .points = {}};
  for (const LoggedStep& step : steps) {
    chart.points.push_back({step.step, step.*of, "", of == &LoggedStep::scale && step.skipped});
  }
  chart.log_y = std::ranges::none_of(steps, [&](const auto& step) { return step.*of <= 0.; });
  return figure(chart);
}

inline std::string scale_section(const std::vector<LoggedStep>& steps) {
  return "<h3>Scale</h3>\n<div class=\"row\">" +
         curve("Scale; orange: skipped steps", steps, &LoggedStep::scale) +
         curve("Loss", steps, &LoggedStep::loss) + "</div>\n";
}

inline std::string overflow_section(const Diagnosis& found) {
  constexpr std::size_t most = 12;
  HtmlTable table({"gradient", "step", "scale", "infs", "NaNs", "elements"}, 1);
  std::size_t shown = 0;
  for (const Skip& skip : found.skips) {
    for (const torchamp::Overflow& one : skip.overflow.overflows) {
      if (shown++ >= most) break;
      table.add({one.name, std::to_string(skip.step), scale_text(skip.scale),
                 std::to_string(one.infs), std::to_string(one.nans), std::to_string(one.elements)});
    }
  }
  std::string op;
  if (!found.skips.empty() && !found.skips.front().op.empty()) {
    op = "<p>First made by</p>\n<div class=\"scroll\"><pre>" + escaped(found.skips.front().op) +
         "</pre></div>\n";
  }
  return "<h3>Overflows</h3>\n" + op + table.str("No step was skipped.");
}

inline std::string count_text(const std::vector<LoggedStep>& steps) {
  return support::format(" %zu steps, %td of them skipped; loss %.4g, then %.4g.", steps.size(),
                         std::ranges::count_if(steps, &LoggedStep::skipped), steps.front().loss,
                         steps.back().loss);
}

inline std::string section(const Diagnosis& found, std::size_t number) {
  using support::format;
  std::string pictures;
  if (found.program.pictures) {
    for (const auto& [caption, image] : found.program.pictures()) {
      pictures += picture(image, caption);
    }
    pictures = "<div class=\"row pixels\">" + pictures + "</div>\n";
  }
  return format("<section id=\"program%zu\">\n<h2>", number) + escaped(found.program.name) +
         "</h2>\n<p>" + escaped(found.program.about) + count_text(found.steps) + "</p>\n" +
         pictures + audit_section(found) + casts_section(found) + underflow_section(found) +
         scale_section(found.steps) + overflow_section(found) + "</section>\n";
}

/// A file that refers to no other.
inline std::string page_of(const std::string& body) {
  return R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Mixed precision, looked at</title>
<style>
body { font: 16px/1.45 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 0 auto; padding: 0 1rem 3rem; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 2px solid #2b6cb0; } h3 { margin: 1.6rem 0 .3rem; }
nav a { margin-right: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .3rem 0 1rem; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
.word { text-align: left; }
figure { margin: .8rem 0; max-width: 30rem; flex: 1 1 18rem; }
figcaption { font-size: .85rem; color: #555; }
img, svg { max-width: 100%; width: 100%; height: auto; display: block; }
.row { display: flex; flex-wrap: wrap; gap: 0 1.5rem; }
.pixels figure { max-width: 9rem; flex: 1 1 7rem; } .pixels img { image-rendering: pixelated; }
pre { font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
svg text { font-size: 11px; fill: #444; } svg .grid { stroke: #ddd; }
svg polyline { fill: none; stroke: #2b6cb0; stroke-width: 1.5; } svg circle { fill: #2b6cb0; } svg .bad { fill: #dd6b20; }
</style>
</head>
<body>
<h1>Mixed precision, looked at</h1>
)" + body +
         "</body>\n</html>\n";
}

/// All of it.
inline std::string page(const std::vector<Diagnosis>& all, const Setting& setting) {
  std::string links, sections;
  for (std::size_t i = 0; i < all.size(); ++i) {
    links +=
        support::format("<a href=\"#program%zu\">", i) + escaped(all[i].program.name) + "</a> ";
    sections += section(all[i], i);
  }
  return page_of(
      "<p>Three training programs in " + std::string(support::short_name(setting.dtype)) + " on " +
      escaped(setting.device.str()) + ". The scale starts at " + scale_text(setting.init_scale) +
      ", so that it may overflow.</p>\n<nav>" + links + "</nav>\n" + sections);
}

/// A run by its log.
inline std::string page(const std::vector<LoggedStep>& steps, const std::string& file) {
  std::string body = "<h2>" + escaped(file) + "</h2>\n<p>" + count_text(steps) + "</p>\n" +
                     scale_section(steps) + "<h3>Norm</h3>\n<div class=\"row\">";
  if (std::ranges::any_of(steps, [](const auto& step) { return !std::isnan(step.norm); })) {
    body += curve("Norm of the gradients, before clipping", steps, &LoggedStep::norm);
  }
  return page_of(body + curve("Seconds that each step took", steps, &LoggedStep::seconds) +
                 "</div>\n");
}
