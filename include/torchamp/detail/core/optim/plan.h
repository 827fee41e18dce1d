// SPDX-License-Identifier: BSD-3-Clause
// How a fused optimizer steps: lists of parameters by device, dtype and step count.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/optim/check_parameters.h"
#include "torchamp/detail/core/optim/conditional_add.h"
#include "torchamp/detail/core/optim/device_scalars.h"
#include "torchamp/detail/core/optim/kernel.h"
#include "torchamp/detail/core/optim/plan_slot.h"
#include "torchamp/detail/core/optim/step_counters.h"
#include "torchamp/detail/core/optim/step_list.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [The plan of a fused step]
// The arguments of the kernels (lists of parameters, states and counters by group, device and
// dtype) are made once and kept. Each step walks over the parameters, collects the gradients, and
// checks whether the plan is still valid: the same parameters, the same parameters with gradients,
// the layouts for which the states were made, the same kinds of state, the same states. (LibTorch
// returns a reference to the map of states, so a program may clear it or replace states.) If the
// plan is not valid, a new plan is made from the groups, the states and the counters: nothing else
// outlives a plan. A parameter keeps its counter while it has no gradient. A state that is not the
// plan's holds its own number of steps.

/// The arguments with which a step of `Kernel` calls the fused kernels.
template <OptimizerKernel Kernel>
class StepPlan {
  using Seen = SeenState<Kernel>;
  using Slot = PlanSlot<Kernel>;

 public:
  using Options = typename Kernel::Options;
  using State = typename Kernel::State;

  // Slots and lists point into the plan.
  StepPlan() = default;
  StepPlan(StepPlan&&) noexcept = default;
  StepPlan& operator=(StepPlan&&) noexcept = default;
  ~StepPlan() = default;

  /// False if the plan is not valid for `groups` and `states`.
  bool collect_gradients(const ParamGroups& groups, const ParamStates& states) {
    for (StepList& list : lists_) list.grads.clear();
    return all_of(groups, states, [](const Slot& slot, const at::Tensor& param) {
      const at::Tensor& grad = gradient_of(param);
      if (grad.defined() != (slot.list != nullptr)) return false;
      return !grad.defined() || slot.add_gradient(param, grad);
    });
  }

  /// Makes a plan for `groups`, in place of a plan that is not valid, and keeps the counts. Creates
  /// missing states, and converts the others to their parameters' device, dtype and layout. Throws
  /// for parameters that a fused step cannot take; then there is no plan, and no gradient is held.
  void make(const ParamGroups& groups, const Options& defaults, ParamStates& states) {
    drop_counts(states);
    drop_lists();
    check_parameters<Kernel>(groups, states);
    std::vector<GroupUse> uses(groups.size());
    std::size_t count = 0;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      uses[g] = use_of<Kernel>(groups, g);
      count += groups[g].params().size();
    }
    count_steps(groups, uses, states);
    std::vector<Slot> slots(count);
    auto slot = slots.begin();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (const at::Tensor& param : groups[g].params()) {
        slot->param = param.unsafeGetTensorImpl();
        if (gradient_of(param).defined()) {
          slot->list = &add_parameter(g, uses[g], param, defaults, states);
          slot->place = slot->list->params.size() - 1;
        }
        ++slot;
      }
    }
    identity_ = std::make_shared<char>();
    uses_ = std::move(uses);
    slots_ = std::move(slots);
    note_states(states);
  }

  /// Records the present states and their numbers of steps.
  void note_states(const ParamStates& states) {
    for (Slot& slot : slots_) slot.seen = Seen::of(slot.param, states);
  }

  /// Drops the counts of parameters whose states have changed since note_states(). If there are
  /// any, the plan is not valid.
  void drop_counts(const ParamStates& states) {
    for (Slot& slot : slots_) {
      if (!slot.seen.state || Seen::of(slot.param, states) == slot.seen) continue;
      counters_.forget(slot.param);
      drop_lists();
    }
  }

  /// Drops everything except the counts: the plan is not valid.
  void drop_lists() {
    uses_.clear();
    lists_.clear();
    scalars_.clear();
    identity_.reset();
  }

  /// Drops everything.
  void drop() {
    drop_lists();
    slots_.clear();
    counters_.clear();
  }

  /// Calls f(parameter, count) for each counted parameter. Synchronises for each counter whose
  /// value only the device has.
  template <class F>
  void read_counts(const F& f) const {
    counters_.read(f);
  }

  /// Whether there is a plan for these groups and states. Gradients do not matter.
  bool is_for(const ParamGroups& groups, const ParamStates& states) const {
    return !lists_.empty() && all_of(groups, states, [](const Slot& slot, const at::Tensor&) {
      return !slot.list || !slot.seen.state || slot.has_tensors();
    });
  }

  /// Expires when captured steps of this plan become invalid.
  std::weak_ptr<const void> identity() const { return identity_; }
  /// Makes captured steps of this plan invalid: identity() expires.
  void outdate_captures() { identity_ = std::make_shared<char>(); }

  /// Makes the steps read their learning rates from the device, and writes changed rates there.
  void write_rates(const ParamGroups& groups) {
    for (StepList& list : lists_) {
      const double rate = options_of<Kernel>(groups[list.group], list.group).lr();
      if (!list.rate.defined()) {
        list.rate = at::full({}, rate, at::device(list.device).dtype(at::kFloat));
      } else if (rate != list.written_rate) {
        list.rate.fill_(rate);
        if (!list.device.is_cpu()) {
          // The tensor may come from a capture's stream, and is written on this stream: its memory
          // must not be reused before the write has run.
          list.rate.record_stream(
              c10::impl::VirtualGuardImpl(list.device.type()).getStream(list.device));
        }
      }
      list.written_rate = rate;
    }
  }

  /// Counts a replayed step, which the device has already counted: widens the host's bounds of the
  /// count.
  void note_step() {
    for (DeviceScalars& scalars : scalars_) scalars.count_replayed();
  }

  /// Steps with the collected gradients. Allocates memory first: if it runs out, no step is
  /// counted, and no list is stepped. (Single lists need more memory later only if a kernel is
  /// missing, or if masters on a device are split.)
  void run(const ParamGroups& groups, const at::Tensor& grad_scale, const at::Tensor& found_inf,
           bool is_exact) {
    for (DeviceScalars& scalars : scalars_) scalars.prepare(grad_scale, found_inf, is_exact);
    for (StepList& list : lists_) {
      if (list.method) list.buffer = list.method->buffer(list);
    }
    for (DeviceScalars& scalars : scalars_) scalars.count_before_kernels();
    for (const StepList& list : lists_) run_kernel(groups, list);
    for (DeviceScalars& scalars : scalars_) {
      scalars.count_after_kernels();
      scalars.forget_step();
    }
    for (StepList& list : lists_) note_stepped(list);
  }

 private:
  static void run_kernel(const ParamGroups& groups, const StepList& list) {
    const Options& options = options_of<Kernel>(groups[list.group], list.group);
    const auto step = [&](const StepList& part, const StepScalars& scalars) {
      Kernel::step(options, part, scalars);
    };
    list.method ? list.method->step(step, list) : step(list, *list.scalars);
  }

  /// Drops the gradients, and reports the write of the parameters to autograd and to caches of
  /// weight casts, because kernels do not.
  static void note_stepped(StepList& list) {
    list.grads.clear();
    list.buffer.reset();
    for (const at::Tensor& param : list.params) {
      param.unsafeGetTensorImpl()->bump_version();
      if (list.method) list.method->note_stepped(param);
    }
  }

  /// Counts the steps of all parameters with a gradient whose options require it. Call it before
  /// add_parameter(), whose lists hold the counters, and after drop_counts(), so that all counters
  /// are valid.
  void count_steps(const ParamGroups& groups, const std::vector<GroupUse>& uses,
                   const ParamStates& states) {
    std::vector<StepCounters::Share> shares;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (const at::Tensor& param : groups[g].params()) {
        void* const key = param.unsafeGetTensorImpl();
        if (!uses[g].counted || !gradient_of(param).defined()) continue;
        const auto counter = counters_.of(key);
        const int64_t steps = counter ? 0 : Seen::of(key, states).steps;
        group_of(shares, StepCounters::Counted{counter, steps, param.device()})
            .params.push_back(key);
      }
    }
    using Asked = DeviceScalars::Asked;
    constexpr Asked asked = Kernel::counts_first_only ? Asked::is_first : Asked::number;
    for (const StepCounters::Share& share : shares) {
      scalars_of(share.device).add_counter(counters_.count_apart(share), asked);
    }
  }

  /// Whether the groups and parameters are the plan's, the states are unchanged since
  /// note_states(), and `holds(slot, param)` is true for each parameter.
  template <class Holds>
  bool all_of(const ParamGroups& groups, const ParamStates& states, const Holds& holds) const {
    if (uses_.size() != groups.size()) return false;
    auto slot = slots_.cbegin();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (!(uses_[g] == use_of<Kernel>(groups, g))) return false;
      for (const at::Tensor& param : groups[g].params()) {
        if (slot == slots_.cend() || slot->param != param.unsafeGetTensorImpl()) return false;
        const bool has_state = slot->seen.state != nullptr;
        if (has_state && !(Seen::of(slot->param, states) == slot->seen)) return false;
        if (!holds(*slot, param)) return false;
        ++slot;
      }
    }
    return slot == slots_.cend();
  }

  DeviceScalars& scalars_of(at::Device device) {
    for (DeviceScalars& scalars : scalars_) {
      if (scalars.device() == device) return scalars;
    }
    return scalars_.emplace_back(device);
  }

  /// Adds a parameter to its list, which may be new, and returns the list.
  StepList& add_parameter(std::size_t group, const GroupUse& use, const at::Tensor& param,
                          const Options& defaults, ParamStates& states) {
    void* const key = param.unsafeGetTensorImpl();
    const auto counter = use.counted ? counters_.of(key) : nullptr;
    constexpr bool has_op = Kernel::op != nullptr;
    const bool is_lacked = has_op && !has_fused_kernel(Kernel::op, param);
    const bool is_apart = (Kernel::apart || !has_op || is_lacked) && use.uses_counter;
    StepList& list = group_of(lists_, StepKey{TensorKind::of(param), group,
                                              is_apart ? counter : nullptr, step_method_of(param)});
    if (list.params.empty()) {
      list.scalars = &scalars_of(param.device());
      list.lacks_op = is_lacked;
      list.takes_parts = Kernel::elementwise;
      list.state.resize(use.kinds);
    }
    list.params.push_back(param);
    // torch::optim::Optimizer may have added its group, without calling note_weights().
    if (WeightMeta* const meta = weight_meta_of(param)) meta->has_optimizer = true;
    if (counter) list.counters.push_back(counter->value);
    for (std::size_t k = 0; k < use.kinds; ++k) {
      auto& state = states[key];
      if (!state) state = std::make_unique<State>();
      at::Tensor& tensor = Kernel::tensor(static_cast<State&>(*state), k);
      tensor = tensor.defined()
                   ? fitted(tensor, param)
                   : Kernel::initial(k, list.method ? list.method->master(param) : param, defaults);
      list.state[k].push_back(tensor);
    }
    return list;
  }

  std::vector<Slot> slots_;     ///< for each parameter of each group, in order
  std::vector<GroupUse> uses_;  ///< for each group
  std::list<StepList> lists_;
  std::list<DeviceScalars> scalars_;
  StepCounters counters_;
  std::shared_ptr<const void> identity_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
