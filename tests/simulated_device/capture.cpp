// SPDX-License-Identifier: BSD-3-Clause
#include "simulated_device/capture.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "simulated_device/pages.h"

namespace simulated {

namespace {

struct UnderWay {
  std::mutex mutex;
  std::vector<Capture*> captures;
};
UnderWay& under_way() {
  static UnderWay* const u = new UnderWay;  // outlives every tensor
  return *u;
}

void fill_with_poison(const Place& place) {
  Block* const block = find_block(place.base, place.serial);
  const Unprotected open({block});
  std::memset(block->base, 0xFF, block->mapped);
}

}  // namespace

Capture::Capture(c10::DeviceIndex device) : device_(device), pool_(std::make_shared<Pool>()) {
  static std::atomic<std::uint64_t> captures{0};
  id_ = ++captures;
  pool_->capture = this;
  const std::lock_guard lock(under_way().mutex);
  under_way().captures.push_back(this);
}

Capture::~Capture() {
  pool_->capture = nullptr;
  const std::lock_guard lock(under_way().mutex);
  std::erase(under_way().captures, this);
}

Capture::Copy& Capture::copy(const Block& block) {
  const auto found = copies_.find(&block);
  if (found != copies_.end()) return found->second;
  Copy fresh{{static_cast<char*>(aligned_bytes(block.mapped)), &free_aligned_bytes}, {}};
  fresh.accesses.home = block.accesses.home;
  {
    const Unprotected open({const_cast<Block*>(&block)});
    std::memcpy(fresh.bytes.get(), block.base, block.mapped);
  }
  return copies_.emplace(&block, std::move(fresh)).first->second;
}

char* Capture::copy_of(const Block& block) {
  const std::lock_guard lock(mutex_);
  return copy(block).bytes.get();
}

Accesses* Capture::accesses(const Block& block) {
  const std::lock_guard lock(mutex_);
  return &copy(block).accesses;
}

void Capture::add(Work work) {
  const std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
}

void Capture::add_poison(const Block& block) {
  std::memset(copy_of(block), 0xFF, block.mapped);
  const Place place = place_of(block);
  add({"allocator", {}, {place}, [place](int64_t) { fill_with_poison(place); }});
}

const at::Generator& Capture::rehearsing(const at::Generator& inner) {
  const std::lock_guard lock(mutex_);
  if (!generator_) generator_ = inner.clone();
  return *generator_;
}

std::vector<Work> Capture::take_work() {
  const std::lock_guard lock(mutex_);
  return std::exchange(work_, {});
}

void Capture::forget_everywhere(const Block& block) {
  const std::lock_guard all(under_way().mutex);
  for (Capture* const capture : under_way().captures) {
    const std::lock_guard lock(capture->mutex_);
    capture->copies_.erase(&block);
  }
}

}  // namespace simulated
