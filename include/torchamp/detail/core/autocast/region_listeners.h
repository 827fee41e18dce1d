// SPDX-License-Identifier: BSD-3-Clause
// What extras have to be told of a region.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace torchamp::detail {

/// Tells the listeners of regions of one region's begin and end: KeptWeights, of the outermost one,
/// and the OpRule of its policy. (A PolicyScope tells the ScriptSwitch.)
class RegionListeners {
 public:
  /// `inner` will be in force; `rule`, which may be null, is that of its policy for the region.
  void begin(ThreadPolicy& inner, const OpRule* rule) {
    if (rule != nullptr) usage_ = inner.op_rule_usage = rule->make_usage(inner.op_rule_usage);
    if (inner.keep.region != 0) return;
    KeptWeights* const kept = kept_weights();
    if (kept != nullptr) inner.keep.region = kept_region_ = kept->begin_region();
  }

  /// The region ends, and its cache of casts has been cleared.
  void end_kept_region() const {
    if (kept_region_ != 0) kept_weights()->end_region(kept_region_);
  }
  /// The state around the region is in force again.
  void end_op_rule() const {
    if (usage_ != nullptr && std::uncaught_exceptions() == exceptions_) usage_->warn_if_unused();
  }

 private:
  std::uint64_t kept_region_ = 0;       // that this region has begun
  std::shared_ptr<OpRuleUsage> usage_;  // of this region's policy; null without a rule
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace torchamp::detail
