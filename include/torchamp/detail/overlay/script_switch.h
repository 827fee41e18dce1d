// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/logging.h>

#include <cstdint>
#include <string>
#include <typeinfo>

#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/overlay/thread_policy.h"

namespace torchamp::detail {

// Note [Derivatives of scripts]
// Where gradients are wanted, an optimised script is differentiated by the JIT. Its derivatives
// take what the ops of the script were given, and know nothing of the casts that the dispatcher
// makes: the backward of a 16-bit `mm` would multiply by the fp32 weight, which is an error. So
// scripts run as they are written under a policy, op by op and recorded by autograd. The switch
// is the thread's own; LibTorch does not carry it to the threads that take over a state. Nor does
// it undo what the JIT has done: a script has a plan for autocast and one without, and one that was
// optimised under at::autocast alone, or on such a thread, is used by regions as well.
//
// Throwing the switch takes LibTorch 100 ns, most guards' threads run no scripts, and the JIT tells
// its logger of each run of a script before it picks the script's plan. So the switch is thrown
// there, by a logger that does nothing else, and put back by the end of the guard. A program's own
// logger has precedence, and guards throw the switch themselves where ours is not in force, or with
// a LibTorch that is not known to tell its logger first.
//
// The logger acts where a guard of its own library is on the thread. So the first of them takes the
// switch as it finds it, and puts it back so, even under a policy that is in force already: one of
// a state that the thread took over, or of another library.

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
  static bool has_scope() { return of_this_thread().scopes > 0; }

  /// A scope has put `inner` in the place of `outer`, which may be null. Returns what to give
  /// end_scope().
  static bool begin_scope(const ThreadPolicy* outer, const ThreadPolicy* inner) {
    State& state = of_this_thread();
    if (state.scopes++ == 0 || !is_in_force(outer)) {
      state.outside = torch::jit::getGraphExecutorOptimize();
    }
    if (!is_in_force(inner)) {
      set(state.outside);
    } else if (!Logger::is_told()) {
      set(false);
    }
    return state.outside;
  }

  /// A scope has put `outer` back.
  static void end_scope(const ThreadPolicy* outer, bool outside) {
    if (--of_this_thread().scopes == 0 || !is_in_force(outer)) {
      set(outside);
    } else if (!Logger::is_told()) {
      set(false);
    }
  }

 private:
  struct State {
    int scopes = 0;
    bool outside = true;  // of all policies, or of all scopes
  };

  static State& of_this_thread() {
    static thread_local constinit State state;
    return state;
  }

  static void set(bool optimize) {
    if (torch::jit::getGraphExecutorOptimize() == optimize) return;
    torch::jit::setGraphExecutorOptimize(optimize);
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
