// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/logging.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <typeinfo>
#include <utility>

#include "torchamp/detail/core/autocast/kernel.h"
#include "torchamp/detail/core/autocast/region.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace torchamp::detail {

// ---- Scripts ------------------------------------------------------------------------------------

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

// ---- Scopes of a policy -------------------------------------------------------------------------

// Note [Guards without allocations]
// What an outermost guard puts into its thread's slot is mostly what the thread's last one has put
// there, and nobody else holds any more. So it is kept for the thread's next guard, unless the
// policy has predicates: what they hold is not to live longer than the program wants it to.

/// What the calling thread's last outermost guard has left behind: a policy, and the node of
/// LibTorch's list of slots that has it; or nothing.
struct SparePolicy {
  std::shared_ptr<const ThreadPolicy> policy;
  std::shared_ptr<c10::ThreadLocalDebugInfo> node;

  /// Null after the thread's has been destroyed: guards in destructors that run then have none.
  static SparePolicy* of_this_thread() {
    static thread_local bool is_over = false;
    struct OfThread : SparePolicy {
      ~OfThread() { is_over = true; }
    };
    static thread_local OfThread spare;
    return is_over ? nullptr : &spare;
  }

  /// Whether it is there, and nobody else has a share in it.
  bool is_unshared() const {
    constexpr long ours_and_the_nodes = 2;
    if (node.use_count() != 1 || policy.use_count() != ours_and_the_nodes) return false;
    std::atomic_thread_fence(std::memory_order_acquire);  // after those who had a share
    return true;
  }

  /// Whether another guard may want it.
  bool is_of_use() const {
    const ThreadPolicy& of = *policy;
    if (!of.is_in_guard || of.op_rule_usage || of.guards || of.outside) return false;
    for (const Edit& edit : policy->inherited->edits) {
      if (edit.when.predicate) return false;
    }
    return is_unshared();
  }
};

TORCHAMP_BODY PolicyScope::PolicyScope(std::shared_ptr<const ThreadPolicy> policy,
                                       std::shared_ptr<c10::ThreadLocalDebugInfo> node)
    : policy_(std::move(policy)) {
  using Info = c10::ThreadLocalDebugInfo;
  if (!policy_) return;
  const int pass = this_backward_pass();
  if (pass != policy_->backward_pass && pass != ThreadPolicy::no_backward_pass) {
    auto copy = copy_of(policy_.get());  // see Note [Sums of gradients]
    copy->backward_pass = pass;
    copy->outside = policy_->outside ? policy_->outside : policy_;
    policy_ = std::move(copy);
    node = nullptr;
  }
  before_ = Info::current();
  const ThreadPolicy* const outer = before_ ? thread_policy() : nullptr;
  if (node) {
    ours_ = node.get();
    Info::_forceCurrentDebugInfo(std::move(node));
  } else {
    Info::_push(policy_slot(), std::const_pointer_cast<ThreadPolicy>(policy_));
    ours_ = Info::current().get();
  }
  scripts_outside_ = ScriptSwitch::begin_scope(outer, policy_.get());
}

TORCHAMP_BODY PolicyScope::~PolicyScope() {
  end();
}

TORCHAMP_BODY bool PolicyScope::end_of(const char* guard) {
  if (thread_ != std::this_thread::get_id()) {
    warn({guard,
          ": destroyed by another thread than the one that made it, so that thread's state was not "
          "restored. Keep a guard in the scope that it covers."});
    return false;
  }
  end();
  return true;
}

// Note [Slots pushed inside a scope]
// LibTorch keeps a thread's slots as a stack. A profiler that is started inside a scope and
// outlives it has its slot above ours, which is lifted off, and put back on what was below us.
TORCHAMP_BODY void PolicyScope::end() noexcept {
  if (ours_ == nullptr || thread_ != std::this_thread::get_id()) return;
  SparePolicy last{std::move(policy_), c10::ThreadLocalDebugInfo::current()};
  const bool is_outermost = last.node.get() == ours_ && before_ == nullptr;
  if (last.node.get() == ours_) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before_));
    SparePolicy* const spare = is_outermost ? SparePolicy::of_this_thread() : nullptr;
    if (spare != nullptr && last.is_of_use()) *spare = std::move(last);
  } else {
    try {
      take_out();
    } catch (const std::exception& error) {
      warn({"~AutocastGuard: cannot restore the thread's slots: ", error.what()});
    }
  }
  ours_ = nullptr;
  ScriptSwitch::end_scope(is_outermost ? nullptr : thread_policy(), scripts_outside_);
}

// Returns whether our slot was there. Without it, what lay above belongs to a state that has been
// left, and is dropped.
TORCHAMP_COLD bool PolicyScope::take_out() {
  using Info = c10::ThreadLocalDebugInfo;
  using Kind = c10::DebugInfoKind;
  const bool at_ours = Info::current().get() == ours_;
  if (Info::current() && !at_ours) {
    for (const Kind kind :
         {policy_slot(), Kind::PRODUCER_INFO, Kind::MOBILE_RUNTIME_INFO, Kind::PROFILER_STATE,
          Kind::INFERENCE_CONTEXT, Kind::PARAM_COMMS_INFO, Kind::TEST_INFO, Kind::TEST_INFO_2}) {
      std::shared_ptr<c10::DebugInfoBase> above;
      try {
        above = Info::_pop(kind);
      } catch (const c10::Error&) {
        continue;  // another kind is on top
      }
      const bool found = take_out();
      if (found) Info::_push(kind, std::move(above));
      return found;
    }
  }
  Info::_forceCurrentDebugInfo(std::move(before_));
  return at_ours;
}

// ---- TORCHAMP_POLICY ----------------------------------------------------------------------------

TORCHAMP_COLD std::shared_ptr<const PolicyData> environment_policy(const std::string& text,
                                                                   PolicyFileReader read_file) {
  if (text == "standard") return unedited(BaseTable::standard);
  if (text == "torch") return unedited(BaseTable::torch);
  const bool is_file = text.starts_with("file:");
  if (!is_file || read_file == nullptr) {
    fail({"TORCHAMP_POLICY is '", text,
          is_file
              ? "', and this program does not read policy files. Include torchamp/policy_text.h "
                "in one of its source files, or link torchamp::library."
              : "'. Set it to off, standard, torch or file:PATH, or unset it."});
  }
  return read_file("TORCHAMP_POLICY: torchamp::load_policy", text.substr(5));
}

/// Never destroyed: static objects' destructors may use guards.
inline const GuardOverride* read_environment() {
  const char* const value = std::getenv("TORCHAMP_POLICY");
  const std::string text = value == nullptr ? "" : value;
  auto made = std::make_unique<GuardOverride>();
  made->off = text == "off";
  if (!text.empty() && !made->off) made->policy = environment_policy(text, policy_file_reader);
  return made.release();
}

TORCHAMP_BODY const GuardOverride& guard_override(const ThreadPolicy* policy) {
  if (policy != nullptr && policy->guards) return *policy->guards;
  // Read once, at the first guard; a bad value is an error at every guard.
  static const GuardOverride& environment = *read_environment();
  return environment;
}

// ---- Regions ------------------------------------------------------------------------------------

inline void check_is_floating(at::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) return;
  fail({"AutocastGuard: the dtype ", c10::toString(dtype),
        " is not floating-point. Pass torch::kHalf or torch::kBFloat16."});
}

/// Warns once for each device that is not there, and for each dtype.
inline void warn_of_unusable(at::DeviceType device, at::ScalarType dtype, bool is_present) {
  static std::atomic<bool> devices[c10::COMPILE_TIME_MAX_DEVICE_TYPES],
      dtypes[static_cast<std::size_t>(at::ScalarType::NumOptions)];
  const std::string name = c10::DeviceTypeName(device, /*lower_case=*/is_present);
  if (is_present) {
    warn_once(
        dtypes[static_cast<std::size_t>(dtype)],
        {"AutocastGuard: autocast on ", name, " supports fp16 and bf16, not ", c10::toString(dtype),
         ". The region runs with autocast disabled. Pass torch::kBFloat16 or torch::kHalf",
         ", or {.enabled = false} to leave fp32 alone."});
  } else {
    warn_once(devices[static_cast<std::size_t>(device)],
              {"AutocastGuard: there is no ", name, " device. ", name,
               " regions run with autocast disabled. Pass torch::kCPU for a CPU."});
  }
}

/// Whether regions of `device` run in `dtype`; warns if not.
inline bool is_usable(at::DeviceType device, at::ScalarType dtype) {
  const bool is_present = device_is_present(device);
  if (is_present) check_is_floating(dtype);
  const bool runs =
      is_present && (is_16_bit(dtype) || (dtype == at::kFloat && facts_of(device).fp32_regions));
  if (!runs) warn_of_unusable(device, dtype, is_present);
  return runs;
}

/// What the two options say together; unset: as it is on the calling thread. `cache_enabled = true`
/// leaves a cache of torchamp's.
inline std::optional<WeightCache> asked_cache(std::optional<bool> enabled,
                                              std::optional<WeightCache> cache) {
  if (!cache) {
    if (enabled == false) return WeightCache::none;
    const ThreadPolicy* const outer = thread_policy();
    if (!enabled || !outer || outer->keep.until != WeightKeep::Until::made) return std::nullopt;
    return WeightCache::libtorch;
  }
  TORCHAMP_CHECK_VALUE(!enabled || *enabled == (*cache != WeightCache::none),
                       *enabled ? "AutocastGuard: cache_enabled = true contradicts cache, which is "
                                  "WeightCache::none. Leave cache_enabled unset."
                                : "AutocastGuard: cache_enabled = false contradicts cache, which "
                                  "keeps casts. Leave cache_enabled unset.");
  return cache;
}

TORCHAMP_BODY void prepare_region(const char* call, const PolicyData& policy,
                                  const WeightCasts* casts, at::DeviceType device,
                                  at::ScalarType dtype) {
  policy.compile_once(device);
  const OpRule* const rule = is_16_bit(dtype) ? policy.op_rule() : nullptr;
  if (rule != nullptr) rule->prepare(call, policy, device, dtype);
  if (casts != nullptr) casts->prepare(device);
}

TORCHAMP_BODY AutocastRegion::AutocastRegion(at::DeviceType device,
                                             std::optional<at::ScalarType> dtype, bool enabled,
                                             std::optional<bool> cache_enabled,
                                             std::optional<WeightCache> asked,
                                             const std::shared_ptr<const PolicyData>& policy) {
  // What can fail comes first, so that an error leaves the thread's state as it was.
  const std::optional<WeightCache> cache =
      cache_enabled || asked ? asked_cache(cache_enabled, asked) : std::nullopt;
  if (!cache_enabled && asked) cache_enabled = *asked != WeightCache::none;
  const std::size_t index = device_index(device, "AutocastGuard");
  if (dtype) check_is_floating(*dtype);
  before_ = DeviceAutocastState::of(device);
  const ThreadPolicy* const outer = thread_policy();
  const GuardOverride& guards = guard_override(outer);
  DeviceAutocastState inside = before_;
  inside.dtype = guards.dtype_of_guard(device, dtype.value_or(before_.dtype), enabled);
  inside.enabled = enabled && !guards.off && is_usable(device, inside.dtype);
  dtype_changed_ = inside.dtype != before_.dtype;

  const auto& data = guards.policy               ? guards.policy
                     : policy                    ? policy
                     : outer && outer->inherited ? outer->inherited
                                                 : unedited(BaseTable::standard);
  const WeightKeep::Until until = cache                         ? cache->until()
                                  : outer && outer->is_in_guard ? outer->keep.until
                                                                : WeightKeep::Until::region_ends;
  const WeightCasts* const casts = cache ? cache->casts() : outer ? outer->casts : nullptr;
  if (inside.enabled) prepare_region("AutocastGuard", *data, casts, device, inside.dtype);
  const PolicyData* const in_force = inside.enabled ? data.get() : nullptr;
  const OpRule* const rule = in_force && is_16_bit(inside.dtype) ? in_force->op_rule() : nullptr;
  const auto is_wanted = [&](const ThreadPolicy* one) {
    return one != nullptr && one->inherited == data && one->in_force[index].get() == in_force &&
           one->keep.until == until && one->casts == casts;
  };
  const auto begin_region = [&](ThreadPolicy& inner) {
    KeptWeights* const kept = shared_runtime().kept_weights.load(std::memory_order_acquire);
    inner.keep.region = own_region_ = kept == nullptr ? 0 : kept->begin_region();
  };
  // A spare node has nothing below it: it would hide what others, a profiler say, have put there.
  const bool may_be_spare = !outer && in_force && !rule && !c10::ThreadLocalDebugInfo::current() &&
                            this_backward_pass() == ThreadPolicy::no_backward_pass;
  SparePolicy* const spare = may_be_spare ? SparePolicy::of_this_thread() : nullptr;
  SparePolicy scope;
  if (is_wanted(outer)) {
    // Taken over, it does not hold for scripts yet: see Note [Derivatives of scripts]. In backward
    // it does not hold for sums: see Note [Sums of gradients].
    const bool holds = !in_force || (ScriptSwitch::has_scope() && !leaves_sums_alone(*outer));
    if (!holds) scope.policy = outer->shared_from_this();
  } else if (spare && spare->is_unshared() && is_wanted(spare->policy.get())) {
    begin_region(const_cast<ThreadPolicy&>(*spare->policy));
    scope = std::move(*spare);
  } else {
    auto inner = copy_of(outer);
    inner->inherited = data;
    inner->in_force[index] = in_force ? data : nullptr;
    inner->is_in_guard = true;
    inner->keep.until = until;
    inner->casts = casts;
    if (rule) op_rule_usage_ = inner->op_rule_usage = rule->make_usage(inner->op_rule_usage);
    if (inner->keep.region == 0) begin_region(*inner);
    scope.policy = std::move(inner);
  }
  policy_scope_.emplace(std::move(scope.policy), std::move(scope.node));

  inside.apply();
  if (cache_enabled) {
    // What torchamp's cache does not take is cast anew: LibTorch's would not see that it changes.
    const ThreadPolicy* const now = thread_policy();
    set_cast_cache(*cache_enabled && (now == nullptr || now->casts == nullptr));
  }
  // LibTorch's cache does not tell one 16-bit dtype from the other.
  if (nesting_.enter() > 1 && dtype_changed_) at::autocast::clear_cache();
}

TORCHAMP_BODY AutocastRegion::~AutocastRegion() {
  if (!policy_scope_->end_of("~AutocastGuard")) return;
  if (nesting_.leave("~AutocastGuard") == 0 || dtype_changed_) at::autocast::clear_cache();
  if (own_region_ != 0) kept_weights()->end_region(own_region_);
  before_.apply();
  at::autocast::set_autocast_cache_enabled(cache_enabled_before_);
  if (op_rule_usage_ != nullptr && std::uncaught_exceptions() == exceptions_) {
    op_rule_usage_->warn_if_unused();
  }
}

}  // namespace torchamp::detail
