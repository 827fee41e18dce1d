// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "torchamp/cast.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/shared_runtime.h"
#include "torchamp/rule.h"

namespace torchamp::detail {

class PolicyData;

/// A policy's rules for the overlays of one device, by the overlays' index.
class OverlayTable {
 public:
  struct Entry {
    Cast cast = Cast::native;
    ConditionalRules conditional;  // tried first
  };

  /// The entry of overlay `index`. An overlay that came after this table is one that its policy did
  /// not ask for: LibTorch's own rule.
  const Entry& operator[](std::size_t index) const {
    static const Entry native;
    return index < entries_.size() ? entries_[index] : native;
  }

  void set(std::size_t index, Entry entry) {
    if (index >= entries_.size()) entries_.resize(index + 1);
    entries_[index] = std::move(entry);
  }

 private:
  std::vector<Entry> entries_;
};

/// What a guard puts into the thread's slot. Immutable: LibTorch shares it with other threads.
struct ThreadPolicy final : c10::DebugInfoBase, std::enable_shared_from_this<ThreadPolicy> {
  std::shared_ptr<const PolicyData> inherited;  // for a nested guard that names no policy
  /// By device; null where no torchamp guard is in force.
  std::array<std::shared_ptr<const OverlayTable>, device_count> tables;
};

/// The calling thread's policy, or null outside every guard.
inline const ThreadPolicy* thread_policy() {
  return static_cast<const ThreadPolicy*>(c10::ThreadLocalDebugInfo::get(policy_slot()));
}

}  // namespace torchamp::detail
