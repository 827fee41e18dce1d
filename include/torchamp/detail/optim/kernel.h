// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

class StepScalars;
struct StepBuffers;
struct StepCounter;

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
