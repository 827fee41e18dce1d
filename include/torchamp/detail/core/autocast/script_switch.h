// SPDX-License-Identifier: BSD-3-Clause
// Whether the JIT optimises the scripts that a thread runs.
#pragma once

#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/logging.h>

#include <cstdint>
#include <string>
#include <typeinfo>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Derivatives of scripts]
// The JIT differentiates an optimised script itself. Its derivatives do not contain the casts that
// the dispatcher makes: the backward of a 16-bit `mm` would multiply by the fp32 weight, which is
// an error. So under a policy scripts are not optimised; they run op by op, and autograd records
// them. The JIT's switch is thread-local. LibTorch does not carry it to other threads with the
// thread's state, and a region also uses a plan that was optimised elsewhere.
//
// Setting the switch takes LibTorch 100 ns. The JIT reports each run of a script to its logger
// before it selects the script's plan. So our logger, which does nothing else, sets the switch, and
// the end of the guard resets it. A program's own logger has precedence. If our logger is not
// installed, or if it is not known that this LibTorch calls the logger first, guards set the switch
// themselves.
//
// The logger of a shared library acts if the thread has a guard of this library. So the library's
// first guard stores the switch and restores it, even if the policy of another library is already
// active.

/// Whether this policy is active for any device.
inline bool is_in_force(const ThreadPolicy* policy) {
  if (policy == nullptr) return false;
  for (const auto& of_device : policy->in_force) {
    if (of_device) return true;
  }
  return false;
}

/// Controls whether the JIT may optimise scripts that the calling thread runs. For a PolicyScope.
class ScriptSwitch {
 public:
  /// Whether the calling thread has a scope, so that its scripts follow the policy.
  static bool has_scope() { return scopes > 0; }

  /// A scope has replaced `outer`, which may be null, by `inner`. Returns the argument for
  /// end_scope().
  static bool begin_scope(const ThreadPolicy* outer, const ThreadPolicy* inner) {
    if (scopes++ == 0 || !is_in_force(outer)) outside = torch::jit::getGraphExecutorOptimize();
    follow(inner, outside);
    return outside;
  }

  /// A scope has restored `outer`.
  static void end_scope(const ThreadPolicy* outer, bool before) {
    follow(--scopes == 0 ? nullptr : outer, before);
  }

 private:
  static inline constinit thread_local int scopes = 0;
  static inline constinit thread_local bool outside = true;  // of all policies, or of all scopes

  static void follow(const ThreadPolicy* policy, bool otherwise) {
    if (!is_in_force(policy)) {
      set(otherwise);
    } else if (!Logger::is_logger_called()) {
      set(false);
    }
  }

  static void set(bool optimize) {
    namespace jit = torch::jit;
    if (jit::getGraphExecutorOptimize() != optimize) jit::setGraphExecutorOptimize(optimize);
  }

  class Logger final : public torch::jit::logging::LoggerBase {
   public:
    void addStatValue(const std::string&, int64_t) override {
      if (has_scope() && is_in_force(thread_policy())) set(false);
    }

    /// Whether the JIT calls this library's logger when a script runs.
    static bool is_logger_called() {
      static const LoggerBase* const ours = install();
      return ours != nullptr && torch::jit::logging::getLogger() == ours;
    }

   private:
    /// Null if another logger must stay.
    static LoggerBase* install() {
      namespace logging = torch::jit::logging;
      constexpr bool is_told_first = TORCHAMP_LIBTORCH <= 215;
      const auto does_nothing = [](LoggerBase& logger) {
        return typeid(logger) == typeid(logging::NoopLogger);
      };
      if (!is_told_first || !does_nothing(*logging::getLogger())) return nullptr;
      pin_this_library();
      LoggerBase* const ours = new Logger;  // never destroyed: scripts may run until the end
      LoggerBase* const before = logging::setLogger(ours);
      if (does_nothing(*before)) return ours;
      logging::setLogger(before);  // another thread has set it since our check
      return nullptr;
    }
  };
};

}  // namespace TORCHAMP_NAMESPACE::detail
