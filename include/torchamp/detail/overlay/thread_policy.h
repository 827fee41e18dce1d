// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/fp8/rule.h"
#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/weights/derived.h"

namespace torchamp::detail {

struct GuardTrial;

/// What a guard puts into the thread's slot. Immutable: LibTorch shares it with other threads.
struct ThreadPolicy final : c10::DebugInfoBase, std::enable_shared_from_this<ThreadPolicy> {
  std::shared_ptr<const PolicyData> inherited;  // for a nested guard that names no policy
  /// By device, with its table compiled; null outside guards and where they are disabled.
  std::array<std::shared_ptr<const PolicyData>, device_count> in_force;
  /// How long what is derived from weights is kept. Its region is never 0 inside a guard.
  WeightKeep keep;
  std::shared_ptr<Fp8Usage> fp8;  // of the innermost region whose policy has an fp8 rule
  /// Whether casts are kept so as well, and not by LibTorch.
  bool keeps_casts = false;
  std::shared_ptr<const GuardTrial> trial;  // of a PrecisionAudit; null otherwise
};

/// The calling thread's policy, or null outside every guard.
inline const ThreadPolicy* thread_policy() {
  return static_cast<const ThreadPolicy*>(c10::ThreadLocalDebugInfo::get(policy_slot()));
}

/// The policy in force on the calling thread for a device, by its index; null outside
/// guards and where they are disabled.
inline const PolicyData* policy_in_force(std::size_t device_index) {
  const ThreadPolicy* policy = thread_policy();
  return policy == nullptr ? nullptr : policy->in_force[device_index].get();
}

/// How long the calling thread keeps what it derives from weights: not at all outside of guards, or
/// where LibTorch's flag for its own cache is off.
inline WeightKeep keep_of_this_thread() {
  const ThreadPolicy* policy = thread_policy();
  if (policy == nullptr || !at::autocast::is_autocast_cache_enabled()) return {};
  return policy->keep;
}

/// Puts a ThreadPolicy into the calling thread's slot, and takes it out again.
class PolicyScope {
 public:
  /// Null: the slot stays as it is.
  explicit PolicyScope(std::shared_ptr<const ThreadPolicy> policy) {
    if (!policy) return;
    scripts_were_optimized_ = has_policy_in_force() || torch::jit::getGraphExecutorOptimize();
    before_ = c10::ThreadLocalDebugInfo::current();
    c10::ThreadLocalDebugInfo::_push(policy_slot(),
                                     std::const_pointer_cast<ThreadPolicy>(std::move(policy)));
    ours_ = c10::ThreadLocalDebugInfo::current().get();
    set_optimization_of_scripts();
  }

  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

  ~PolicyScope() { end(); }

  /// For the destructor of a guard, `guard` ("~AutocastGuard"): ends the scope. False, after a
  /// warning, on another thread than the one that made it, which must leave all state as it is.
  bool end_of(const char* guard) {
    if (!is_on_its_thread()) {
      TORCH_WARN(guard,
                 ": destroyed by another thread than the one that made it. Its state was not "
                 "restored there. Keep a guard in the scope that it covers.");
      return false;
    }
    end();
    return true;
  }

 private:
  bool is_on_its_thread() const { return thread_ == std::this_thread::get_id(); }

  void end() noexcept {
    if (ours_ == nullptr || !is_on_its_thread()) return;
    if (c10::ThreadLocalDebugInfo::current().get() == ours_) {
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
    } else {
      take_out_from_below();
    }
    ours_ = nullptr;
    set_optimization_of_scripts();
  }

  static bool has_policy_in_force() {
    const ThreadPolicy* policy = thread_policy();
    if (policy == nullptr) return false;
    const auto& in_force = policy->in_force;
    return std::any_of(in_force.begin(), in_force.end(), [](const auto& of) { return of; });
  }

  // See Note [Derivatives of scripts].
  void set_optimization_of_scripts() const {
    torch::jit::setGraphExecutorOptimize(!has_policy_in_force() && scripts_were_optimized_);
  }

  // Note [Derivatives of scripts]
  // Where gradients are wanted, an optimised script is differentiated by the JIT. Its derivatives
  // take what the ops of the script were given, and know nothing of the casts that the dispatcher
  // makes: the backward of a 16-bit `mm` would multiply by the fp32 weight, which is an error. So
  // scripts run as they are written under a policy, op by op and recorded by autograd. The switch
  // is the thread's own; LibTorch does not carry it to the threads that take over a state.

  // Note [Slots pushed inside a scope]
  // LibTorch keeps a thread's slots as a stack. A profiler that is started inside a scope and
  // outlives it has its slot above ours; putting back what was there before us would end the
  // profiler. So what lies above is lifted off, and put back on what was below us.
  void take_out_from_below() noexcept {
    try {
      take_out();
    } catch (const std::exception& error) {
      TORCH_WARN("~AutocastGuard: cannot restore the thread's slots: ", error.what());
    }
  }

  // Returns whether our slot was there. Without it, what lay above belongs to a state that has been
  // left, and is dropped.
  bool take_out() {
    using Info = c10::ThreadLocalDebugInfo;
    using Kind = c10::DebugInfoKind;
    const bool at_ours = Info::current().get() == ours_;
    if (Info::current() && !at_ours) {
      for (const Kind kind :
           {policy_slot(), Kind::PRODUCER_INFO, Kind::MOBILE_RUNTIME_INFO, Kind::PROFILER_STATE,
            Kind::INFERENCE_CONTEXT, Kind::PARAM_COMMS_INFO, Kind::TEST_INFO, Kind::TEST_INFO_2}) {
        if (!on_top(kind)) continue;
        auto above = Info::_pop(kind);
        const bool found = take_out();
        if (found) Info::_push(kind, std::move(above));
        return found;
      }
    }
    Info::_forceCurrentDebugInfo(std::move(before_));
    return at_ours;
  }

  static bool on_top(c10::DebugInfoKind kind) {
    try {
      (void)c10::ThreadLocalDebugInfo::_peek(kind);
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }

  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
  const c10::ThreadLocalDebugInfo* ours_ = nullptr;
  bool scripts_were_optimized_ = true;  // outside all regions
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace torchamp::detail
