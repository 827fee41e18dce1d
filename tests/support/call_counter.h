// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/record_function.h>

#include <map>
#include <memory>
#include <string>

/// Counts the calling thread's ops while it lives: those called from outside LibTorch, and those
/// that these call in turn.
class CallCounter {
 public:
  CallCounter() {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&enter, &leave).scopes({at::RecordScope::FUNCTION}));
    counts() = {};
  }
  ~CallCounter() { at::removeCallback(handle_); }
  CallCounter(const CallCounter&) = delete;
  CallCounter& operator=(const CallCounter&) = delete;

  int called() const { return sum(counts().outer); }
  int called(const std::string& op) const { return count(counts().outer, op); }
  /// Those called from within others counted, too: from autograd's nodes, say.
  int called_anywhere(const std::string& op) const { return count(counts().all, op); }
  int called_anywhere() const { return sum(counts().all); }
  /// Numbers that the host asked tensors for. (On the CPU, some kernels do so inside.)
  int reads() const {
    return called("aten::item") + called("aten::_local_scalar_dense") + called("aten::equal") +
           called("aten::is_nonzero");
  }
  const std::map<std::string, int>& calls() const { return counts().outer; }

 private:
  struct Counts {
    int depth = 0;
    std::map<std::string, int> outer, all;
  };
  static Counts& counts() {
    static thread_local Counts counts;
    return counts;
  }
  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& op) {
    if (counts().depth++ == 0) ++counts().outer[op.name()];
    ++counts().all[op.name()];
    return nullptr;
  }
  static void leave(const at::RecordFunction&, at::ObserverContext*) { --counts().depth; }

  static int sum(const std::map<std::string, int>& calls) {
    int all = 0;
    for (const auto& [op, n] : calls) all += n;
    return all;
  }
  static int count(const std::map<std::string, int>& calls, const std::string& op) {
    const auto found = calls.find(op);
    return found == calls.end() ? 0 : found->second;
  }

  at::CallbackHandle handle_;
};
