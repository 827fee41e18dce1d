// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. The scaler's state in files for Python.

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <istream>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/system.h"
#include "torchamp/detail/extras/io/archive_file.h"
#include "torchamp/detail/extras/io/pickle.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

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
      std::vector<std::string_view> names;
      for (const auto& [name, index] : dict->entries) names.push_back(name);
      TORCH_CHECK(false, path, " has no entry \"", key, "\". It has: ", list_of(names), '.');
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
    if (value.kind == Kind::number) return value.number;
    constexpr int64_t limit = int64_t{1} << 53;
    TORCH_CHECK(value.integer >= -limit && value.integer <= limit, path, "[\"", key, "\"] is ",
                value.integer, ", which a double does not hold.");
    return static_cast<double>(value.integer);
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

/// `open()` returns the archive; `name` is the archive's name in errors.
template <class Open>
GradScalerState load_python_state(const std::string& name, const Open& open,
                                  std::initializer_list<std::string_view> keys) {
  constexpr const char* record = "data.pkl";
  try {
    const ArchiveBytes bytes = open();
    check_archive(bytes);
    caffe2::serialize::PyTorchStreamReader archive(bytes);
    TORCH_CHECK(archive.hasRecord(record), "there is no ", record, " in it.");
    const auto [data, size] = archive.getRecord(record);
    return python_state({static_cast<const char*>(data.get()), size}, keys);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "torchamp::load_python_state: ", name, reason_of(error),
                " Pass what torch.save(scaler.state_dict(), path) has written in Python, or the "
                "keys that lead to it; torch::load(scaler, path) reads what torch::save has "
                "written.");
  }
}

inline c10::impl::GenericDict python_dict(const GradScalerState& state) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  if (state.empty()) return dict;
  dict.insert("scale", state.scale);
  dict.insert("growth_factor", state.growth_factor);
  dict.insert("backoff_factor", state.backoff_factor);
  dict.insert("growth_interval", state.growth_interval);
  dict.insert("_growth_tracker", state.growth_tracker);
  return dict;
}

/// The bytes that torch.save would write.
inline std::string python_archive(const c10::impl::GenericDict& dict) {
  std::string pickle, bytes;
  torch::jit::Pickler pickler(
      [&](const char* data, std::size_t size) { pickle.append(data, size); }, nullptr, nullptr,
      nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  archive.writeRecord("data.pkl", pickle.data(), pickle.size());
  archive.writeRecord("byteorder", "little", 6);
  archive.writeEndOfFile();
  return bytes;
}

}  // namespace detail

/// Returns the state_dict of a GradScaler from a file of Python's torch.save. In a larger
/// checkpoint, `keys` lead to the state_dict: {"scaler"} for `torch.save({"model": ..., "scaler":
/// scaler.state_dict()}, path)`. Other contents of the file are not loaded, and no code in it is
/// run.
///
///     torch.save(scaler.state_dict(), "scaler.pt")                  # Python
///     scaler.load_state_dict(torchamp::load_python_state("scaler.pt"));
///
/// torch::save(scaler, path) writes another format, with more contents; torch::load reads that
/// format.
///
/// The whole file is read, to check the CRC of each record. If Python wrote the file without CRCs
/// (torch.serialization.set_crc32_options), a damaged number is not detected.
/// GradScaler::load_state_dict checks the ranges of the values. Never synchronises.
///
/// Errors (c10::Error): a stream that is damaged, truncated or of another kind; a key that is
/// missing.
inline GradScalerState load_python_state(std::istream& in,
                                         std::initializer_list<std::string_view> keys = {}) {
  return detail::load_python_state(
      "", [&] { return std::make_shared<detail::StreamReader>(in); }, keys);
}

/// The state_dict of a GradScaler in the file `path`: see the other load_python_state().
inline GradScalerState load_python_state(const std::string& path,
                                         std::initializer_list<std::string_view> keys = {}) {
  return detail::load_python_state(
      "'" + path + "': ", [&] { return std::make_shared<detail::FileReader>(path); }, keys);
}

/// Writes `state` as Python's torch.save writes the dict. In Python, torch.load(path) reads it,
/// with or without weights_only, and torch.amp.GradScaler.load_state_dict takes it. An empty state
/// gives an empty dict. If writing fails, this function throws a c10::Error, even if the stream
/// itself throws other exceptions.
inline void save_python_state(const GradScalerState& state, std::ostream& out) {
  const std::string bytes = detail::python_archive(detail::python_dict(state));
  std::string reason;
  errno = 0;
  try {
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    out.flush();
    if (!out) reason = errno == 0 ? "the stream refuses it" : detail::error_text(errno);
  } catch (const std::exception& error) {
    reason = error.what();
  }
  TORCH_CHECK(reason.empty(), "torchamp::save_python_state: writing has failed: ", reason, '.');
}

/// Writes `state` to a file for Python's torch.load(path). The old file is replaced only after
/// everything is written and flushed to the disk, see Note [Atomic files]. If this fails, it throws
/// a c10::Error, and the old file stays.
///
///     torchamp::save_python_state(scaler.state_dict(), "scaler.pt");
///     scaler.load_state_dict(torch.load("scaler.pt"))               # Python
///
/// torch::save(scaler, path) writes another format, with more contents; Python does not read that
/// format.
inline void save_python_state(const GradScalerState& state, const std::string& path) {
  detail::replace_file("torchamp::save_python_state", path,
                       detail::python_archive(detail::python_dict(state)));
}

}  // namespace TORCHAMP_NAMESPACE
