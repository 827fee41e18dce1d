// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "simulated_device/memory.h"
#include "simulated_device/streams.h"

namespace simulated {

/// A block of memory as work finds it later, if it is still there.
struct Place {
  char* base;
  std::uint64_t serial;
};

/// A kernel or a copy, by the addresses that it works on. It keeps no device memory alive.
struct Work {
  std::string what;
  std::vector<Place> reads, writes;
  std::function<void(int64_t stream)> run;
};

// Note [A capture]
// A capturing stream does nothing: what it is given is noted, to be done in each replay. But a CPU
// kernel tells the shapes of its results only by running, and one that takes indices fails on
// poison. So the capture rehearses: its kernels run once, on copies of the memory that they touch
// and with a copy of the generator. The device's memory and its generator stay as they were, but
// for fresh memory, which is poison until the first replay, and again whenever a replay gets to
// where it was allocated or freed.

/// What a graph is made from, while its streams capture. Any of their threads may use it.
class Capture {
 public:
  explicit Capture(c10::DeviceIndex device);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  std::uint64_t id() const { return id_; }
  c10::DeviceIndex device() const { return device_; }
  const std::shared_ptr<Pool>& pool() const { return pool_; }

  /// The copy of a block's bytes that is rehearsed on.
  char* copy_of(const Block& block);
  /// Of the block, in this capture alone.
  Accesses* accesses(const Block& block);

  void add(Work work);
  /// Notes that a block of the pool becomes poison: it was allocated or freed.
  void add_poison(const Block& block);
  /// The generator for a rehearsal with `inner`, the device's default generator.
  const at::Generator& rehearsing(const at::Generator& inner);

  std::vector<Work> take_work();

  /// For all captures under way: a block outside of their pools is gone.
  static void forget_everywhere(const Block& block);

 private:
  struct Copy {
    std::unique_ptr<char, void (*)(void*)> bytes;
    Accesses accesses;
  };
  Copy& copy(const Block& block);

  std::uint64_t id_;
  c10::DeviceIndex device_;
  std::shared_ptr<Pool> pool_;
  std::mutex mutex_;
  std::map<const Block*, Copy> copies_;
  std::vector<Work> work_;
  std::optional<at::Generator> generator_;
};

inline Place place_of(const Block& block) {
  return {block.base, block.serial};
}

}  // namespace simulated
