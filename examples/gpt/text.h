// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "support/arguments.h"

/// The file, or all headers and Markdown pages in the folder one after the other. Throws
/// support::UsageError.
inline std::string read_text(const std::filesystem::path& path) {
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      const auto extension = entry.path().extension();
      if (extension == ".h" || extension == ".md") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(path);
  }
  std::string text;
  for (const auto& name : files) {
    std::ifstream file(name, std::ios::binary);
    if (!file) throw support::UsageError("--text: cannot read '" + name.string() + "'");
    text.append(std::istreambuf_iterator<char>(file), {});
  }
  return text;
}

/// A text as numbers, its last tenth held out. A letter is a byte.
class Text {
 public:
  /// Throws support::UsageError for a text without enough of them for a part of `length`.
  Text(const std::string& text, std::int64_t length) {
    const auto size = static_cast<std::int64_t>(text.size());
    if (size / 10 < length + 2) {
      throw support::UsageError("--text: " + std::to_string(size) +
                                " letters are not enough; at least " +
                                std::to_string(10 * (length + 2)) + " are needed");
    }
    const auto all = torch::empty({size}, torch::kByte);
    std::copy(text.begin(), text.end(), all.mutable_data_ptr<std::uint8_t>());
    train_ = all.narrow(0, 0, size - size / 10);
    held_out_ = all.narrow(0, size - size / 10, size / 10);
  }

  /// Random parts [batch, length + 1], by LibTorch's generator for the CPU.
  torch::Tensor batch(std::int64_t batch, std::int64_t length) const {
    return parts(train_, torch::randint(train_.size(0) - length, {batch, 1}, torch::kLong), length);
  }
  /// At most `most` parts, spread evenly over the held-out text: always the same.
  torch::Tensor held_out(std::int64_t most, std::int64_t length) const {
    const std::int64_t starts = held_out_.size(0) - length;
    const std::int64_t count = std::min(most, (starts - 1) / length + 1);
    const auto first = torch::arange(count).mul(starts).div(count, "floor").unsqueeze(1);
    return parts(held_out_, first, length);
  }

 private:
  static torch::Tensor parts(const torch::Tensor& text, const torch::Tensor& first,
                             std::int64_t length) {
    return text.index({first + torch::arange(length + 1)}).to(torch::kLong);
  }

  torch::Tensor train_, held_out_;
};
