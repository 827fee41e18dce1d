// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/host_values.h"
#include "torchamp/detail/tensors.h"

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

using StepCounters = std::vector<std::shared_ptr<StepCounter>>;

/// Makes `counters`, which are distinct, known: one read for each device.
inline void read_counters(const StepCounters& counters) {
  for (const auto& first : counters) {
    if (first->known()) continue;
    StepCounters here;
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
class CounterTable {
 public:
  bool empty() const { return counters_.empty(); }
  void clear() { counters_.clear(); }
  void erase(void* param) { counters_.erase(param); }

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
    StepCounters made;
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
    StepCounters unknown;
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
    std::shared_ptr<StepCounter> before;
    at::Device device;
    std::size_t steppers;
    std::shared_ptr<StepCounter> now;
  };

  static Share& share_of(std::vector<Share>& shares, const std::shared_ptr<StepCounter>& counter,
                         at::Device device) {
    for (Share& share : shares) {
      if (share.before == counter && share.device == device) return share;
    }
    shares.push_back({counter, device, 0, nullptr});
    return shares.back();
  }

  /// The one among `made` for this device and count; a new one if there is none.
  static std::shared_ptr<StepCounter> one_of(StepCounters& made, at::Device device, int64_t steps) {
    for (const auto& counter : made) {
      if (counter->at_most == steps && counter->value.device() == device) return counter;
    }
    made.push_back(std::make_shared<StepCounter>(device, steps));
    return made.back();
  }

  /// Gives parameters that step a counter apart from those that do not, and from those on other
  /// devices.
  StepCounters part(const std::vector<at::Tensor>& stepped) {
    std::vector<Share> shares;
    for (const at::Tensor& param : stepped) {
      ++share_of(shares, find(param), param.device()).steppers;
    }
    StepCounters distinct;
    for (Share& share : shares) {
      std::size_t users = 0;
      for (const auto& [param, counter] : counters_) users += counter == share.before ? 1 : 0;
      const bool as_it_is = share.before->value.device() == share.device && share.steppers == users;
      share.now = as_it_is ? share.before
                           : std::make_shared<StepCounter>(share.before->copy_to(share.device));
      distinct.push_back(share.now);
    }
    for (const at::Tensor& param : stepped) {
      auto& counter = counters_[param.unsafeGetTensorImpl()];
      counter = share_of(shares, counter, param.device()).now;
    }
    return distinct;
  }

  ska::flat_hash_map<void*, std::shared_ptr<StepCounter>> counters_;
};

/// What an iteration relies on that was captured while a first step could be still to come: once
/// it has come, there is less to do.
class FirstStepToCome final : public ReplayedState {
 public:
  explicit FirstStepToCome(std::shared_ptr<StepCounter> counter) : counter_(std::move(counter)) {}

  void settle() override {
    if (counter_->may_be_first() && counter_->value.item<float>() > 0.F) counter_->at_least = 1;
  }
  bool holds() override {
    counter_->learn();
    return counter_->may_be_first();
  }
  void note_replay() override {}
  bool wants_look() const override { return counter_->may_be_first() && !counter_->asked; }
  void look() override { counter_->ask(); }

 private:
  std::shared_ptr<StepCounter> counter_;
};

/// Whether the device of `tensor` has ATen's fused kernel `op`, "aten::_fused_sgd_", and it does
/// what is said of those in optim.h.
inline bool has_fused_kernel(const char* op, const at::Tensor& tensor) {
  if (!facts_of(tensor.device().type()).fused) return false;
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(
      c10::highestPriorityBackendTypeId(tensor.key_set()));
}

/// What a step needs on one device beside lists of tensors: the scale, the overflow flag, constants
/// (an op with a number of the host costs several times one with a tensor), and the step counters.
class StepScalars {
 public:
  explicit StepScalars(at::Device device)
      : device_(device),
        zero_(number(0.F)),
        one_(number(1.F)),
        flag_(number(0.F)),
        counts_by_sgd_(has_fused_kernel("aten::_fused_sgd_", one_)) {}

  at::Device device() const { return device_; }
  const at::Tensor& one() const { return one_; }

  /// On this device, as the fused kernels take them.
  const std::optional<at::Tensor>& grad_scale() const { return grad_scale_; }
  const std::optional<at::Tensor>& found_inf() const { return found_inf_; }

  /// A copy without the scale, for gradients that have been divided.
  StepScalars without_scale() const {
    StepScalars unscaled = *this;
    unscaled.grad_scale_.reset();
    return unscaled;
  }

  /// `first_only`: all that matters is whether a step is the first.
  void add_counter(std::shared_ptr<StepCounter> counter, bool first_only) {
    if (first_only && counts_by_sgd_) {
      if (!first_and_later_.defined()) {
        first_and_later_ = at::arange(2, one_.options()).flip(0);
        unused_ = at::zeros({2}, one_.options());
      }
      firsts_.push_back(std::move(counter));
      return;
    }
    values_.push_back(counter->value);
    ones_.push_back(one_);
    counters_.push_back(std::move(counter));
  }

  /// Takes the scale and the flag to this device, and all memory that counting takes. `is_exact`:
  /// the flag is 0 or 1.
  void prepare(const at::Tensor& grad_scale, const at::Tensor& found_inf, bool is_exact) {
    grad_scale_.reset();
    found_inf_.reset();
    if (grad_scale.defined()) grad_scale_ = to_device_async(device_, grad_scale);
    if (found_inf.defined()) {
      found_inf_ = to_device_async(device_, found_inf);
      // The kernels skip where the flag is exactly 1. A sum over devices or processes may be more.
      if (!is_exact) found_inf_ = at::ne_out(flag_, *found_inf_, zero_);
    }
    if (found_inf_ && !values_.empty() && !counts_by_sgd_) taken_ = at::rsub(*found_inf_, 1.);
    for (const auto& counter : firsts_) make_gates(*counter);
  }

  /// Counts the step, unless it is skipped: the kernels want to find it counted.
  void begin() {
    if (values_.empty()) return;
    if (!found_inf_) {
      at::_foreach_add_(values_, one_);
    } else if (!counts_by_sgd_) {
      at::_foreach_add_(values_, taken_);
    } else {  // SGD's kernel adds numbers to numbers, or does not, in one launch
      at::_fused_sgd_(values_, ones_, {}, /*weight_decay=*/0., /*momentum=*/0., /*lr=*/1.,
                      /*dampening=*/0., /*nesterov=*/false, /*maximize=*/true,
                      /*is_first_step=*/false, /*grad_scale=*/{}, found_inf_);
    }
  }

  void end() {
    note_first_steps();
    for (const auto* const counters : {&counters_, &firsts_}) {
      for (const auto& counter : *counters) {
        if (!found_inf_) ++counter->at_least;
        ++counter->at_most;
      }
    }
    for (const auto& counter : firsts_) follow_up(counter);
    grad_scale_.reset();
    found_inf_.reset();
    taken_ = at::Tensor();
  }

  /// Counts, on the host, a replayed step, which may have been skipped.
  void note_step() {
    for (const auto& counter : counters_) ++counter->at_most;
    for (const auto& counter : firsts_) ++counter->at_most;
  }

 private:
  at::Tensor number(float value) const {
    return at::full({}, value, at::device(device_).dtype(at::kFloat));
  }

  void make_gates(StepCounter& counter) const {
    counter.learn();
    if (!counter.gated || !counter.may_be_first()) return;
    counter.gates = found_inf_ ? at::maximum(counter.numbers, *found_inf_) : counter.numbers;
  }

  /// Has the device note a first step, unless it was skipped: SGD's kernel copies what it takes for
  /// gradients of a first step to what it takes for buffers.
  void note_first_steps() const {
    std::vector<at::Tensor> numbers;
    for (const auto& counter : firsts_) {
      if (counter->at_least == 0) numbers.push_back(counter->numbers);
    }
    if (numbers.empty()) return;
    const std::vector<at::Tensor> unused(numbers.size(), unused_);
    const std::vector<at::Tensor> now(numbers.size(), first_and_later_);
    at::_fused_sgd_(unused, now, numbers, /*weight_decay=*/0., /*momentum=*/1., /*lr=*/0.,
                    /*dampening=*/0., /*nesterov=*/false, /*maximize=*/false,
                    /*is_first_step=*/true, /*grad_scale=*/{}, found_inf_);
  }

  static void follow_up(const std::shared_ptr<StepCounter>& counter) {
    counter->gates = at::Tensor();
    if (!counter->may_be_first()) return;
    if (GraphBody* const body = GraphBody::current()) {
      body->states.push_back(std::shared_ptr<ReplayedState>(new FirstStepToCome(counter)));
    } else {
      counter->ask();
    }
  }

  at::Device device_;
  at::Tensor zero_, one_, flag_;
  at::Tensor taken_;                     // 1, or 0 if the step is skipped
  at::Tensor first_and_later_, unused_;  // 1 and 0, and two numbers
  bool counts_by_sgd_;
  std::optional<at::Tensor> grad_scale_, found_inf_;
  StepCounters counters_, firsts_;
  std::vector<at::Tensor> values_, ones_;  // one for each of counters_
};

struct StepBuffers;

/// What parameters have in common that one call steps.
struct StepKey : TensorKind {
  std::size_t group;
  std::shared_ptr<StepCounter> counter;  ///< for kernels that want one count for all parameters
  const StepMethod* method = nullptr;    ///< of weights that carry one
  bool operator==(const StepKey&) const = default;
};

/// The parameters that one call of a fused kernel steps: those of one group, device and dtype that
/// have a gradient. Kept from step to step; the gradients are not.
struct StepList : StepKey {
  std::size_t scalars = 0;  ///< the index of the device's StepScalars
  bool by_foreach = false;  ///< the device lacks Kernel::op
  std::vector<at::Tensor> params{}, grads{};
  std::vector<at::Tensor> counters{};            ///< one for each parameter, shared or not
  std::vector<std::vector<at::Tensor>> state{};  ///< by kind of state, then by parameter
  std::vector<at::Tensor> beside{};              ///< the weights, for `method`

  /// The learning rate where a captured step reads it (0-dim fp32), and what was last written
  /// there; undefined where steps are not captured.
  at::Tensor rate{};
  double written_rate = 0.;

  /// The list without its parameters.
  StepList emptied() const {
    StepList list{static_cast<const StepKey&>(*this)};
    list.scalars = scalars;
    list.by_foreach = by_foreach;
    list.rate = rate;
    list.written_rate = written_rate;
    list.state.resize(state.size());
    return list;
  }

  /// Adds what `of` makes of the tensors of the i-th parameter of `from`.
  template <class F>
  void add(const StepList& from, std::size_t i, const F& of) {
    params.push_back(of(from.params[i]));
    add_beside_param(from, i, of);
  }

  /// Adds what `of` makes of the tensors beside the i-th parameter: gradient, counter, state.
  template <class F>
  void add_beside_param(const StepList& from, std::size_t i, const F& of) {
    grads.push_back(of(from.grads[i]));
    if (!from.counters.empty()) counters.push_back(from.counters[i]);
    for (std::size_t k = 0; k < state.size(); ++k) state[k].push_back(of(from.state[k][i]));
  }
};

/// What distinguishes one fused optimizer from another:
///
///     LibTorch           the class of its counterpart there, whose constructor checks the options
///                        and which reads and writes archives
///     Options, State     the types that go with that
///     name               for error texts
///     apart              whether a call needs parameters with one common count of steps
///     kinds(options)     how many kinds of state tensors a parameter has
///     tensor(state, k)   the one of kind k; that of kind 0 always, if undefined
///     initial(k, …)      what it starts as
///     counted(options)   whether steps are counted on the device
///     steps, set_steps   the count as LibTorch's state holds it, for parameters that are counted
///     step(options, …)   the step of all parameters of a list
///     counts_first_only  if there and true, all that step() asks of list.counter is
///     may_be_first(),
///                        gates and whether at_least and at_most are 0
///     asks_counter(options)
///                        if there, whether step() asks list.counter at all; or else it may
///     op                 if there, the op of ATen's that step() calls; where the device lacks it,
///                        list.by_foreach is true, and all parameters of a list have one count.
///                        step() may then be called with parts of parameters
///
/// step() divides the gradients by scalars.grad_scale(), if it is there, and changes nothing where
/// scalars.found_inf() is there and 1. The counters count the step already. It never reads the
/// device. list.rate, where defined, takes the place of the options' learning rate. ATen's fused
/// ops do all that; a kernel that ATen lacks is made from at::_foreach_ ops.
template <class K>
concept OptimizerKernel = std::derived_from<typename K::LibTorch, torch::optim::Optimizer> &&
    requires(const typename K::Options& options, typename K::State& state, const StepList& list,
             const StepScalars& scalars, const at::Tensor& param) {
  { K::name } -> std::convertible_to<const char*>;
  { K::apart } -> std::convertible_to<bool>;
  { K::kinds(options) } -> std::same_as<std::size_t>;
  { K::tensor(state, std::size_t{}) } -> std::same_as<at::Tensor&>;
  { K::initial(std::size_t{}, param, options) } -> std::same_as<at::Tensor>;
  { K::counted(options) } -> std::same_as<bool>;
  { K::steps(state) } -> std::same_as<int64_t>;
  K::set_steps(state, int64_t{});
  K::step(options, list, scalars);
};

/// Whether a step of `Kernel` does to a part of a parameter what it would do to it in the whole.
template <class Kernel>
inline constexpr bool may_step_parts = requires {
  Kernel::op;
};

/// Kernel::step with the options of a group, for what is the same for all kernels.
struct KernelStep {
  c10::function_ref<void(const StepList&, const StepScalars&)> step;
  bool takes_parts;  ///< whether it does to a part of a parameter what it would do to the whole
  void operator()(const StepList& list, const StepScalars& scalars) const { step(list, scalars); }
};

/// How fused optimizers step weights that are not stepped as they are; see Note [Weights that carry
/// something]. Weights with one method are in lists of their own.
class StepMethod {
 public:
  StepMethod() = default;
  StepMethod(const StepMethod&) = delete;
  StepMethod& operator=(const StepMethod&) = delete;

  /// Throws where `weight` cannot be stepped with `gradient`.
  virtual void check(const at::Tensor& weight, const at::Tensor& gradient,
                     ErrorPlace where) const = 0;
  /// What a list keeps beside the weight.
  virtual at::Tensor beside(const at::Tensor& weight) const = 0;
  /// Whether check() would pass, and `beside` still is what is beside the weight.
  virtual bool holds(const at::Tensor& weight, const at::Tensor& gradient,
                     const at::Tensor& beside) const = 0;
  /// What the weight stands for, of its layout: a state starts from it.
  virtual at::Tensor master(const at::Tensor& weight) const = 0;

  /// What step() wants of `buffers`. `drops`: the gradients are dropped after the step.
  virtual void want(StepBuffers& buffers, const StepList& list, const StepScalars& scalars,
                    bool takes_parts, bool drops) const = 0;
  virtual void step(const KernelStep& kernel, const StepList& list, const StepScalars& scalars,
                    bool drops, StepBuffers& buffers) const = 0;
  /// After step(), with the weight's new version.
  virtual void note_stepped(const at::Tensor& weight) const = 0;

 protected:
  ~StepMethod() = default;
};

}  // namespace torchamp::detail
