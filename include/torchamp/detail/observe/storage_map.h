// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Null if it has none.
inline const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

/// Something remembered per storage, so that views of a tensor share it. Keeps no storage's memory
/// alive, and takes no new storage for an old one at the same address.
template <class Value>
class StorageMap {
 public:
  void set(const at::Tensor& tensor, Value value) {
    if (!tensor.has_storage()) return;
    if (entries_.size() >= next_sweep_) sweep();
    entries_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(),
                              Entry{tensor.storage().getWeakStorageImpl(), std::move(value)});
  }

  const Value* find(const c10::StorageImpl* storage) const {
    const auto found = entries_.find(storage);
    return found == entries_.end() || found->second.alive.expired() ? nullptr
                                                                    : &found->second.value;
  }

  void erase(const c10::StorageImpl* storage) { entries_.erase(storage); }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> alive;
    Value value;
  };

  void sweep() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.alive.expired(); });
    next_sweep_ = std::max<std::size_t>(1024, 2 * entries_.size());
  }

  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  std::size_t next_sweep_ = 1024;
};

}  // namespace torchamp::detail
