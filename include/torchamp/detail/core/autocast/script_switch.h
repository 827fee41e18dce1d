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

namespace torchamp::detail {

// Note [Derivatives of scripts]
// The JIT differentiates an optimised script by itself. Its derivatives know nothing of the casts
// that the dispatcher makes: the backward of a 16-bit `mm` would multiply by the fp32 weight, which
// is an error. So under a policy scripts are not optimised, but run op by op and are recorded by
// autograd. The switch is the thread's own; LibTorch does not carry it to the threads that take
// over a state, and a plan that was optimised elsewhere is used by regions as well.
//
// Throwing the switch takes LibTorch 100 ns, and the JIT tells its logger of each run of a script
// before it picks the script's plan. So the switch is thrown there, by a logger that does nothing
// else, and put back by the end of the guard. A program's own logger has precedence; guards throw
// the switch themselves where ours is not in force, or with a LibTorch that is not known to tell
// its logger first.
//
// The logger acts where a guard of its own library is on the thread. So the first of them takes the
// switch as it finds it, and puts it back so, even under another's policy that is in force already.

/// Whether a thread with this policy has one in force, for any device.
inline bool is_in_force(const ThreadPolicy* policy) {
  if (policy == nullptr) return false;
  for (const auto& of_device : policy->in_force) {
    if (of_device) return true;
  }
  return false;
}

/// Whether the JIT may optimise scripts that the calling thread runs. For a PolicyScope.
class ScriptSwitch {
 public:
  /// Whether the calling thread has a scope, so that its scripts run as their policy wants.
  static bool has_scope() { return scopes > 0; }

  /// A scope has put `inner` in the place of `outer`, which may be null. Returns what to give
  /// end_scope().
  static bool begin_scope(const ThreadPolicy* outer, const ThreadPolicy* inner) {
    if (scopes++ == 0 || !is_in_force(outer)) outside = torch::jit::getGraphExecutorOptimize();
    follow(inner, outside);
    return outside;
  }

  /// A scope has put `outer` back.
  static void end_scope(const ThreadPolicy* outer, bool before) {
    follow(--scopes == 0 ? nullptr : outer, before);
  }

 private:
  static inline constinit thread_local int scopes = 0;
  static inline constinit thread_local bool outside = true;  // of all policies, or of all scopes

  static void follow(const ThreadPolicy* policy, bool otherwise) {
    if (!is_in_force(policy)) {
      set(otherwise);
    } else if (!Logger::is_told()) {
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

    /// Whether the JIT tells this library's logger of scripts that run.
    static bool is_told() {
      static const LoggerBase* const ours = install();
      return ours != nullptr && torch::jit::logging::getLogger() == ours;
    }

   private:
    /// Null if another one is to stay.
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
      logging::setLogger(before);  // set by another thread between our look and this
      return nullptr;
    }
  };
};

}  // namespace torchamp::detail
