// SPDX-License-Identifier: BSD-3-Clause
// Casts and other tensors made from weights, kept while the weights are unchanged.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/weights/weight_stamp.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [What is derived from weights]
// A process has one store of data derived from weights (16-bit casts, 8-bit forms), owned by the
// SharedRuntime. get() calls `make` if nothing is stored or if the weight has changed. Its argument
// is the data for the old values, whose memory it may reuse; it is empty if there is no such data
// or if another owner holds it. `make` returns tensors without gradients that share no memory with
// the weight, made outside inference mode so that writes to them count. Some may be undefined.
// `make` runs without a lock, and may run on two threads at once for one weight.
//
// The result is shared. Do not write to it (a write that LibTorch counts is detected, and the data
// is made again). For each use put an autograd node on a new alias. During a capture nothing is
// stored or found.

using Tensors = std::vector<at::Tensor>;

/// The key of derived data: its kind, and the variant of that kind.
struct WeightForm {
  enum class Kind : std::uint8_t {
    cast,  ///< variant: the dtype
    fp8,   ///< variant: the recipe
  };
  Kind kind;
  std::uint32_t variant;

  bool operator==(const WeightForm&) const = default;
};

/// The store of derived data, while valid and wanted. Any thread.
class DerivedWeights final : public KeptWeights {
 public:
  struct Counts {
    int64_t hits = 0;
    int64_t misses = 0;
    int64_t bytes = 0;  // of stored data
  };

  ~DerivedWeights() = default;

  /// The result of `make` for the present weight: see Note [What is derived from weights]. Sets
  /// `hit` if it was stored.
  template <class Make>
  Tensors get(const at::Tensor& weight, WeightForm form, WeightKeep keep, const Make& make,
              bool* hit = nullptr) {
    if (keep.until == WeightKeep::Until::not_kept || suspensions_ > 0 || !counts_changes(weight) ||
        stream_is_captured(weight)) {
      return make(Tensors());
    }
    Lookup found = look_up(weight, form, keep);
    if (found.holds) {
      if (hit != nullptr) *hit = true;
      return std::move(found.tensors);
    }
    if (!std::ranges::all_of(found.tensors, is_unshared)) found.tensors.clear();
    // Taken before `make`: if another thread writes to the weight meanwhile, the stamp is not
    // valid.
    WeightStamp stamp(weight);
    Tensors made = make(std::as_const(found.tensors));
    found.tensors.clear();
    add(weight, std::move(stamp), form, keep, made, found.changes);
    return made;
  }

  void changed(at::TensorList weights) override {
    const std::scoped_lock lock(mutex_);
    ++changes_;
    if (entries_.empty()) return;
    // By memory and by owner: a weight may have had other memory, and may get it back.
    std::unordered_set<const void*> changed;
    for (const at::Tensor& weight : weights) {
      if (!weight.defined() || !weight.has_storage()) continue;
      changed.insert(owner_of(weight));
      changed.insert(weight.storage().unsafeGetStorageImpl());
    }
    for (auto& [owner, entry] : entries_) {
      const bool is_among = changed.contains(owner) || changed.contains(entry.stamp.memory());
      if (is_among) entry.is_stale = true;
    }
  }
  void all_changed() override {
    const std::scoped_lock lock(mutex_);
    ++changes_;
    for (auto& [owner, entry] : entries_) entry.is_stale = true;
  }
  std::uint64_t begin_region() override {
    const std::scoped_lock lock(mutex_);
    open_regions_.insert(++regions_);
    return regions_;
  }
  void end_region(std::uint64_t region) override {
    Entries dropped;
    const std::scoped_lock lock(mutex_);
    open_regions_.erase(region);
    for (auto& [owner, entry] : entries_) std::erase(entry.regions, region);
    const auto was_for_regions = [](const Entry& entry) {
      return entry.until == WeightKeep::Until::region_ends && entry.regions.empty();
    };
    drop_if(was_for_regions, dropped);
  }
  /// Drops data that is kept until a step.
  void end_window() {
    drop_if([](const Entry& entry) { return entry.until == WeightKeep::Until::weights_step; });
  }
  void clear() override {
    Entries dropped;
    const std::scoped_lock lock(mutex_);
    ++changes_;
    drop_if([](const Entry&) { return true; }, dropped);
  }

  /// Drops the data of destroyed weights.
  void drop_gone() {
    drop_if([](const Entry&) { return false; });
  }

  /// While one lives, nothing is stored or found.
  class Suspension {
   public:
    explicit Suspension(DerivedWeights& weights) : weights_(weights) { ++weights_.suspensions_; }
    ~Suspension() { --weights_.suspensions_; }
    Suspension(const Suspension&) = delete;
    Suspension& operator=(const Suspension&) = delete;

   private:
    DerivedWeights& weights_;
  };

  /// Sets the largest number of bytes; the least recently used data is freed first.
  void set_budget(int64_t bytes) {
    Entries dropped;
    const std::scoped_lock lock(mutex_);
    budget_ = bytes;
    make_room(0, dropped);
  }

  /// Whether the store is empty.
  bool is_empty() const {
    const std::scoped_lock lock(mutex_);
    return entries_.empty();
  }

  Counts counts() const {
    const std::scoped_lock lock(mutex_);
    return counts_;
  }

 private:
  struct Entry {
    Entry(const at::Tensor& weight, WeightStamp of, WeightForm as, Tensors made)
        : owner(weight.is_view() ? weight._base() : weight),
          stamp(std::move(of)),
          form(as),
          tensors(std::move(made)) {
      for (const at::Tensor& tensor : tensors) {
        versions.push_back(version_of(tensor));
        if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
      }
    }

    bool holds(const at::Tensor& weight) const {
      if (is_stale || !stamp.holds(weight)) return false;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (version_of(tensors[i]) != versions[i]) return false;  // it was written
      }
      return true;
    }

    WeakTensor owner;  // protects the address, by which entries are found, from reuse
    WeightStamp stamp;
    WeightForm form;
    Tensors tensors;
    std::vector<std::uint32_t> versions;
    int64_t bytes = 0;
    WeightKeep::Until until = WeightKeep::Until::not_kept;  // the longest requested time
    std::vector<std::uint64_t> regions;                     // open regions that use it
    std::uint64_t used = 0;
    bool is_stale = false;
  };
  using Entries = std::multimap<const c10::TensorImpl*, Entry>;  // by owner_of() the weight

  /// The result of a search by get().
  struct Lookup {
    bool holds = false;         ///< `tensors` belong to the present values
    Tensors tensors{};          ///< otherwise memory of old values, or nothing
    std::uint64_t changes = 0;  ///< number of reported changes at that time
  };

  Lookup look_up(const at::Tensor& weight, WeightForm form, WeightKeep keep) {
    Entries dropped;
    const std::scoped_lock lock(mutex_);
    const auto place = place_of(weight, form);
    if (place == entries_.end()) {
      ++counts_.misses;
      return {.changes = changes_};
    }
    Entry& entry = place->second;
    if (entry.holds(weight)) {
      ++counts_.hits;
      keep_entry(entry, keep);
      return {.holds = true, .tensors = entry.tensors, .changes = changes_};
    }
    ++counts_.misses;
    Tensors former = std::move(entry.tensors);
    drop(place, dropped);
    return {.tensors = std::move(former), .changes = changes_};
  }

  static bool is_unshared(const at::Tensor& tensor) {
    return !tensor.defined() || (tensor.use_count() == 1 && tensor.storage().use_count() == 1);
  }

  /// Records a use of the entry, and how long to keep it.
  void keep_entry(Entry& entry, WeightKeep keep) {
    entry.used = ++uses_;
    entry.until = std::max(entry.until, keep.until);
    const bool is_for_region = keep.until == WeightKeep::Until::region_ends && !is_over(keep);
    const bool is_known = std::ranges::find(entry.regions, keep.region) != entry.regions.end();
    if (is_for_region && !is_known) entry.regions.push_back(keep.region);
  }

  /// Whether the time `keep` has ended. With the lock.
  bool is_over(WeightKeep keep) const {
    return keep.until == WeightKeep::Until::region_ends && !open_regions_.contains(keep.region);
  }

  Entries::iterator place_of(const at::Tensor& weight, WeightForm form) {
    const auto [begin, end] = entries_.equal_range(owner_of(weight));
    for (auto entry = begin; entry != end; ++entry) {
      if (entry->second.form == form && entry->second.stamp.is_of(weight)) return entry;
    }
    return entries_.end();
  }

  /// Stores `made`, unless a change was reported since `changes`: it may have been this weight,
  /// without a version.
  void add(const at::Tensor& weight, WeightStamp stamp, WeightForm form, WeightKeep keep,
           const Tensors& made, std::uint64_t changes) {
    Entry entry(weight, std::move(stamp), form, made);
    Entries dropped;
    const std::scoped_lock lock(mutex_);
    if (changes != changes_ || suspensions_ > 0) return;
    if (entry.bytes > budget_ || is_over(keep)) return;
    const auto other = place_of(weight, form);
    if (other != entries_.end()) {  // another thread was faster
      if (other->second.holds(weight)) return keep_entry(other->second, keep);
      drop(other, dropped);
    }
    make_room(entry.bytes, dropped);
    if (entries_.size() >= purge_at_ || counts_.bytes >= purge_at_bytes_) {
      drop_if([](const Entry&) { return false; }, dropped);
      purge_at_ = std::max<std::size_t>(least_to_purge, 2 * entries_.size());
      purge_at_bytes_ = std::max<int64_t>(least_bytes_to_purge, 2 * counts_.bytes);
    }
    keep_entry(entry, keep);
    counts_.bytes += entry.bytes;
    entries_.emplace(owner_of(weight), std::move(entry));
  }

  /// Drops the least recently used data until `bytes` more fit.
  void make_room(int64_t bytes, Entries& dropped) {
    while (counts_.bytes > budget_ - bytes && !entries_.empty()) {
      drop(std::ranges::min_element(entries_, {}, [](const auto& one) { return one.second.used; }),
           dropped);
    }
  }

  /// `dropped` is freed without the lock.
  void drop(Entries::iterator entry, Entries& dropped) {
    counts_.bytes -= entry->second.bytes;
    dropped.insert(entries_.extract(entry));
  }
  /// Drops the entries that `leaves` selects, and the data of destroyed weights.
  template <class Leaves>
  void drop_if(const Leaves& leaves, Entries& dropped) {
    for (auto next = entries_.begin(); next != entries_.end();) {
      const auto entry = next++;
      if (entry->second.owner.is_gone() || leaves(entry->second)) drop(entry, dropped);
    }
  }
  template <class Leaves>
  void drop_if(const Leaves& leaves) {
    Entries dropped;
    const std::scoped_lock lock(mutex_);
    drop_if(leaves, dropped);
  }

  mutable std::mutex mutex_;  // guards the members that are not atomic
  Entries entries_;
  Counts counts_;
  std::uint64_t uses_ = 0;
  std::uint64_t changes_ = 0;  // calls of changed(), all_changed() and clear()
  std::uint64_t regions_ = 0;  // number of regions that have begun, and of the last one
  std::unordered_set<std::uint64_t> open_regions_;
  // The numbers of entries or bytes at which the store is searched for data of destroyed weights.
  // So at most half of the store, or this small amount, is useless.
  static constexpr std::size_t least_to_purge = 64;
  static constexpr int64_t least_bytes_to_purge = int64_t{1} << 24;
  std::size_t purge_at_ = least_to_purge;
  int64_t purge_at_bytes_ = least_bytes_to_purge;
  int64_t budget_ = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> suspensions_ = 0;  // read in get() before the lock is taken
};

/// The process's store, which the first call creates. Any thread.
inline DerivedWeights& derived_weights() {
  static DerivedWeights& store = []() -> DerivedWeights& {
    SharedRuntime& runtime = shared_runtime();
    const std::scoped_lock lock(runtime.mutex);
    if (KeptWeights* const known = runtime.kept_weights) {
      return static_cast<DerivedWeights&>(*known);  // of another library with the same layout
    }
    // DropWeightCasts calls this function, in any library: find_weights_written() reads its
    // address.
    const WeightsWritten written = [](at::TensorList weights) {
      if (weights.empty()) {
        derived_weights().end_window();  // a step has ended
      } else {
        derived_weights().changed(weights);
      }
    };
    auto made = std::make_unique<DerivedWeights>();
    define_for_all(joined({weights_written_op, "(int address=",
                           std::to_string(reinterpret_cast<std::uintptr_t>(written)), ") -> ()"}));
    runtime.kept_weights = made.get();
    return *made.release();
  }();
  return store;
}

/// How long the calling thread stores derived data: not at all outside guards, in those without a
/// cache, and for a region that began before the store.
inline WeightKeep keep_of_this_thread() {
  const ThreadPolicy* policy = thread_policy();
  if (policy == nullptr) return {};
  const bool has_no_end =
      policy->keep.until == WeightKeep::Until::region_ends && policy->keep.region == 0;
  return has_no_end ? WeightKeep() : policy->keep;
}

}  // namespace TORCHAMP_NAMESPACE::detail
