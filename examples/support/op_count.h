// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace support {

/// How often each op was called, by names such as "aten::linear".
using OpCounts = std::map<std::string, std::int64_t>;

/// Counts the ops of LibTorch's that are called while this lives, on any thread; ops that other ops
/// call count as well, like in Python's profiler, unless it is the same op for other arguments
/// (add_.Scalar calls add_.Tensor). One at a time.
class OpCount {
 public:
  OpCount() {
    counts().clear();
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}));
  }
  OpCount(const OpCount&) = delete;
  OpCount& operator=(const OpCount&) = delete;
  ~OpCount() { at::removeCallback(handle_); }

  OpCounts result() const {
    const std::lock_guard lock(mutex());
    return counts();
  }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& op) {
    const std::string name = op.name();
    if (name.starts_with("aten::") && (callers().empty() || callers().back() != name)) {
      const std::lock_guard lock(mutex());
      ++counts()[name];
    }
    callers().push_back(name);
    return nullptr;
  }
  static void end(const at::RecordFunction&, at::ObserverContext*) {
    if (!callers().empty()) callers().pop_back();
  }
  static std::vector<std::string>& callers() {
    thread_local std::vector<std::string> names;
    return names;
  }
  static OpCounts& counts() {
    static OpCounts all;
    return all;
  }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }

  at::CallbackHandle handle_{};
};

/// All that `body` calls.
template <class Body>
OpCounts count_ops(const Body& body) {
  const OpCount count;
  body();
  return count.result();
}

inline std::int64_t sum_of(const OpCounts& counts) {
  std::int64_t sum = 0;
  for (const auto& [name, count] : counts) sum += count;
  return sum;
}

/// Ops that compute nothing: the languages' own ways to take parts of tensors, and the first
/// gradient's memory.
inline bool computes(const std::string& op) {
  return op != "aten::empty" && op != "aten::empty_strided" && op != "aten::narrow" &&
         op != "aten::broadcast_tensors";
}

/// "aten::add_ 73 (0)": of which ops that compute there are more in one than in the other. Empty:
/// of none.
inline std::string difference(const OpCounts& ours, const OpCounts& python) {
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> both;
  for (const auto& [name, count] : ours) both[name].first = count;
  for (const auto& [name, count] : python) both[name].second = count;
  std::string text;
  for (const auto& [name, count] : both) {
    if (count.first == count.second || !computes(name)) continue;
    text += (text.empty() ? "" : ", ") + name + " " + std::to_string(count.first) + " (" +
            std::to_string(count.second) + ")";
  }
  return text;
}

}  // namespace support
