// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "torchamp/detail/core/base/checksum.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// What lies under `key`. Throws where it is missing, or not of the type that `is` tells.
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

/// A count that may be missing: an older version, or a program, did not write it.
inline double read_count(torch::serialize::InputArchive& archive, const std::string& key,
                         double otherwise) {
  c10::IValue value;
  if (!archive.try_read(key, value)) return otherwise;
  const int64_t count = read_int(archive, key);
  TORCHAMP_CHECK_VALUE(count >= 0, "GradScaler::load: \"", key, "\" is ", count,
                       ", a negative count.");
  TORCHAMP_CHECK_VALUE(count <= int64_t{1} << 53, "GradScaler::load: \"", key, "\" is ", count,
                       ". A count is at most 2^53.");
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
  return static_cast<int64_t>(sum.value());
}

template <>
struct ScalerArchive<GradScaler> {
  static void save(const GradScaler& scaler, torch::serialize::OutputArchive& archive) {
    const StepLedger& ledger = ScalerParts::ledger(scaler);
    const auto is_open = [](const auto& weak) {
      const auto window = weak.lock();
      return window && window->pending > 0;
    };
    TORCHAMP_CHECK(
        std::none_of(ledger.windows.begin(), ledger.windows.end(), is_open),
        "GradScaler::save: within a window of gradient accumulation, whose gradients a "
        "file does not hold. Save after the accumulation's step, or first end the window: "
        "Accumulation::flush() steps with it, discard() drops it.");
    archive.write("enabled", c10::IValue(scaler.is_enabled()));
    if (!scaler.is_enabled()) return;
    TORCHAMP_CHECK(
        !ledger.optimizers.within_iteration(),
        "GradScaler::save: within an iteration, after unscale_ or step. Save after update().");
    const LossScale& scale = ScalerParts::scale(scaler);
    const ScaleMemory<double> values = scale.read();
    const GradScalerState state = scale.state_of(values);
    archive.write("scale", c10::IValue(state.scale));
    archive.write("growth_factor", c10::IValue(state.growth_factor));
    archive.write("backoff_factor", c10::IValue(state.backoff_factor));
    archive.write("growth_interval", c10::IValue(state.growth_interval));
    archive.write("growth_tracker", c10::IValue(state.growth_tracker));
    for_each_own_number(
        [&](const char* name, double count) {
          archive.write(name, c10::IValue(static_cast<int64_t>(count)));
        },
        values);
    archive.write("torchamp_checksum", c10::IValue(checksum_of(state, values)));
  }

  static void load(GradScaler& scaler, torch::serialize::InputArchive& archive) {
    if (!scaler.is_enabled()) return;
    c10::IValue enabled;
    TORCHAMP_CHECK(
        !archive.try_read("enabled", enabled) || !enabled.isBool() || enabled.toBool(),
        "GradScaler::load: the archive was saved from a disabled GradScaler and holds no state.");
    const GradScalerState state{.scale = read_double(archive, "scale"),
                                .growth_factor = read_double(archive, "growth_factor"),
                                .backoff_factor = read_double(archive, "backoff_factor"),
                                .growth_interval = read_int(archive, "growth_interval"),
                                .growth_tracker = read_int(archive, "growth_tracker")};
    ScaleMemory<double> rest = initial_memory(scaler.options());
    const double full_credit = rest.credit;
    for_each_own_number(
        [&](const char* name, double& count) { count = read_count(archive, name, count); }, rest);
    c10::IValue samples, checksum;
    TORCHAMP_CHECK(!archive.try_read("torchamp_samples", samples),
                   "GradScaler::load: the archive was saved from a scaler with "
                   "GradScalerOptions::predictive(), which torchamp does not have. Continue "
                   "with a new GradScaler({.init_scale = ",
                   state.scale, "}), which has the archive's scale.");
    TORCHAMP_CHECK(
        !archive.try_read("torchamp_checksum", checksum) ||
            (checksum.isInt() && checksum.toInt() == checksum_of(state, rest)),
        "GradScaler::load: the archive is damaged: its values are not those that were saved.");
    rest.credit = std::min(rest.credit, full_credit);
    restore_scaler(scaler, "GradScaler::load", state, std::move(rest));
  }
};

}  // namespace detail

/// Calls save(), for torch::save.
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

/// Calls load(), for torch::load.
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  GradScaler& scaler) {
  scaler.load(archive);
  return archive;
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
    TORCHAMP_CHECK(false, "GradScaler::load: the archive cannot be read: ", error.what());
  }
  scaler.load(archive);
}

}  // namespace torch
