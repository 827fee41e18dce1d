// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>

/// LibTorch's archive at `path`, as if its tensors had been saved from device `to` and not `from`;
/// without CRCs.
inline std::string moved_file(const std::string& path, const std::string& from,
                              const std::string& to) {
  const auto text = [](const std::string& name) {
    return std::string{'X', static_cast<char>(name.size()), '\0', '\0', '\0'} + name;
  };
  caffe2::serialize::PyTorchStreamReader reader(path);
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer(
      [&](const void* data, std::size_t size) {
        bytes.append(static_cast<const char*>(data), size);
        return size;
      },
      /*compute_crc32=*/false);
  int storages = 0;
  for (const std::string& name : reader.getAllRecords()) {
    if (name.starts_with(".data/") || name == "version") continue;  // the writer's own
    const auto [data, size] = reader.getRecord(name);
    std::string record(static_cast<const char*>(data.get()), size);
    for (std::size_t at = 0;
         name == "data.pkl" && (at = record.find(text(from), at)) != record.npos; ++storages) {
      record.replace(at, text(from).size(), text(to));
    }
    writer.writeRecord(name, record.data(), record.size());
  }
  writer.writeEndOfFile();
  EXPECT_GT(storages, 0);
  return bytes;
}
