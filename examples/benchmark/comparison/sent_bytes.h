// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

/// What sent_bytes.cpp has counted and noted, if it was preloaded.
class SentBytes {
 public:
  /// -1: it was not.
  std::int64_t total() const { return total_ ? total_() : -1; }

  /// Forgets what was noted, and notes from now on, or no longer.
  void log(bool on) const {
    if (log_) log_(on ? 1 : 0);
  }

  /// Seconds of the monotonic clock, and bytes.
  std::vector<std::pair<double, std::int64_t>> entries() const {
    std::vector<std::pair<double, std::int64_t>> all;
    std::int64_t nanoseconds = 0, bytes = 0;
    for (std::size_t at = 0; entry_ && entry_(at, &nanoseconds, &bytes) != 0; ++at) {
      all.emplace_back(static_cast<double>(nanoseconds) * 1e-9, bytes);
    }
    return all;
  }

 private:
  template <class Function>
  static Function* find(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  }

  std::int64_t (*total_)() = find<std::int64_t()>("sent_bytes_total");
  void (*log_)(int) = find<void(int)>("sent_bytes_log");
  int (*entry_)(std::size_t, std::int64_t*, std::int64_t*) =
      find<int(std::size_t, std::int64_t*, std::int64_t*)>("sent_bytes_entry");
};
