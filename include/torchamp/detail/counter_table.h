// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/step_counter.h"

namespace torchamp::detail {

/// Which parameter's steps are counted where. Parameters that were always stepped together share a
/// counter. Where some of them lack a gradient that others have, those that step get a copy of it.
class CounterTable {
 public:
  bool empty() const { return counters_.empty(); }
  void clear() { counters_.clear(); }

  /// Null if the parameter's steps are not counted.
  std::shared_ptr<StepCounter> find(const at::Tensor& param) const {
    return find(param.unsafeGetTensorImpl());
  }
  std::shared_ptr<StepCounter> find(void* param) const {
    const auto counter = counters_.find(param);
    return counter == counters_.end() ? nullptr : counter->second;
  }

  /// Gives each of `stepped` a counter on its device that no other parameter shares, and returns
  /// these counters. One that is new starts from `steps_so_far(param)`.
  template <class StepsSoFar>
  StepCounters assign(const std::vector<at::Tensor>& stepped, const StepsSoFar& steps_so_far) {
    std::map<std::pair<int64_t, std::string>, std::shared_ptr<StepCounter>> made;
    std::map<Key, std::size_t> steppers;
    for (const at::Tensor& param : stepped) {
      auto& counter = counters_[param.unsafeGetTensorImpl()];
      if (!counter) {
        const int64_t steps = steps_so_far(param);
        auto& shared = made[{steps, param.device().str()}];
        if (!shared) shared = std::make_shared<StepCounter>(param.device(), steps);
        counter = shared;
      }
      ++steppers[key(counter, param)];
    }
    std::map<const void*, std::size_t> users;
    for (const auto& [param, counter] : counters_) ++users[counter.get()];
    StepCounters distinct;
    std::map<Key, std::shared_ptr<StepCounter>> own;
    for (const at::Tensor& param : stepped) {
      auto& counter = counters_[param.unsafeGetTensorImpl()];
      auto& chosen = own[key(counter, param)];
      if (!chosen) {
        const bool as_it_is = counter->value.device() == param.device() &&
                              steppers[key(counter, param)] == users[counter.get()];
        chosen =
            as_it_is ? counter : std::make_shared<StepCounter>(counter->copy_to(param.device()));
        distinct.push_back(chosen);
      }
      counter = chosen;
    }
    return distinct;
  }

  /// Makes all counts known to the host and calls f(parameter, count) for each. Reads each device
  /// once at most.
  template <class F>
  void read(const F& f) const {
    StepCounters unknown;
    for (const auto& [param, counter] : counters_) {
      if (!counter->known()) unknown.push_back(counter);
    }
    read_counters(std::move(unknown));
    for (const auto& [param, counter] : counters_) f(param, counter->at_most);
  }

 private:
  using Key = std::pair<const void*, std::string>;  // a counter and a device
  static Key key(const std::shared_ptr<StepCounter>& counter, const at::Tensor& param) {
    return {counter.get(), param.device().str()};
  }

  ska::flat_hash_map<void*, std::shared_ptr<StepCounter>> counters_;
};

}  // namespace torchamp::detail
