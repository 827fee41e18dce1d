// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torchamp/detail/overlay/kept_weights.h"
#include "torchamp/detail/weights/derived.h"
#include "torchamp/detail/weights/stamp.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// What a DerivedWeights keeps.
struct DerivedWeights::Entries {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  static Weak weak_owner_of(const at::Tensor& weight) {
    const at::TensorBase& owner = weight.is_view() ? weight._base() : weight;
    return Weak(owner.getIntrusivePtr());
  }

  struct Entry {
    Entry(const at::Tensor& weight, WeightStamp of, WeightForm as, WeightKeep keep_for,
          Tensors made)
        : owner(weak_owner_of(weight)), stamp(std::move(of)), form(as), tensors(std::move(made)) {
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

    const c10::TensorImpl* address() const { return owner._unsafe_get_target(); }

    Weak owner;  // keeps the address from being used again
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

  static bool is_unshared(const at::Tensor& tensor) {
    return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
  }

  // A region's number is most_threads times how many its thread has begun, plus the thread's
  // number. A thread's last two have slots of their own. Of two open regions that share a slot, one
  // may be taken for ended: nothing is kept for it then.
  static constexpr std::uint64_t most_threads = 1 << 24;

  std::atomic<std::uint64_t>& slot_of(std::uint64_t region) {
    const std::uint64_t thread = region % most_threads, begun = region / most_threads;
    return open_regions[(2 * thread + begun % 2) % std::size(open_regions)];
  }

  bool is_over(const Entry& entry) {
    return entry.until == WeightKeep::Until::region_ends && slot_of(entry.region) != entry.region;
  }

  // Where the entries of an owner begin, or would.
  std::size_t place_of(const c10::TensorImpl* owner) const {
    const std::less<> before;  // an order of any pointers
    std::size_t begin = 0;
    for (std::size_t end = entries.size(); begin < end;) {
      const std::size_t middle = begin + (end - begin) / 2;
      before(entries[middle]->address(), owner) ? begin = middle + 1 : end = middle;
    }
    return begin;
  }

  bool is_of(std::size_t place, const c10::TensorImpl* owner) const {
    return place < entries.size() && entries[place]->address() == owner;
  }

  // The place of the weight's entry, or the first one behind all of its owner's.
  std::size_t find(const at::Tensor& weight, WeightForm form) const {
    const c10::TensorImpl* const owner = owner_of(weight);
    std::size_t place = place_of(owner);
    while (is_of(place, owner) &&
           (entries[place]->form != form || !entries[place]->stamp.is_of(weight))) {
      ++place;
    }
    return place;
  }

  Tensors take_at(std::size_t place) {
    Tensors tensors = std::move(entries[place]->tensors);
    counts.bytes -= entries[place]->bytes;
    entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(place));
    --size;
    return tensors;
  }

  void add(const at::Tensor& weight, Entry entry, std::vector<Tensors>& dropped) {
    if (entry.bytes > budget || is_over(entry)) return;
    const c10::TensorImpl* const owner = owner_of(weight);
    const std::size_t other = find(weight, entry.form);
    if (is_of(other, owner)) dropped.push_back(take_at(other));  // another thread was quicker
    make_room(entry.bytes, dropped);
    if (entries.size() >= purge_at || counts.bytes >= purge_at_bytes) {
      purge([](const Entry&, std::uint64_t) { return false; }, 0, dropped);
      purge_at = std::max<std::size_t>(64, 2 * entries.size());
      purge_at_bytes = std::max<int64_t>(least_bytes_to_purge, 2 * counts.bytes);
    }
    entry.used = ++uses;
    const int64_t bytes = entry.bytes;
    const auto place = entries.begin() + static_cast<std::ptrdiff_t>(find(weight, entry.form));
    entries.insert(place, std::make_unique<Entry>(std::move(entry)));
    counts.bytes += bytes;
    ++size;
  }

  // Drops what is least recently used until `bytes` more fit.
  void make_room(int64_t bytes, std::vector<Tensors>& dropped) {
    while (counts.bytes > budget - bytes && size != 0) {
      std::uint64_t oldest = std::numeric_limits<std::uint64_t>::max();
      for (const auto& entry : entries) oldest = std::min(oldest, entry->used);
      purge([](const Entry& entry, std::uint64_t used) { return entry.used == used; }, oldest,
            dropped);
    }
  }

  // Which entries leave; `number` is what it says of them.
  using Leaves = bool (*)(const Entry&, std::uint64_t number);

  void drop_if(Leaves leaves, std::uint64_t number = 0) {
    std::vector<Tensors> dropped;
    const std::scoped_lock lock(mutex);
    purge(leaves, number, dropped);
  }

  // Takes out what `leaves` says, and what belongs to weights that are gone.
  void purge(Leaves leaves, std::uint64_t number, std::vector<Tensors>& dropped) {
    std::size_t left = 0;
    for (auto& entry : entries) {
      if (entry->owner.expired() || leaves(*entry, number)) {
        counts.bytes -= entry->bytes;
        dropped.push_back(std::move(entry->tensors));
      } else {
        entries[left++].swap(entry);
      }
    }
    while (entries.size() > left) entries.pop_back();
    size = left;
  }

  std::mutex mutex;                             // guards what is not atomic
  std::vector<std::unique_ptr<Entry>> entries;  // by their owners' addresses
  Counts counts;
  std::uint64_t uses = 0;
  // How many entries or bytes there are when those of weights that are gone are looked for. So at
  // most half of what is kept, or this little, is of no use to anybody.
  static constexpr int64_t least_bytes_to_purge = int64_t{1} << 24;
  std::size_t purge_at = 64;
  int64_t purge_at_bytes = least_bytes_to_purge;
  int64_t budget = std::numeric_limits<int64_t>::max();
  std::atomic<std::size_t> size = 0;
  std::atomic<std::uint64_t> times_told = 0;
  std::atomic<int64_t> suspensions = 0;
  std::atomic<std::uint64_t> threads = 0;  // that have begun regions
  std::atomic<std::uint64_t> open_regions[256] = {};
};

TORCHAMP_BODY DerivedWeights::DerivedWeights() : entries_(new Entries) {}

TORCHAMP_BODY DerivedWeights::~DerivedWeights() {
  delete entries_;
}

TORCHAMP_BODY DerivedWeights::Found DerivedWeights::find(const at::Tensor& weight, WeightForm form,
                                                         WeightKeep keep) {
  if (keep.until == WeightKeep::Until::made || entries_->suspensions > 0 ||
      !counts_changes(weight) || stream_is_captured(weight)) {
    return {Found::Is::not_for_keeping, {}};
  }
  Found found{Found::Is::outdated, {}};
  {
    const std::scoped_lock lock(entries_->mutex);
    const std::size_t place = entries_->find(weight, form);
    if (entries_->is_of(place, owner_of(weight))) {
      Entries::Entry* const entry = entries_->entries[place].get();
      if (entry->holds(weight)) {
        ++entries_->counts.hits;
        entry->keep(keep);
        entry->used = ++entries_->uses;
        return {Found::Is::kept, entry->tensors};
      }
      found.tensors = entries_->take_at(place);
    }
    ++entries_->counts.misses;
    found.times_told = entries_->times_told;
  }
  Tensors& reusable = found.tensors;
  bool all_unshared = true;
  for (const at::Tensor& tensor : reusable) {
    all_unshared = all_unshared && Entries::is_unshared(tensor);
  }
  if (!all_unshared) reusable.clear();
  return found;
}

TORCHAMP_BODY void DerivedWeights::add(const at::Tensor& weight, WeightStamp stamp, WeightForm form,
                                       WeightKeep keep, const Tensors& made,
                                       std::uint64_t times_told) {
  std::vector<Tensors> dropped;  // freed without the lock
  const std::scoped_lock lock(entries_->mutex);
  if (times_told == entries_->times_told && entries_->suspensions == 0) {
    entries_->add(weight, Entries::Entry(weight, std::move(stamp), form, keep, made), dropped);
  }
}

TORCHAMP_BODY void DerivedWeights::changed(at::TensorList weights) {
  ++entries_->times_told;
  if (is_empty()) return;
  ska::flat_hash_set<const void*> memory;
  for (const at::Tensor& weight : weights) {
    if (weight.defined() && weight.has_storage()) {
      memory.insert(weight.storage().unsafeGetStorageImpl());
    }
  }
  const std::scoped_lock lock(entries_->mutex);
  for (const auto& entry : entries_->entries) {
    if (memory.count(entry->stamp.memory()) != 0) entry->is_stale = true;
  }
}

TORCHAMP_BODY void DerivedWeights::all_changed() {
  ++entries_->times_told;
  if (is_empty()) return;
  const std::scoped_lock lock(entries_->mutex);
  for (const auto& entry : entries_->entries) entry->is_stale = true;
}

TORCHAMP_BODY std::uint64_t DerivedWeights::begin_region() {
  // Threads number their regions by themselves: a counter for all would make each of them wait.
  static thread_local std::uint64_t region = entries_->threads++ % Entries::most_threads;
  region += Entries::most_threads;
  entries_->slot_of(region).store(region, std::memory_order_relaxed);
  return region;
}

TORCHAMP_BODY void DerivedWeights::end_region(std::uint64_t region) {
  std::atomic<std::uint64_t>& slot = entries_->slot_of(region);
  if (slot.load(std::memory_order_relaxed) == region) slot.store(0, std::memory_order_relaxed);
  if (is_empty()) return;
  entries_->drop_if(
      [](const Entries::Entry& entry, std::uint64_t ended) {
        return entry.until == WeightKeep::Until::region_ends && entry.region == ended;
      },
      region);
}

TORCHAMP_BODY void DerivedWeights::end_window() {
  if (is_empty()) return;
  entries_->drop_if([](const Entries::Entry& entry, std::uint64_t) {
    return entry.until == WeightKeep::Until::weights_step;
  });
}

TORCHAMP_BODY void DerivedWeights::drop_gone() {
  if (is_empty()) return;
  entries_->drop_if([](const Entries::Entry&, std::uint64_t) { return false; });
}

TORCHAMP_BODY void DerivedWeights::clear() {
  ++entries_->times_told;
  if (is_empty()) return;
  entries_->drop_if([](const Entries::Entry&, std::uint64_t) { return true; });
}

TORCHAMP_BODY DerivedWeights::Suspension::Suspension(DerivedWeights& weights) : weights_(weights) {
  ++weights_.entries_->suspensions;
}

TORCHAMP_BODY DerivedWeights::Suspension::~Suspension() {
  --weights_.entries_->suspensions;
}

TORCHAMP_BODY void DerivedWeights::set_budget(int64_t bytes) {
  std::vector<Tensors> dropped;
  const std::scoped_lock lock(entries_->mutex);
  entries_->budget = bytes;
  entries_->make_room(0, dropped);
}

TORCHAMP_BODY bool DerivedWeights::is_empty() const {
  return entries_->size.load(std::memory_order_relaxed) == 0;
}

TORCHAMP_BODY DerivedWeights::Counts DerivedWeights::counts() const {
  const std::scoped_lock lock(entries_->mutex);
  return entries_->counts;
}

}  // namespace torchamp::detail
