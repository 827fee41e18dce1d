// SPDX-License-Identifier: BSD-3-Clause
// GradScaler::save and load.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "torchamp/detail/core/base/checksum.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// The value of `key`. Throws if it is missing, or if `is` returns false for it.
inline c10::IValue read_number(torch::serialize::InputArchive& archive, const std::string& key,
                               bool (c10::IValue::*is)() const, const char* type) {
  c10::IValue value;
  TORCHAMP_CHECK(archive.try_read(key, value), "GradScaler::load: the archive has no \"", key,
                 "\". Load what torch::save(scaler, path) has written.");
  TORCHAMP_CHECK((value.*is)(), "GradScaler::load: \"", key, "\" is of type ", value.tagKind(),
                 ", not ", type, ". Load what torch::save(scaler, path) has written.");
  return value;
}
inline double read_double(torch::serialize::InputArchive& archive, const std::string& key) {
  return read_number(archive, key, &c10::IValue::isDouble, "Double").toDouble();
}
inline int64_t read_int(torch::serialize::InputArchive& archive, const std::string& key) {
  return read_number(archive, key, &c10::IValue::isInt, "Int").toInt();
}

inline double read_count(torch::serialize::InputArchive& archive, const std::string& key) {
  const int64_t count = read_int(archive, key);
  TORCHAMP_CHECK_VALUE(count >= 0, "GradScaler::load: \"", key, "\" is ", count,
                       ", a negative count.");
  TORCHAMP_CHECK_VALUE(count <= int64_t{1} << 53, "GradScaler::load: \"", key, "\" is ", count,
                       ". A count must be at most 2^53.");
  return static_cast<double>(count);
}

// Note [What an archive of a scaler holds]
// The state of torch.amp, torchamp's own numbers under the names of their rows, and in
// "torchamp_numbers" the list of these names. The checksum covers the numbers in the list, because
// LibTorch does not detect changed bytes in a file. An archive of an earlier version has no list or
// a shorter one; missing numbers have their initial values. If a number is listed and has no row, a
// later version has written the archive.

inline int64_t checksum_of(const GradScalerState& state, const std::vector<double>& numbers) {
  Checksum sum;
  const auto add = [&](double value) { sum.add(&value, sizeof value); };
  add(state.scale);
  add(state.growth_factor);
  add(state.backoff_factor);
  add(static_cast<double>(state.growth_interval));
  add(static_cast<double>(state.growth_tracker));
  for (const double number : numbers) add(number);
  return static_cast<int64_t>(sum.value());
}

/// Reads torchamp's own numbers into `rest`, which has the initial values, and compares the
/// checksum.
inline void read_own_numbers(torch::serialize::InputArchive& archive, const GradScalerState& state,
                             ScaleMemory<double>& rest) {
  const char* const damaged =
      "GradScaler::load: the archive is damaged: its values are not those that were saved.";
  const char* const of_later_version =
      "GradScaler::load: the archive was saved by a later version of torchamp, whose GradScaler "
      "also remembers \"";
  c10::IValue list, checksum, number;
  const bool has_list = archive.try_read("torchamp_numbers", list);
  TORCHAMP_CHECK(!has_list || list.isString(), damaged);
  // The numbers of archives without a list. This version uses some of them. An archive may have
  // fewer.
  std::istringstream names(has_list ? list.toStringRef()
                                    : "torchamp_credit torchamp_since_change torchamp_overflows "
                                      "torchamp_skips_in_a_row");
  std::vector<double> numbers;
  for (std::string name; names >> name;) {
    const auto* const end = std::end(scale_memory_rows<double>);
    const auto* const row = std::find_if(std::begin(scale_memory_rows<double>), end,
                                         [&](const auto& one) { return one.name == name; });
    const bool is_known = row != end;
    const bool is_held = archive.try_read(name, number);
    TORCHAMP_CHECK(!has_list || is_held, damaged);
    TORCHAMP_CHECK(is_known || !has_list, of_later_version, name,
                   "\". Load it with that version, or set GradScalerOptions::init_scale to ",
                   state.scale, ", its scale.");
    double value = is_known ? rest.*row->number : 0.;
    const bool is_whole = !is_known || row->is_whole;
    if (is_held) value = is_whole ? read_count(archive, name) : read_double(archive, name);
    if (is_known) rest.*row->number = value;
    numbers.push_back(value);
  }
  TORCHAMP_CHECK(!archive.try_read("torchamp_checksum", checksum) ||
                     (checksum.isInt() && checksum.toInt() == checksum_of(state, numbers)),
                 damaged);
}

}  // namespace detail

TORCHAMP_BODY void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  const auto is_open = [](const auto& weak) {
    const auto window = weak.lock();
    return window && window->pending > 0;
  };
  TORCHAMP_CHECK(std::none_of(ledger_.windows.begin(), ledger_.windows.end(), is_open),
                 "GradScaler::save: within a window of gradient accumulation, whose gradients a "
                 "file does not hold. Save after the accumulation's step, or first end the window: "
                 "Accumulation::flush() steps with it, discard() drops it.");
  archive.write("enabled", c10::IValue(is_enabled()));
  if (!is_enabled()) return;
  TORCHAMP_CHECK(
      !ledger_.optimizers.within_iteration(),
      "GradScaler::save: within an iteration, after unscale_ or step. Save after update().");
  const detail::ScaleMemory<double> values = scale_.read();
  const GradScalerState state = scale_.state_of(values);
  archive.write("growth_factor", c10::IValue(state.growth_factor));
  archive.write("backoff_factor", c10::IValue(state.backoff_factor));
  archive.write("growth_interval", c10::IValue(state.growth_interval));
  std::string names;
  std::vector<double> numbers;
  for (const auto& row : detail::scale_memory_rows<double>) {
    const double value = values.*row.number;
    archive.write(std::string(row.name),
                  row.is_whole ? c10::IValue(static_cast<int64_t>(value)) : c10::IValue(value));
    if (!row.is_own()) continue;
    numbers.push_back(value);
    names.append(names.empty() ? "" : " ").append(row.name);
  }
  archive.write("torchamp_numbers", c10::IValue(names));
  archive.write("torchamp_checksum", c10::IValue(detail::checksum_of(state, numbers)));
}

TORCHAMP_BODY void GradScaler::load(torch::serialize::InputArchive& archive) {
  if (!is_enabled()) return;
  c10::IValue enabled;
  TORCHAMP_CHECK(
      !archive.try_read("enabled", enabled) || !enabled.isBool() || enabled.toBool(),
      "GradScaler::load: the archive was saved from a disabled GradScaler and holds no state.");
  const GradScalerState state{.scale = detail::read_double(archive, "scale"),
                              .growth_factor = detail::read_double(archive, "growth_factor"),
                              .backoff_factor = detail::read_double(archive, "backoff_factor"),
                              .growth_interval = detail::read_int(archive, "growth_interval"),
                              .growth_tracker = detail::read_int(archive, "growth_tracker")};
  detail::ScaleMemory<double> rest = detail::initial_memory(options());
  const double full_credit = rest.credit;
  c10::IValue samples;
  TORCHAMP_CHECK(!archive.try_read("torchamp_samples", samples),
                 "GradScaler::load: the archive was saved from a scaler with "
                 "GradScalerOptions::predictive(), which torchamp does not have. Continue "
                 "with a new GradScaler({.init_scale = ",
                 state.scale, "}), which has the archive's scale.");
  detail::read_own_numbers(archive, state, rest);
  rest.credit = std::min(rest.credit, full_credit);
  detail::restore_scaler(*this, "GradScaler::load", state, rest);
}

}  // namespace TORCHAMP_NAMESPACE
