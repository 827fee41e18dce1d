// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <istream>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "torchamp/detail/pickle.h"
#include "torchamp/grad_scaler_state.h"

namespace torchamp {

// Files that Python shares with us:
//
//     torch.save(scaler.state_dict(), "scaler.pt")                  # Python
//     scaler.load_state_dict(torchamp::load_python_state("scaler.pt"));
//
//     torchamp::save_python_state(scaler.state_dict(), "scaler.pt");
//     scaler.load_state_dict(torch.load("scaler.pt"))               # Python
//
// torch::save(scaler, path) writes another format, which holds more and which Python does not read.

namespace detail {

inline GradScalerState python_state(std::string_view pickle,
                                    std::initializer_list<std::string_view> keys) {
  using Kind = PickleReader::Kind;
  const PickleReader reader(pickle);
  const PickleReader::Value* dict = &reader.root();
  std::string path = "the file";
  for (const std::string_view key : keys) {
    TORCH_CHECK(dict->kind == Kind::dict, path, " is not a dict.");
    const PickleReader::Value* const inner = reader.find(*dict, key);
    if (!inner) {
      std::string others;
      for (const auto& [name, index] : dict->entries) {
        others += (others.empty() ? "" : ", ") + std::string(name);
      }
      TORCH_CHECK(false, path, " has no entry \"", key, "\". It has: ", others, '.');
    }
    dict = inner;
    path += "[\"" + std::string(key) + "\"]";
  }
  TORCH_CHECK(dict->kind == Kind::dict, path, " is not a dict.");
  TORCH_CHECK(!dict->entries.empty(), path,
              " is an empty dict, as the state of a disabled GradScaler is.");
  const auto entry = [&](std::string_view key) -> const PickleReader::Value& {
    const PickleReader::Value* const value = reader.find(*dict, key);
    TORCH_CHECK(value, path, " has no \"", key, "\". It is not the state_dict of a GradScaler.");
    TORCH_CHECK(value->kind == Kind::integer || value->kind == Kind::number, path, "[\"", key,
                "\"] is not a number.");
    return *value;
  };
  const auto number = [&](std::string_view key) {
    const PickleReader::Value& value = entry(key);
    return value.kind == Kind::number ? value.number : static_cast<double>(value.integer);
  };
  const auto integer = [&](std::string_view key) {
    const PickleReader::Value& value = entry(key);
    TORCH_CHECK(value.kind == Kind::integer, path, "[\"", key, "\"] is not a whole number.");
    return value.integer;
  };
  return {.scale = number("scale"),
          .growth_factor = number("growth_factor"),
          .backoff_factor = number("backoff_factor"),
          .growth_interval = integer("growth_interval"),
          .growth_tracker = integer("_growth_tracker")};
}

}  // namespace detail

/// The state_dict of a GradScaler in what Python's torch.save wrote. `keys` lead to it in a larger
/// checkpoint: {"scaler"} for `torch.save({"model": ..., "scaler": scaler.state_dict()}, path)`.
/// Nothing else in the file is loaded, and no code in it is run.
///
/// c10::Error for a file that is damaged, truncated, of another kind, or without such an entry. The
/// values' ranges are checked by GradScaler::load_state_dict.
inline GradScalerState load_python_state(std::istream& in,
                                         std::initializer_list<std::string_view> keys = {}) {
  constexpr const char* record = "data.pkl";
  try {
    caffe2::serialize::PyTorchStreamReader archive(&in);
    TORCH_CHECK(archive.hasRecord(record), "there is no ", record, " in it.");
    in.clear();
    in.seekg(0, std::ios::end);
    TORCH_CHECK(archive.getRecordSize(record) <= static_cast<uint64_t>(in.tellg()), record,
                " is larger than the file.");
    const auto [data, size] = archive.getRecord(record);
    return detail::python_state({static_cast<const char*>(data.get()), size}, keys);
  } catch (const c10::Error& error) {
    TORCH_CHECK(
        false, "torchamp::load_python_state: ", error.what_without_backtrace(),
        " Pass what torch.save(scaler.state_dict(), path) has written in Python, or the keys "
        "that lead to it; torch::load(scaler, path) reads what torch::save has written.");
  }
}

inline GradScalerState load_python_state(const std::string& path,
                                         std::initializer_list<std::string_view> keys = {}) {
  std::ifstream in(path, std::ios::binary);
  TORCH_CHECK(in, "torchamp::load_python_state: cannot open ", path, ": ", std::strerror(errno),
              '.');
  return load_python_state(in, keys);
}

/// Writes `state` as Python's torch.save would write the dict, for torch.load(path), with
/// weights_only or without, and torch.amp.GradScaler.load_state_dict. An empty state gives an empty
/// dict.
inline void save_python_state(const GradScalerState& state, std::ostream& out) {
  detail::PickleWriter pickle;
  if (!state.empty()) {
    pickle.entry("scale", state.scale);
    pickle.entry("growth_factor", state.growth_factor);
    pickle.entry("backoff_factor", state.backoff_factor);
    pickle.entry("growth_interval", state.growth_interval);
    pickle.entry("_growth_tracker", state.growth_tracker);
  }
  const std::string bytes = std::move(pickle).finish();
  // The writer ends the process where its output fails: that is for the check below.
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, std::size_t size) {
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
    return size;
  });
  archive.writeRecord("data.pkl", bytes.data(), bytes.size());
  archive.writeRecord("byteorder", "little", 6);
  archive.writeEndOfFile();
  out.flush();
  TORCH_CHECK(out, "torchamp::save_python_state: writing has failed: ", std::strerror(errno), '.');
}

/// The same to a file, which is replaced only once all has been written.
inline void save_python_state(const GradScalerState& state, const std::string& path) {
  const std::string unfinished = path + ".unfinished";
  std::error_code error;
  try {
    std::ofstream out(unfinished, std::ios::binary);
    TORCH_CHECK(out, "torchamp::save_python_state: cannot write ", unfinished, ": ",
                std::strerror(errno), '.');
    save_python_state(state, out);
    out.close();
    std::filesystem::rename(unfinished, path, error);
    TORCH_CHECK(!error, "torchamp::save_python_state: cannot write ", path, ": ", error.message(),
                '.');
  } catch (const c10::Error&) {
    std::filesystem::remove(unfinished, error);
    throw;
  }
}

}  // namespace torchamp
