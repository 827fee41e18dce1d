// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// How a tensor differs from a snapshot of it.
enum class Change {
  same,
  written,   ///< in place, as far as LibTorch counts writes
  replaced,  ///< by another tensor, or its memory by other memory
  added,     ///< there was no tensor
  gone,      ///< there is no tensor any more
};

/// The identity, memory and version of a tensor at some time. Does not keep the tensor alive, but
/// while the snapshot exists, no other tensor gets its address.
class TensorSnapshot : public WeakTensor {
 public:
  TensorSnapshot() = default;
  explicit TensorSnapshot(const at::Tensor& tensor)
      : WeakTensor(tensor), memory_(memory_of(tensor)), version_(version_of(tensor)) {}

  bool operator==(const TensorSnapshot& other) const {
    return address() == other.address() && memory_ == other.memory_ && version_ == other.version_;
  }

  bool was_defined() const { return !is(at::Tensor()); }
  bool is_same(const at::Tensor& now) const {
    return is(now) && version_ == version_of(now) && memory_ == memory_of(now);
  }
  /// How `now`, the tensor in the same place, differs.
  Change diff(const at::Tensor& now) const {
    if (is_same(now)) return Change::same;
    if (!was_defined()) return Change::added;
    if (!now.defined()) return Change::gone;
    return is(now) && memory_ == memory_of(now) ? Change::written : Change::replaced;
  }

 private:
  static const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
    return tensor.defined() ? storage_of(tensor) : nullptr;
  }

  const c10::StorageImpl* memory_ = nullptr;
  uint32_t version_ = 0;
};

/// Snapshots of a list of tensors; elements may be undefined.
///
/// Lists are given as a walk: `walk(f)` calls `f(tensor)` for each element until it returns true,
/// and returns whether one has.
class Snapshot {
 public:
  Snapshot() = default;
  template <class Walk>
  explicit Snapshot(const Walk& walk) {
    take(walk);
  }
  /// Takes the snapshot anew.
  template <class Walk>
  void take(const Walk& walk) {
    tensors_.clear();
    walk([this](const at::Tensor& tensor) {
      tensors_.emplace_back(tensor);
      return false;
    });
  }

  bool empty() const { return tensors_.empty(); }
  std::size_t size() const { return tensors_.size(); }
  const TensorSnapshot& operator[](std::size_t i) const { return tensors_[i]; }
  TensorSnapshot& operator[](std::size_t i) { return tensors_[i]; }
  auto begin() const { return tensors_.begin(); }
  auto end() const { return tensors_.end(); }
  void clear() { tensors_.clear(); }

  /// Calls `f(i, change, now)` for each place of the old list and of the new list, until `f`
  /// returns true. Returns whether it did.
  template <class Walk, class F>
  bool any_change(const Walk& walk, const F& f) const {
    std::size_t i = 0;
    const bool stopped = walk([&](const at::Tensor& now) {
      const bool stops = f(i, i < tensors_.size() ? tensors_[i].diff(now) : Change::added, now);
      ++i;
      return stops;
    });
    if (stopped) return true;
    for (; i < tensors_.size(); ++i) {
      if (f(i, Change::gone, at::Tensor())) return true;
    }
    return false;
  }

  template <class Walk>
  bool is_same(const Walk& walk) const {
    std::size_t i = 0;
    const bool any_differs = walk(
        [&](const at::Tensor& now) { return i == tensors_.size() || !tensors_[i++].is_same(now); });
    return !any_differs && i == tensors_.size();
  }

  /// Whether `tensor` was in the list, even if it was written since.
  bool contains(const at::Tensor& tensor) const {
    for (const TensorSnapshot& one : tensors_) {
      if (one.is(tensor)) return true;
    }
    return false;
  }

 private:
  std::vector<TensorSnapshot> tensors_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
