// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/weights/stamp.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [What is derived from weights]
// A 16-bit cast of a weight, its 8-bit form: whoever makes such a thing keeps it here, and nowhere
// else, and here alone it is decided whether it still holds. A process has one store, which hangs
// on the SharedRuntime. To derive something, say how, and get it:
//
//     const Tensors form = derived_weights().get(
//         weight, {WeightForm::Kind::fp8, code_of_the_recipe}, keep_of_this_thread(),
//         [&](const Tensors& reusable) { return quantised(weight, reusable); });
//
// `make` runs only if nothing is kept, or if the weight has changed. It gets what was kept for the
// old values if nobody else holds it, to write to, or nothing; and returns tensors without
// gradients that share no memory with the weight, made outside of inference mode so that writes to
// them count. It runs without a lock, and may run on two threads at once for one weight. What is
// returned is shared: it must not be written to (a write that LibTorch counts is noticed, and the
// thing made again), and an autograd node belongs on an alias of it, one for each use.
//
// keep_of_this_thread() (thread_policy.h) says how long: for the region, unless the guard asked for
// more; not at all outside of guards. Nothing is kept or found while a graph is captured.
//
// Who writes to weights tells so unless LibTorch counts the write: see changed(). In doubt: tell. A
// kernel that writes may bump the weight's version instead.

using Tensors = std::vector<at::Tensor>;

/// What was made of a weight: of which kind, and which of that kind's variants.
struct WeightForm {
  enum class Kind : std::uint8_t {
    cast,  ///< variant: the dtype
    fp8,   ///< variant: the recipe's
  };
  Kind kind;
  std::uint32_t variant;

  bool operator==(const WeightForm&) const = default;
};

/// How long something is kept.
struct WeightKeep {
  enum class Until : std::uint8_t {
    made,          ///< not at all
    region_ends,   ///< the outermost guard's end
    weights_step,  ///< the next step of any optimizer that the library sees
    told,          ///< until the program drops it, or the weight is gone
  };
  Until until = Until::made;
  std::uint64_t region = 0;  ///< that of the outermost guard
};

/// What was derived from weights, for as long as it holds and is to be kept. Any thread.
class DerivedWeights {
 public:
  struct Counts {
    int64_t hits = 0;
    int64_t misses = 0;
    int64_t bytes = 0;  // that are kept
  };

  /// What `make` gives for the weight as it is now: see Note [What is derived from weights]. `hit`
  /// gets whether it was kept.
  template <class Make>
  Tensors get(const at::Tensor& weight, WeightForm form, WeightKeep keep, const Make& make,
              bool* hit = nullptr) {
    if (hit != nullptr) *hit = false;
    if (keep.until == WeightKeep::Until::made || suspensions_ > 0 || !counts_changes(weight) ||
        stream_is_captured(weight)) {
      return make(Tensors());
    }
    Tensors reusable;
    std::uint64_t told = 0;
    {
      const std::scoped_lock lock(mutex_);
      if (Entry* const entry = find(weight, form)) {
        if (entry->holds(weight)) {
          if (hit != nullptr) *hit = true;
          ++counts_.hits;
          entry->keep(keep);
          entry->used = ++uses_;
          return entry->tensors;
        }
        reusable = take(weight, entry);
      }
      ++counts_.misses;
      told = times_told_;
    }
    if (!std::all_of(reusable.begin(), reusable.end(), &is_unshared)) reusable.clear();
    // Of before: should another thread write to the weight meanwhile, this does not hold.
    const WeightStamp stamp(weight);
    Tensors made = make(std::as_const(reusable));
    reusable.clear();
    std::vector<Tensors> dropped;  // freed without the lock
    const std::scoped_lock lock(mutex_);
    if (told == times_told_ && suspensions_ == 0) {
      add(weight, Entry(stamp, form, keep, made), dropped);
    }
    return made;
  }

  /// The weights, or what looks at their memory through them, may have other values now, though
  /// LibTorch has not counted a write.
  void changed(at::TensorList weights) {
    ++times_told_;
    if (is_empty()) return;
    const std::scoped_lock lock(mutex_);
    for (const at::Tensor& weight : weights) {
      if (!weight.defined()) continue;
      const auto owner = owners_.find(owner_of(weight));
      if (owner != owners_.end()) mark(owner->second);
    }
  }

  /// Any weight may have other values now.
  void all_changed() {
    ++times_told_;
    if (is_empty()) return;
    const std::scoped_lock lock(mutex_);
    for (auto& [address, owner] : owners_) mark(owner);
  }

  /// The outermost guard begins; returns the region's number, which is not 0.
  std::uint64_t begin_region() {
    const std::uint64_t region = ++regions_;
    slot_of(region).store(region, std::memory_order_relaxed);
    return region;
  }

  /// Drops what was kept for the region, and what belongs to weights that are gone. Nothing is kept
  /// for it any more, by threads that still have its state.
  void end_region(std::uint64_t region) {
    std::uint64_t expected = region;
    slot_of(region).compare_exchange_strong(expected, 0);
    if (is_empty()) return;
    drop_if([&](const Entry& entry) {
      return entry.until == WeightKeep::Until::region_ends && entry.region == region;
    });
  }

  /// Drops what was kept until weights step.
  void end_window() {
    if (is_empty()) return;
    drop_if([](const Entry& entry) { return entry.until == WeightKeep::Until::weights_step; });
  }

  /// Drops all.
  void clear() {
    ++times_told_;
    if (is_empty()) return;
    drop_if([](const Entry&) { return true; });
  }

  /// Nothing is kept or found while one of these lives.
  class Suspension {
   public:
    explicit Suspension(DerivedWeights& weights) : weights_(weights) { ++weights_.suspensions_; }
    ~Suspension() { --weights_.suspensions_; }
    Suspension(const Suspension&) = delete;
    Suspension& operator=(const Suspension&) = delete;

   private:
    DerivedWeights& weights_;
  };

  /// At most so many bytes are kept from now on; what was used least recently leaves first.
  void set_budget(int64_t bytes) {
    std::vector<Tensors> dropped;
    const std::scoped_lock lock(mutex_);
    budget_ = bytes;
    make_room(0, dropped);
  }

  /// Whether nothing is kept.
  bool is_empty() const { return size_.load(std::memory_order_relaxed) == 0; }

  Counts counts() const {
    const std::scoped_lock lock(mutex_);
    return counts_;
  }

 private:
  struct Entry {
    Entry(WeightStamp of, WeightForm as, WeightKeep keep_for, Tensors made)
        : stamp(std::move(of)), form(as), tensors(std::move(made)) {
      keep(keep_for);
      for (const at::Tensor& tensor : tensors) {
        versions.push_back(tensor._version());
        bytes += static_cast<int64_t>(tensor.nbytes());
      }
    }

    bool holds(const at::Tensor& weight) const {
      if (is_stale || !stamp.holds(weight)) return false;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i]._version() != versions[i]) return false;  // somebody has written to it
      }
      return true;
    }

    /// For what asks for longest.
    void keep(WeightKeep asked) {
      if (asked.until < until) return;
      until = asked.until;
      region = asked.region;
    }

    WeightStamp stamp;
    WeightForm form;
    Tensors tensors;
    std::vector<int64_t> versions;
    int64_t bytes = 0;
    WeightKeep::Until until = WeightKeep::Until::made;
    std::uint64_t region = 0;
    std::uint64_t used = 0;
    bool is_stale = false;
  };

  struct Owner {
    using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    Weak self;  // keeps the address from being used again
    std::vector<Entry> entries;
  };

  static bool is_unshared(const at::Tensor& tensor) {
    return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
  }

  static void mark(Owner& owner) {
    for (Entry& entry : owner.entries) entry.is_stale = true;
  }

  // Of two open regions with one slot, the earlier one is taken for ended: nothing is kept for it.
  std::atomic<std::uint64_t>& slot_of(std::uint64_t region) {
    return open_regions_[region % open_regions_.size()];
  }

  bool is_over(const Entry& entry) {
    return entry.until == WeightKeep::Until::region_ends && slot_of(entry.region) != entry.region;
  }

  Entry* find(const at::Tensor& weight, WeightForm form) {
    const auto owner = owners_.find(owner_of(weight));
    if (owner == owners_.end()) return nullptr;
    for (Entry& entry : owner->second.entries) {
      if (entry.form == form && entry.stamp.is_of(weight)) return &entry;
    }
    return nullptr;
  }

  Tensors take(const at::Tensor& weight, Entry* entry) {
    auto& entries = owners_.find(owner_of(weight))->second.entries;
    Tensors tensors = std::move(entry->tensors);
    forget(*entry);
    entries.erase(entries.begin() + (entry - entries.data()));
    return tensors;
  }

  void forget(const Entry& entry) {
    counts_.bytes -= entry.bytes;
    --size_;
  }

  void add(const at::Tensor& weight, Entry entry, std::vector<Tensors>& dropped) {
    if (entry.bytes > budget_ || is_over(entry)) return;
    if (Entry* const other = find(weight, entry.form)) {  // another thread was quicker
      dropped.push_back(take(weight, other));
    }
    make_room(entry.bytes, dropped);
    entry.used = ++uses_;
    counts_.bytes += entry.bytes;
    ++size_;
    const c10::TensorImpl* const address = owner_of(weight);
    auto found = owners_.find(address);
    if (found == owners_.end()) {
      if (owners_.size() >= purge_at_) {
        purge([](const Entry&) { return false; }, dropped);
        purge_at_ = std::max<std::size_t>(64, 2 * owners_.size());
      }
      const at::TensorBase& owner = weight.is_view() ? weight._base() : weight;
      Owner fresh{.self = Owner::Weak(owner.getIntrusivePtr()), .entries = {}};
      found = owners_.emplace(address, std::move(fresh)).first;
    }
    found->second.entries.push_back(std::move(entry));
  }

  // Drops what is least recently used until `bytes` more fit.
  void make_room(int64_t bytes, std::vector<Tensors>& dropped) {
    while (counts_.bytes > budget_ - bytes && !is_empty()) {
      std::uint64_t oldest = std::numeric_limits<std::uint64_t>::max();
      for (const auto& [address, owner] : owners_) {
        for (const Entry& entry : owner.entries) oldest = std::min(oldest, entry.used);
      }
      purge([&](const Entry& entry) { return entry.used == oldest; }, dropped);
    }
  }

  template <class Predicate>
  void drop_if(const Predicate& predicate) {
    std::vector<Tensors> dropped;
    const std::scoped_lock lock(mutex_);
    purge(predicate, dropped);
  }

  // Takes out what `predicate` says, and what belongs to weights that are gone.
  template <class Predicate>
  void purge(const Predicate& predicate, std::vector<Tensors>& dropped) {
    for (auto found = owners_.begin(); found != owners_.end();) {
      Owner& owner = found->second;
      const bool is_gone = owner.self.expired();
      std::erase_if(owner.entries, [&](Entry& entry) {
        if (!is_gone && !predicate(std::as_const(entry))) return false;
        forget(entry);
        dropped.push_back(std::move(entry.tensors));
        return true;
      });
      found = owner.entries.empty() ? owners_.erase(found) : std::next(found);
    }
  }

  mutable std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Owner> owners_;
  Counts counts_;
  std::uint64_t uses_ = 0;
  std::size_t purge_at_ = 64;  // owners, after which those that are gone are looked for
  int64_t budget_ = std::numeric_limits<int64_t>::max();
  std::atomic<std::size_t> size_ = 0;  // entries
  std::atomic<std::uint64_t> times_told_ = 0;
  std::atomic<int64_t> suspensions_ = 0;
  std::atomic<std::uint64_t> regions_ = 0;
  std::array<std::atomic<std::uint64_t>, 64> open_regions_{};
};

}  // namespace torchamp::detail
