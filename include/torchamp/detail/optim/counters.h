// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torchamp/detail/host_values.h"

namespace torchamp::detail {

/// How many steps some parameters of one device have taken. Only the device knows, since only the
/// device knows which steps were skipped; the host knows bounds, which are equal as long as no step
/// could be skipped.
struct StepCounter {
  StepCounter(at::Device device, int64_t steps)
      : numbers(at::full({2}, static_cast<float>(steps), at::device(device).dtype(at::kFloat))),
        value(numbers.select(0, 0)),
        at_least(steps),
        at_most(steps) {
    numbers.select(0, 1).fill_(steps == 0 ? 1. : 0.);
  }

  bool known() const { return at_least == at_most; }

  /// The same count, for parameters on `device` whose steps are counted apart from here on.
  StepCounter copy_to(at::Device device) const {
    StepCounter copy(*this);
    copy.numbers = numbers.to(device, numbers.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    copy.value = copy.numbers.select(0, 0);
    copy.mirror = {};
    copy.asked = false;
    return copy;
  }

  /// Whether only the device knows if a step was made at all.
  bool may_be_first() const { return at_least == 0 && at_most > 0; }

  /// Has the host learn, some time later, whether there was one. Waits for nobody.
  void ask() {
    if (asked || !may_be_first()) return;
    mirror.send(value, not_here_yet);
    asked = true;
  }
  /// Takes the answer, if it is there, and one that can be had at once.
  void learn() {
    if (!may_be_first()) return;
    float steps = 0.F;
    if (value.is_cpu()) {
      steps = *value.const_data_ptr<float>();
    } else if (asked && mirror[0] != not_here_yet) {
      steps = mirror[0];
      asked = false;
    }
    if (steps > 0.F) at_least = 1;
  }

  at::Tensor numbers;  ///< the count, and 1 as long as it is 0, where someone keeps that
  at::Tensor value;    ///< the count, 0-dim fp32
  int64_t at_least, at_most;

  bool gated = false;   ///< gates are asked for
  at::Tensor gates{};   ///< see Note [First steps of SGD]
  HostMirror mirror{};  ///< of the count
  bool asked = false;   ///< and it is under way

 private:
  static constexpr float not_here_yet = -1.F;
};

template <class Counter>
using Counters = std::vector<std::shared_ptr<Counter>>;
using StepCounters = Counters<StepCounter>;

/// Makes `counters`, which are distinct, known: one read for each device.
template <class Counter>
void read_counters(const Counters<Counter>& counters) {
  for (const auto& first : counters) {
    if (first->known()) continue;
    Counters<Counter> here;
    std::vector<at::Tensor> values;
    for (const auto& counter : counters) {
      if (counter->known() || counter->value.device() != first->value.device()) continue;
      here.push_back(counter);
      values.push_back(counter->value);
    }
    const at::Tensor steps = at::stack(values).to(at::kCPU, at::kLong);
    const auto* next = steps.const_data_ptr<int64_t>();
    for (const auto& counter : here) counter->at_least = counter->at_most = *next++;
  }
}

/// Which parameter's steps are counted where. Parameters that were always stepped together share a
/// counter. Once only some of them have gradients, these get a copy of it.
/// `Counter` is StepCounter: a template for programs without a fused optimizer, which need not
/// compile it (0.2 % of what <torch/torch.h> takes).
template <class Counter>
class CounterTable {
 public:
  bool empty() const { return counters_.empty(); }
  void clear() { counters_.clear(); }
  void erase(void* param) { counters_.erase(param); }

  /// Null if the parameter's steps are not counted.
  std::shared_ptr<Counter> find(const at::Tensor& param) const {
    return find(param.unsafeGetTensorImpl());
  }
  std::shared_ptr<Counter> find(void* param) const {
    const auto counter = counters_.find(param);
    return counter == counters_.end() ? nullptr : counter->second;
  }

  /// Gives each of `stepped` a counter on its device that no other parameter shares, and returns
  /// these counters. One that is new starts from `steps_so_far(param)`.
  template <class StepsSoFar>
  Counters<Counter> assign(const std::vector<at::Tensor>& stepped, const StepsSoFar& steps_so_far) {
    Counters<Counter> made;
    for (const at::Tensor& param : stepped) {
      auto& counter = counters_[param.unsafeGetTensorImpl()];
      if (!counter) counter = one_of(made, param.device(), steps_so_far(param));
    }
    return part(stepped);
  }

  /// Makes all counts known to the host and calls f(parameter, count) for each. Reads each device
  /// once at most.
  template <class F>
  void read(const F& f) const {
    Counters<Counter> unknown;
    for (const auto& [param, counter] : counters_) {
      bool is_new = !counter->known();
      for (const auto& other : unknown) is_new = is_new && other != counter;
      if (is_new) unknown.push_back(counter);
    }
    read_counters(unknown);
    for (const auto& [param, counter] : counters_) f(param, counter->at_most);
  }

 private:
  /// Parameters on one device that step and were counted by one counter until now. There are few of
  /// these, however many parameters.
  struct Share {
    std::shared_ptr<Counter> before;
    at::Device device;
    std::size_t steppers;
    std::shared_ptr<Counter> now;
  };

  static Share& share_of(std::vector<Share>& shares, const std::shared_ptr<Counter>& counter,
                         at::Device device) {
    for (Share& share : shares) {
      if (share.before == counter && share.device == device) return share;
    }
    shares.push_back({counter, device, 0, nullptr});
    return shares.back();
  }

  /// The one among `made` for this device and count; a new one if there is none.
  static std::shared_ptr<Counter> one_of(Counters<Counter>& made, at::Device device,
                                         int64_t steps) {
    for (const auto& counter : made) {
      if (counter->at_most == steps && counter->value.device() == device) return counter;
    }
    made.push_back(std::make_shared<Counter>(device, steps));
    return made.back();
  }

  /// Gives parameters that step a counter apart from those that do not, and from those on other
  /// devices.
  Counters<Counter> part(const std::vector<at::Tensor>& stepped) {
    std::vector<Share> shares;
    for (const at::Tensor& param : stepped) {
      ++share_of(shares, find(param), param.device()).steppers;
    }
    Counters<Counter> distinct;
    for (Share& share : shares) {
      std::size_t users = 0;
      for (const auto& [param, counter] : counters_) users += counter == share.before ? 1 : 0;
      const bool as_it_is = share.before->value.device() == share.device && share.steppers == users;
      share.now =
          as_it_is ? share.before : std::make_shared<Counter>(share.before->copy_to(share.device));
      distinct.push_back(share.now);
    }
    for (const at::Tensor& param : stepped) {
      auto& counter = counters_[param.unsafeGetTensorImpl()];
      counter = share_of(shares, counter, param.device()).now;
    }
    return distinct;
  }

  ska::flat_hash_map<void*, std::shared_ptr<Counter>> counters_;
};

}  // namespace torchamp::detail
