// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <vector>

#include "torchamp/detail/policy/rule.h"

namespace torchamp::detail {

/// A policy's rules for the overlays of one device, by the overlays' index.
class OverlayTable {
 public:
  struct Entry {
    Cast cast = Cast::native;
    /// Indices of PolicyData::edits that hold only sometimes, tried first, or null. In
    /// PolicyData::rules.
    const std::vector<std::size_t>* conditional = nullptr;
  };

  /// The entry of overlay `index`. An overlay that came after this table is one that its policy did
  /// not ask for: LibTorch's own rule.
  Entry operator[](std::size_t index) const {
    return index < entries_.size() ? entries_[index] : Entry();
  }

  void set(std::size_t index, Entry entry) {
    if (index >= entries_.size()) entries_.resize(index + 1);
    entries_[index] = entry;
  }

 private:
  std::vector<Entry> entries_;
};

}  // namespace torchamp::detail
