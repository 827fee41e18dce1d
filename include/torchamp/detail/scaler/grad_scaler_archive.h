// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/checksum.h"
#include "torchamp/detail/scaler/check_options.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// The number under `key`. Throws where it is missing or something else.
inline double read_double(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value), "GradScaler::load: the archive has no \"", key,
              "\". Load what torch::save(scaler, path) has written.");
  TORCH_CHECK(value.isDouble(), "GradScaler::load: \"", key, "\" is of type ", value.tagKind(),
              ", not Double. Load what torch::save(scaler, path) has written.");
  return value.toDouble();
}

inline int64_t read_int(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value), "GradScaler::load: the archive has no \"", key,
              "\". Load what torch::save(scaler, path) has written.");
  TORCH_CHECK(value.isInt(), "GradScaler::load: \"", key, "\" is of type ", value.tagKind(),
              ", not Int. Load what torch::save(scaler, path) has written.");
  return value.toInt();
}

/// A count that may be missing: an older version, or a program, did not write it.
inline double read_count(torch::serialize::InputArchive& archive, const std::string& key,
                         double otherwise) {
  c10::IValue value;
  if (!archive.try_read(key, value)) return otherwise;
  const int64_t count = read_int(archive, key);
  TORCH_CHECK_VALUE(count >= 0, "GradScaler::load: \"", key, "\" is ", count,
                    ", a negative count.");
  TORCH_CHECK_VALUE(count <= int64_t{1} << 53, "GradScaler::load: \"", key, "\" is ", count,
                    ". No scaler has counted beyond 2^53.");
  return static_cast<double>(count);
}

/// Of all that a file holds: LibTorch does not see that a file's bytes have changed.
inline int64_t checksum_of(const GradScalerState& state, const ScaleMemory<double>& rest) {
  Checksum sum;
  const auto add = [&](const char*, double value) { sum.add(&value, sizeof value); };
  add("scale", state.scale);
  add("growth_factor", state.growth_factor);
  add("backoff_factor", state.backoff_factor);
  add("growth_interval", static_cast<double>(state.growth_interval));
  add("growth_tracker", static_cast<double>(state.growth_tracker));
  for_each_own_number(add, rest);
  for (const double number : rest.of_rule) add("", number);
  return static_cast<int64_t>(sum.value());
}

inline GradScalerState state_of(const GradScalerOptions& options,
                                const ScaleMemory<double>& values) {
  return {.scale = values.scale,
          .growth_factor = options.growth_factor,
          .backoff_factor = options.backoff_factor,
          .growth_interval = options.growth_interval,
          .growth_tracker = static_cast<int64_t>(values.growth_tracker)};
}

}  // namespace detail

TORCHAMP_BODY GradScalerState GradScaler::state_dict() const {
  if (!options_.enabled) return {};
  return detail::state_of(options_, state_.read());
}

/// Takes over `state`, and of `rest` what the state does not hold.
TORCHAMP_BODY void GradScaler::restore(const char* call, const GradScalerState& state,
                                       detail::ScaleMemory<double> rest) {
  detail::check_state(call, state, options_);
  const detail::InternalOps guard;
  rest.scale = static_cast<float>(state.scale);
  rest.growth_tracker =
      static_cast<double>(std::min(state.growth_tracker, state.growth_interval - 1));
  before_change();
  state_.set(rest);
  options_.growth_factor = state.growth_factor;
  options_.backoff_factor = state.backoff_factor;
  options_.growth_interval = state.growth_interval;
}

TORCHAMP_BODY void GradScaler::load_state_dict(const GradScalerState& state) {
  if (!options_.enabled) return;
  restore("GradScaler::load_state_dict", state, detail::initial_memory(options_));
}

TORCHAMP_BODY void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  TORCH_CHECK(!windows_.any(),
              "GradScaler::save: within a window of gradient accumulation, whose gradients no file "
              "would hold. Save after the accumulation's step, or end the window before: "
              "Accumulation::flush() or SafeAccumulation::step() steps with it, discard() drops "
              "it.");
  archive.write("enabled", c10::IValue(options_.enabled));
  if (!options_.enabled) return;
  TORCH_CHECK(
      !optimizers_.within_iteration(),
      "GradScaler::save: within an iteration, after unscale_ or step. Save after update().");
  const detail::ScaleMemory<double> values = state_.read();
  const GradScalerState state = detail::state_of(options_, values);
  archive.write("scale", c10::IValue(state.scale));
  archive.write("growth_factor", c10::IValue(state.growth_factor));
  archive.write("backoff_factor", c10::IValue(state.backoff_factor));
  archive.write("growth_interval", c10::IValue(state.growth_interval));
  archive.write("growth_tracker", c10::IValue(state.growth_tracker));
  detail::for_each_own_number(
      [&](const char* name, double count) {
        archive.write(name, c10::IValue(static_cast<int64_t>(count)));
      },
      values);
  for (std::size_t i = 0; i < values.of_rule.size(); ++i) {
    archive.write(detail::rule_numbers[i], c10::IValue(values.of_rule[i]));
  }
  archive.write("torchamp_checksum", c10::IValue(detail::checksum_of(state, values)));
}

TORCHAMP_BODY void GradScaler::load(torch::serialize::InputArchive& archive) {
  if (!options_.enabled) return;
  c10::IValue enabled;
  TORCH_CHECK(
      !archive.try_read("enabled", enabled) || !enabled.isBool() || enabled.toBool(),
      "GradScaler::load: the archive was saved from a disabled GradScaler and holds no state.");
  const GradScalerState state{.scale = detail::read_double(archive, "scale"),
                              .growth_factor = detail::read_double(archive, "growth_factor"),
                              .backoff_factor = detail::read_double(archive, "backoff_factor"),
                              .growth_interval = detail::read_int(archive, "growth_interval"),
                              .growth_tracker = detail::read_int(archive, "growth_tracker")};
  detail::ScaleMemory<double> rest = detail::initial_memory(options_);
  const double full_credit = rest.credit;
  detail::for_each_own_number(
      [&](const char* name, double& count) { count = detail::read_count(archive, name, count); },
      rest);
  const std::vector<double> of_rule = std::exchange(rest.of_rule, {});
  c10::IValue ignored, checksum;
  if (archive.try_read(detail::rule_numbers[0], ignored)) {
    for (const char* const name : detail::rule_numbers) {
      const double number = rest.of_rule.emplace_back(detail::read_double(archive, name));
      TORCH_CHECK_VALUE(std::isfinite(number), "GradScaler::load: \"", name, "\" is ", number,
                        ", not finite.");
    }
  }
  TORCH_CHECK(
      !archive.try_read("torchamp_checksum", checksum) ||
          (checksum.isInt() && checksum.toInt() == detail::checksum_of(state, rest)),
      "GradScaler::load: the archive is damaged: its values are not those that were saved.");
  rest.credit = std::min(rest.credit, full_credit);
  if (rest.of_rule.size() != of_rule.size()) rest.of_rule = of_rule;  // the file of another rule
  restore("GradScaler::load", state, rest);
}

}  // namespace TORCHAMP_NAMESPACE

namespace torch {

/// torch::load for a GradScaler: LibTorch's reader throws exceptions of several kinds for an
/// archive that is damaged; here they are all c10::Errors.
template <class... From>
void load(torchamp::GradScaler& scaler, From&&... from) {
  serialize::InputArchive archive;
  try {
    archive.load_from(std::forward<From>(from)...);
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "GradScaler::load: the archive cannot be read: ", error.what());
  }
  scaler.load(archive);
}

}  // namespace torch
