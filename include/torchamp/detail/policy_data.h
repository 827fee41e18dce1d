// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "torchamp/cast.h"
#include "torchamp/detail/devices.h"
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

/// What the edits made of one overload: a rule, if one of them gave it, and rules on top of it that
/// hold only sometimes.
struct EditedRule {
  std::optional<Cast> cast;
  ConditionalRules conditional;
};

/// The contents of a Policy: a base table and edits. Immutable once shared.
class PolicyData {
 public:
  explicit PolicyData(BaseTable base_table) : base(base_table) {}
  /// A copy to edit; it starts without compiled tables.
  PolicyData(const PolicyData& other) : base(other.base), edits(other.edits), rules(other.rules) {}
  PolicyData& operator=(const PolicyData&) = delete;

  BaseTable base;
  std::vector<Edit> edits;
  std::map<std::string, EditedRule, std::less<>> rules;  // by full overload name

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
