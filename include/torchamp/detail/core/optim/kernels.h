// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"

namespace torchamp::detail {

/// How many steps some parameters of one device have taken. Only the device knows, since only the
/// device knows which steps were skipped; the host knows bounds, which are equal as long as no step
/// could be skipped.
struct StepCounter final : ReplayedState {
  [[gnu::cold]] StepCounter(at::Device device, int64_t steps)
      : numbers(at::full({2}, static_cast<float>(steps), at::device(device).dtype(at::kFloat))),
        value(numbers.select(0, 0)),
        at_least(steps),
        at_most(steps) {
    numbers.select(0, 1).fill_(steps == 0 ? 1. : 0.);
  }

  /// The same count, for parameters on `device` whose steps are counted apart from here on.
  [[gnu::cold]] StepCounter copy_to(at::Device device) const {
    StepCounter copy(device, at_most);
    copy.numbers.copy_(numbers);
    copy.at_least = at_least;
    return copy;
  }

  /// Counts a step; not `surely`: one that may have been skipped, as a replayed one may.
  void count(bool surely) {
    if (surely) ++at_least;
    ++at_most;
  }

  /// Whether only the device knows if a step was made at all.
  bool may_be_first() const { return at_least == 0 && at_most > 0; }

  /// Takes what the host has learned of that, or can at once.
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

  // What was captured while a first step could be still to come holds until it has: then there is
  // less to do.
  [[gnu::cold]] void settle() override {
    if (may_be_first() && value.item<float>() > 0.F) at_least = 1;
  }
  [[gnu::cold]] bool holds() override {
    learn();
    return may_be_first();
  }
  bool wants_look() const override { return may_be_first() && !asked; }
  /// Has the host learn, some time later, whether there was one. Waits for nobody.
  [[gnu::cold]] void look() override {
    if (!wants_look()) return;
    mirror.send(value, not_here_yet);
    asked = true;
  }

  at::Tensor numbers;  ///< the count, and 1 as long as it is 0, where someone keeps that
  at::Tensor value;    ///< the count, 0-dim fp32
  int64_t at_least, at_most;

  HostMirror mirror{};  ///< of the count
  bool asked = false;   ///< and it is under way

 private:
  static constexpr float not_here_yet = -1.F;
};

/// Whether the device of `tensor` has ATen's fused kernel `op`, "aten::_fused_sgd_", and it does
/// what is said of those in optim.h.
inline bool has_fused_kernel(const char* op, const at::Tensor& tensor) {
  if (!facts_of(tensor.device().type()).fused) return false;
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(
      c10::highestPriorityBackendTypeId(tensor.key_set()));
}

/// The scale and the overflow flag of a step on a device, as the fused kernels take them.
class StepScalars {
 public:
  const std::optional<at::Tensor>& grad_scale() const { return grad_scale_; }
  const std::optional<at::Tensor>& found_inf() const { return found_inf_; }

  /// A copy without the scale, for gradients that have been divided.
  StepScalars without_scale() const {
    StepScalars unscaled = *this;
    unscaled.grad_scale_.reset();
    return unscaled;
  }

 protected:
  std::optional<at::Tensor> grad_scale_, found_inf_;
};

/// What a step needs on one device beside lists of tensors: the scale, the overflow flag, constants
/// (an op with a number of the host costs several times one with a tensor), and the step counters.
class DeviceScalars : public StepScalars {
 public:
  [[gnu::cold]] explicit DeviceScalars(at::Device device)
      : one_(at::full({}, 1.F, at::device(device).dtype(at::kFloat))),
        flag_(at::empty_like(one_)),
        counts_by_sgd_(has_fused_kernel("aten::_fused_sgd_", one_)) {}

  at::Device device() const { return one_.device(); }

  /// `first_only`: all that matters is whether a step is the first; so of all counters or of none.
  [[gnu::cold]] void add_counter(std::shared_ptr<StepCounter> counter, bool first_only) {
    if (!first_only) {
      values_.push_back(counter->value);
      ones_.push_back(one_);
    } else if (!noted_.defined()) {
      noted_ = StepCounter(device(), 1).numbers;
    }
    counters_.push_back(std::move(counter));
  }

  /// Memory for a step by pieces, until end(). Lists of one dtype, which are stepped one after the
  /// other, share it.
  [[gnu::cold]] at::Tensor buffer(at::ScalarType dtype, int64_t elements) {
    for (const at::Tensor& buffer : buffers_) {
      if (buffer.scalar_type() == dtype && buffer.numel() >= elements) {
        return part_of(buffer, 0, elements);
      }
    }
    return buffers_.emplace_back(at::empty({elements}, one_.options().dtype(dtype)));
  }

  /// Takes the scale and the flag to this device, and all memory that counting takes. `is_exact`:
  /// the flag is 0 or 1.
  void prepare(const at::Tensor& grad_scale, const at::Tensor& found_inf, bool is_exact) {
    grad_scale_.reset();
    found_inf_.reset();
    buffers_.clear();  // of a step that has thrown
    if (grad_scale.defined()) grad_scale_ = to_device_async(device(), grad_scale);
    if (found_inf.defined()) {
      found_inf_ = to_device_async(device(), found_inf);
      // The kernels skip where the flag is exactly 1. A sum over devices or processes may be more.
      if (!is_exact) found_inf_ = at::ne_out(flag_, *found_inf_, 0.);
    }
    if (!noted_.defined()) return;
    for (const auto& counter : counters_) counter->learn();
  }

  /// Counts the step, unless it is skipped: the kernels want to find it counted.
  void begin() {
    if (values_.empty()) return;
    if (found_inf_ && counts_by_sgd_) {  // it adds numbers to numbers, or does not, in one launch
      at::_fused_sgd_(values_, ones_, {}, /*weight_decay=*/0., /*momentum=*/0., /*lr=*/1.,
                      /*dampening=*/0., /*nesterov=*/false, /*maximize=*/true,
                      /*is_first_step=*/false, /*grad_scale=*/{}, found_inf_);
      return;
    }
    at::_foreach_add_(values_, one_);
    if (found_inf_) at::_foreach_add_(values_, *found_inf_, /*alpha=*/-1.);
  }

  void end() {
    for (const auto& counter : counters_) {
      if (noted_.defined() && counter->at_least == 0) {
        at::Tensor numbers = counter->numbers;
        found_inf_ ? at::lerp_out(numbers, noted_, numbers, *found_inf_) : numbers.copy_(noted_);
      }
      counter->count(/*surely=*/!found_inf_);
    }
    for (const auto& counter : counters_) {
      if (!noted_.defined() || !counter->may_be_first()) continue;
      if (GraphBody* const body = GraphBody::current()) {
        body->states.push_back(counter);
      } else {
        counter->look();
      }
    }
    grad_scale_.reset();
    found_inf_.reset();
    buffers_.clear();
  }

  /// Counts a step that was replayed.
  void count_replayed() {
    for (const auto& counter : counters_) counter->count(/*surely=*/false);
  }

 private:
  at::Tensor one_, flag_;
  at::Tensor noted_;  // 1 and 0: a counter's numbers after a step; undefined unless first_only
  bool counts_by_sgd_;
  std::vector<std::shared_ptr<StepCounter>> counters_;
  std::vector<at::Tensor> values_, ones_;  // one for each of counters_, or none if first_only
  std::vector<at::Tensor> buffers_;
};

/// What parameters have in common that one call steps.
struct StepKey : TensorKind {
  std::size_t group;
  std::shared_ptr<StepCounter> counter;  ///< for kernels that want one count for all parameters
  const StepMethod* method = nullptr;    ///< of weights that carry one
  bool operator==(const StepKey&) const = default;
};

/// What a list keeps without its parameters.
struct StepListHead : StepKey {
  DeviceScalars* scalars = nullptr;
  bool lacks_op = false;    ///< the device lacks Kernel::op
  bool takes_parts = true;  ///< a step does to a part of a parameter what it would do to the whole

  /// The learning rate where a captured step reads it (0-dim fp32), and what was last written
  /// there; undefined where steps are not captured.
  at::Tensor rate{};
  double written_rate = 0.;
};

/// The parameters that one call of a fused kernel steps: those of one group, device and dtype that
/// have a gradient. Kept from step to step; the gradients are not.
struct StepList : StepListHead {
  std::vector<at::Tensor> params{}, grads{};
  std::vector<at::Tensor> counters{};            ///< one for each parameter, shared or not
  std::vector<std::vector<at::Tensor>> state{};  ///< by kind of state, then by parameter
  at::Tensor buffer{};                           ///< of a step by pieces, while it lasts

  /// The list without its parameters.
  [[gnu::cold]] StepList emptied() const {
    StepList list{static_cast<const StepListHead&>(*this)};
    list.state.resize(state.size());
    return list;
  }

  /// What to make of a tensor.
  using Part = c10::function_ref<at::Tensor(const at::Tensor&)>;

  /// Adds what `of` makes of the tensors beside the i-th parameter of `from`: gradient, counter,
  /// state.
  [[gnu::cold]] void add_beside_param(const StepList& from, std::size_t i, Part of) {
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
///                        numbers and whether at_least and at_most are 0
///     asks_counter(options)
///                        if there, whether step() asks list.counter at all; or else it may
///     op                 if there, the op of ATen's that step() calls; where the device lacks it,
///                        list.lacks_op is true, and all parameters of a list have one count.
///                        step() may be called with parts of parameters then
///
/// step() divides the gradients by scalars.grad_scale(), if it is there, and changes nothing where
/// scalars.found_inf() is there and 1. The counters count the step already. It never reads the
/// device. list.rate, where defined, takes the place of the options' learning rate. ATen's fused
/// ops do all that; a kernel that ATen lacks is a FlatStep.
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

/// Kernel::step with the options of a group, for what is the same for all kernels.
using KernelStep = c10::function_ref<void(const StepList&, const StepScalars&)>;

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
  /// Whether check() would pass.
  virtual bool holds(const at::Tensor& weight, const at::Tensor& gradient) const = 0;
  /// What the weight stands for, of its layout: a state starts from it.
  virtual at::Tensor master(const at::Tensor& weight) const = 0;

  /// What step() is to find as list.buffer. `drops`: the gradients are dropped after the step.
  virtual at::Tensor buffer(const StepList& list, bool drops) const = 0;
  virtual void step(KernelStep kernel, const StepList& list) const = 0;
  /// After step(), with the weight's new version.
  virtual void note_stepped(const at::Tensor& weight) const = 0;

 protected:
  ~StepMethod() = default;
};

// ---- The kernels --------------------------------------------------------------------------------

// Note [Steps without a fused kernel]
// Where a device has no fused kernel that heeds the scale and the flag, a list's parameters,
// gradients and states are copied into one flat tensor each, so that ordinary ops step them all at
// once, and read nothing either. 16-bit numbers are stepped in fp32. If the step is skipped, what
// was there is stored again. For one list that takes some 30 launches instead of one, 15 to 20 of
// which go over all parameters, and memory for some five copies of the parameters meanwhile.

/// A list of one step as ordinary ops are to take it.
class FlatStep {
 public:
  at::Tensor params, grads;       ///< with at least the precision of fp32
  std::vector<at::Tensor> state;  ///< by kind
  at::Tensor rate;                ///< of learning, 0-dim

  [[gnu::cold]] FlatStep(const StepList& list, const StepScalars& scalars, double learning_rate)
      : grads(flat(list.grads)),
        rate(list.rate.defined() ? list.rate : at::full({}, learning_rate, grads.options())),
        list_(list),
        found_inf_(scalars.found_inf()) {
    std::vector<at::Tensor> tensors = list.params;
    for (const auto& kind : list.state) tensors.insert(tensors.end(), kind.begin(), kind.end());
    state = flat(tensors).chunk(static_cast<int64_t>(1 + list.state.size()));
    params = state.front();
    state.erase(state.begin());
    if (scalars.grad_scale()) grads.div_(*scalars.grad_scale());
  }

  /// How often the parameters have been stepped, this step included unless it is skipped. Only of a
  /// list with a counter: of a kernel that is `apart`, or whose `op` the device lacks.
  [[gnu::cold]] at::Tensor count() const { return list_.counter->value.to(params.scalar_type()); }

  /// Adds `weight` times the parameters to the gradients.
  [[gnu::cold]] void decay(double weight) const {
    if (weight != 0.) grads.add_(params, weight);
  }

  /// Subtracts `length` times `direction` from the parameters, and gives the optimizer what has
  /// become of them and of their states, unless the step is skipped.
  [[gnu::cold]] void descend(at::Tensor direction, const at::Tensor& length) const {
    params.addcmul_(direction, length, /*value=*/-1.);
    direction.reset();  // what follows takes memory, too
    store(list_.params, params);
    for (std::size_t k = 0; k < state.size(); ++k) store(list_.state[k], state[k]);
  }

 private:
  [[gnu::cold]] static at::Tensor flat(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> pieces;
    pieces.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) pieces.push_back(in_memory_order(tensor));
    at::Tensor all = at::cat(pieces);
    return is_16_bit(all.scalar_type()) ? all.to(at::kFloat) : all;
  }

  [[gnu::cold]] void store(const std::vector<at::Tensor>& tensors, at::Tensor all) const {
    if (found_inf_) at::where_out(all, found_inf_->to(at::kBool), flat(tensors), all);
    std::vector<at::Tensor> pieces;
    int64_t offset = all.storage_offset();
    for (const at::Tensor& tensor : tensors) {
      pieces.push_back(all.as_strided(tensor.sizes(), tensor.strides(), offset));
      offset += tensor.numel();
    }
    at::_foreach_copy_(tensors, pieces);
  }

  const StepList& list_;
  const std::optional<at::Tensor>& found_inf_;
};

/// What most kernels have in common.
template <class LibTorch_, class Options_, class State_>
struct KernelBase {
  using LibTorch = LibTorch_;
  using Options = Options_;
  using State = State_;
  static constexpr bool apart = false;

  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options&) {
    return at::zeros_like(param);
  }
  static bool counted(const Options&) { return true; }
  static int64_t steps(const State& s) { return s.step(); }
  static void set_steps(State& s, int64_t steps) { s.step(steps); }
};

template <class LibTorch, class Options, class State, auto kernel, auto kernel_of_rate_on_device>
struct AdamKernelBase : KernelBase<LibTorch, Options, State> {
  static std::size_t kinds(const Options& o) { return o.amsgrad() ? 3 : 2; }
  static at::Tensor& tensor(State& s, std::size_t kind) {
    return kind == 0 ? s.exp_avg() : kind == 1 ? s.exp_avg_sq() : s.max_exp_avg_sq();
  }

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.lacks_op) return step_flat(o, list, scalars);
    const auto with = [&](auto chosen, const auto& rate) {
      const auto [beta1, beta2] = o.betas();
      chosen(list.params, list.grads, list.state[0], list.state[1],
             o.amsgrad() ? at::TensorList(list.state[2]) : at::TensorList(), list.counters, rate,
             beta1, beta2, o.weight_decay(), o.eps(), o.amsgrad(), /*maximize=*/false,
             scalars.grad_scale(), scalars.found_inf());
    };
    list.rate.defined() ? with(kernel_of_rate_on_device, list.rate) : with(kernel, o.lr());
  }

 private:
  [[gnu::cold]] static void step_flat(const Options& o, const StepList& list,
                                      const StepScalars& scalars) {
    FlatStep step(list, scalars, o.lr());
    const auto [beta1, beta2] = o.betas();
    const at::Tensor count = step.count();
    const auto correction = [&](double beta) { return at::rsub(at::pow(beta, count), 1.); };
    if constexpr (std::is_same_v<Options, torch::optim::AdamWOptions>) {
      step.params.mul_(at::rsub(step.rate, 1., o.weight_decay()));
    } else {
      step.decay(o.weight_decay());
    }
    step.state[0].mul_(beta1).add_(step.grads, 1. - beta1);
    step.state[1].mul_(beta2).addcmul_(step.grads, step.grads, 1. - beta2);
    if (o.amsgrad()) at::maximum_out(step.state[2], step.state[2], step.state[1]);
    at::Tensor direction = step.state[o.amsgrad() ? 2 : 1].sqrt();
    direction.div_(correction(beta2).sqrt_()).add_(o.eps());
    at::div_out(direction, step.state[0], direction);
    step.descend(std::move(direction), step.rate.div(correction(beta1)));
  }
};

struct AdamKernel
    : AdamKernelBase<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState,
                     &at::_ops::_fused_adam_::call, &at::_ops::_fused_adam__tensor_lr::call> {
  static constexpr const char* name = "FusedAdam";
  static constexpr const char* op = "aten::_fused_adam_";
};

struct AdamWKernel
    : AdamKernelBase<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState,
                     &at::_ops::_fused_adamw_::call, &at::_ops::_fused_adamw__tensor_lr::call> {
  static constexpr const char* name = "FusedAdamW";
  static constexpr const char* op = "aten::_fused_adamw_";
};

// Note [First steps of SGD]
// A momentum buffer starts as the first gradient that is stepped with, undampened. ATen's kernel
// does so when it is told is_first_step, and then skips or not like any other step, so that a host
// that does not read never learns whether the buffer was filled (PyTorch's own optimizer takes it
// for granted and goes on with uninitialised memory). Here buffers start as zeros, and the device
// keeps two numbers, whether there was a step and whether there was none. Each step has them copied
// to the host until it has learned that there was a step; nothing waits for the copy. Without
// dampening, a later step makes of zeros what the first step makes of anything: the numbers matter
// only if dampening is set later. With dampening, while the host does not know, the kernel is
// called twice, as for the first step and as for a later one, and each call is skipped where its
// gate is 1: the larger of one of these numbers and the flag.
struct SgdKernel
    : KernelBase<torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState> {
  static constexpr const char* name = "FusedSGD";
  static constexpr const char* op = "aten::_fused_sgd_";
  static constexpr bool apart = true;
  static constexpr bool counts_first_only = true;

  static std::size_t kinds(const Options& o) { return o.momentum() == 0 ? 0 : 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.momentum_buffer(); }
  static bool counted(const Options& o) { return o.momentum() != 0; }
  static bool asks_counter(const Options& o) { return counted(o) && o.dampening() != 0; }
  static int64_t steps(const State& s) { return s.momentum_buffer().defined() ? 1 : 0; }
  static void set_steps(State&, int64_t) {}

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.lacks_op || (cpu_loses_16_bit_steps && list.device.is_cpu() && is_16_bit(list.dtype)))
      return step_flat(o, list, scalars);
    const auto& found_inf = scalars.found_inf();
    if (!asks_counter(o) || list.counter->at_least > 0) {
      call(o, list, /*first=*/false, scalars.grad_scale(), found_inf);
    } else if (list.counter->at_most == 0) {
      call(o, list, /*first=*/true, scalars.grad_scale(), found_inf);
    } else {
      const at::Tensor& numbers = list.counter->numbers;
      const at::Tensor gates = found_inf ? numbers.maximum(*found_inf) : numbers;
      call(o, list, /*first=*/true, scalars.grad_scale(), gates.select(0, 0));
      call(o, list, /*first=*/false, scalars.grad_scale(), gates.select(0, 1));
    }
  }

 private:
  // Found in 2.11: the CPU's kernel computes 16-bit parameters by vectors and stores only the rest.
  static constexpr bool cpu_loses_16_bit_steps = TORCHAMP_LIBTORCH < 215;

  [[gnu::cold]] static void step_flat(const Options& o, const StepList& list,
                                      const StepScalars& scalars) {
    const FlatStep step(list, scalars, o.lr());
    step.decay(o.weight_decay());
    at::Tensor direction = step.grads;
    if (o.momentum() != 0.) {
      at::Tensor gradient = step.grads;  // for the buffer
      if (asks_counter(o)) {
        const at::Tensor is_first = list.counter->numbers.select(0, 1).to(gradient.scalar_type());
        gradient = gradient.mul(is_first.mul(o.dampening()).add_(1. - o.dampening()));
      }
      const at::Tensor& buffer = step.state[0].mul_(o.momentum()).add_(gradient);
      direction = o.nesterov() ? direction.add(buffer, o.momentum()) : buffer;
    }
    step.descend(direction, step.rate);
  }

  static void call(const Options& o, const StepList& list, bool first,
                   const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf) {
    const auto with = [&](const auto& rate) {
      at::_fused_sgd_(list.params, list.grads,
                      o.momentum() == 0 ? at::TensorList() : at::TensorList(list.state[0]),
                      o.weight_decay(), o.momentum(), rate, o.dampening(), o.nesterov(),
                      /*maximize=*/false, first, grad_scale, found_inf);
    };
    list.rate.defined() ? with(list.rate) : with(o.lr());
  }
};

struct AdagradKernel : KernelBase<torch::optim::Adagrad, torch::optim::AdagradOptions,
                                  torch::optim::AdagradParamState> {
  static constexpr const char* name = "FusedAdagrad";
  static constexpr const char* op = "aten::_fused_adagrad_";
  static constexpr bool kernel_takes_rate_on_device = TORCHAMP_LIBTORCH >= 208;
  static constexpr bool apart = !kernel_takes_rate_on_device;  // step_flat() wants it

  static std::size_t kinds(const Options&) { return 1; }
  static at::Tensor& tensor(State& s, std::size_t) { return s.sum(); }
  static at::Tensor initial(std::size_t, const at::Tensor& param, const Options& defaults) {
    return at::full_like(param, defaults.initial_accumulator_value());
  }
  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.lacks_op || (list.rate.defined() && !kernel_takes_rate_on_device)) {
      return step_flat(o, list, scalars);
    }
    const auto with = [&](const auto& rate) {
      at::_fused_adagrad_(list.params, list.grads, list.state[0], list.counters, rate, o.lr_decay(),
                          o.weight_decay(), o.eps(), /*maximize=*/false, scalars.grad_scale(),
                          scalars.found_inf());
    };
#if TORCHAMP_LIBTORCH >= 208
    if (list.rate.defined()) return with(list.rate);
#endif
    with(o.lr());
  }

 private:
  [[gnu::cold]] static void step_flat(const Options& o, const StepList& list,
                                      const StepScalars& scalars) {
    const FlatStep step(list, scalars, o.lr());
    step.decay(o.weight_decay());
    const at::Tensor direction =
        step.grads.div(step.state[0].addcmul_(step.grads, step.grads).sqrt().add_(o.eps()));
    const at::Tensor slowdown = step.count().sub(1.).mul_(o.lr_decay()).add_(1.);
    step.descend(direction, step.rate.div(slowdown));
  }
};

}  // namespace torchamp::detail
