// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/optim/step_counter.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Maps parameters to the counters of their steps. Parameters that were always stepped together
/// share a counter. If only some of them have gradients in a step, these get a copy of it.
class StepCounters {
 public:
  /// Parameters with equal values of this may share a counter.
  struct Counted {
    std::shared_ptr<StepCounter> before;
    int64_t steps;  ///< of parameters without a counter
    at::Device device;
    bool operator==(const Counted&) const = default;
  };
  struct Share : Counted {
    std::vector<void*> params{};
  };

  /// Null if there is none.
  std::shared_ptr<StepCounter> of(void* param) const {
    const auto found = counters_.find(param);
    return found == counters_.end() ? nullptr : found->second;
  }

  /// Gives the parameters of `share` their own counter on their device, and returns it. If they
  /// already have their own counter, it stays: graphs may use its memory.
  std::shared_ptr<StepCounter> count_apart(const Share& share) {
    std::shared_ptr<StepCounter> counter = share.before;
    std::size_t users = 0;
    for (const auto& [param, other] : counters_) users += other == counter ? 1 : 0;
    if (!counter) {
      counter = std::make_shared<StepCounter>(share.device, share.steps);
    } else if (users != share.params.size() || counter->value.device() != share.device) {
      counter = std::make_shared<StepCounter>(counter->copy_to(share.device));
    }
    for (void* const param : share.params) counters_[param] = counter;
    return counter;
  }

  /// Calls f(parameter, count) for each counted parameter. Synchronises for each counter whose
  /// value only the device has.
  template <class F>
  void read(const F& f) const {
    for (const auto& [param, counter] : counters_) {
      if (counter->at_least != counter->at_most) {
        counter->at_least = counter->at_most = counter->value.template item<int64_t>();
      }
      f(param, counter->at_most);
    }
  }

  void forget(void* param) { counters_.erase(param); }
  void clear() { counters_.clear(); }

 private:
  std::unordered_map<void*, std::shared_ptr<StepCounter>> counters_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
