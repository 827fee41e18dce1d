// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torchamp/cast.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/op_catalog.h"
#include "torchamp/detail/thread_policy.h"
#include "torchamp/rule.h"

namespace torchamp::detail {

enum class BaseTable : std::uint8_t { standard, torch };

/// One call of an edit, as the user wrote it.
struct Edit {
  Cast cast;
  std::vector<std::string> names;
  std::string family;  // instead of `names`, if not empty
  When when;
};

/// The contents of a Policy: a base table and edits. Immutable once shared.
class PolicyData {
 public:
  explicit PolicyData(BaseTable base_table) : base(base_table) {}
  /// A copy to edit; it starts without compiled tables.
  PolicyData(const PolicyData& other) : base(other.base), edits(other.edits), rules(other.rules) {}
  PolicyData& operator=(const PolicyData&) = delete;

  /// What the edits made of one overload; null if they do not reach it.
  const OverloadRules* edited(const c10::OperatorHandle& op) const {
    const auto found = rules.find(full_name(op.operator_name()));
    return found == rules.end() ? nullptr : &found->second;
  }

  BaseTable base;
  std::vector<Edit> edits;
  RuleMap rules;  // what the edits made of each overload that they reached

  /// The table for a device, made by `compile` on first use. Any thread.
  template <class Compile>
  std::shared_ptr<const OverlayTable> table(std::size_t device_index, Compile compile) const {
    Compiled& compiled = compiled_[device_index];
    if (!compiled.ready.load(std::memory_order_acquire)) {
      const std::scoped_lock lock(mutex_);
      if (!compiled.table) compiled.table = compile();
      compiled.ready.store(true, std::memory_order_release);
    }
    return compiled.table;
  }

 private:
  struct Compiled {
    std::atomic<bool> ready = false;
    std::shared_ptr<const OverlayTable> table;
  };
  mutable std::mutex mutex_;
  mutable std::array<Compiled, device_count> compiled_;
};

}  // namespace torchamp::detail
