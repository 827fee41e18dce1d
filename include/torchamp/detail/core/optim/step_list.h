// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/optim/device_scalars.h"
#include "torchamp/detail/core/optim/step_counter.h"

namespace TORCHAMP_NAMESPACE::detail {

class StepMethod;

/// The common properties of parameters that one call steps.
struct StepKey : TensorKind {
  std::size_t group;
  std::shared_ptr<StepCounter> counter;  ///< for kernels that want one count for all parameters
  const StepMethod* method = nullptr;    ///< of weights that have one
  bool operator==(const StepKey&) const = default;
};

/// A list without its parameters.
struct StepListHead : StepKey {
  DeviceScalars* scalars = nullptr;
  bool lacks_op = false;    ///< the device lacks Kernel::op
  bool takes_parts = true;  ///< a step of a part of a parameter equals that part of a step

  /// The learning rate that a captured step reads (0-dim fp32), and the value that was last written
  /// to it; undefined if steps are not captured.
  at::Tensor rate{};
  double written_rate = 0.;
};

/// The parameters that one call of a fused kernel steps: the parameters of one group, device and
/// dtype with a gradient. The list is kept from step to step, but not the gradients.
struct StepList : StepListHead {
  std::vector<at::Tensor> params{}, grads{};
  std::vector<at::Tensor> counters{};            ///< one for each parameter, shared or not
  std::vector<std::vector<at::Tensor>> state{};  ///< by kind of state, then by parameter
  at::Tensor buffer{};                           ///< during a step by chunks

  /// The list without its parameters.
  StepList emptied() const {
    StepList list{static_cast<const StepListHead&>(*this)};
    list.state.resize(state.size());
    return list;
  }

  /// Selects a part of a tensor.
  using Part = c10::function_ref<at::Tensor(const at::Tensor&)>;

  /// Adds the parts of the other tensors of the i-th parameter of `from`: gradient, counter, state.
  void add_beside_param(const StepList& from, std::size_t i, Part of) {
    grads.push_back(of(from.grads[i]));
    if (!from.counters.empty()) counters.push_back(from.counters[i]);
    for (std::size_t k = 0; k < state.size(); ++k) state[k].push_back(of(from.state[k][i]));
  }
};

/// Kernel::step with the options of a group, for code that is the same for all kernels.
using KernelStep = c10::function_ref<void(const StepList&, const StepScalars&)>;

/// How fused optimizers step weights if they do not step the tensors themselves; see
/// Note [Weights that carry something]. Weights with a method have their own lists.
class StepMethod : public AnyStepMethod {
 public:
  StepMethod() = default;
  StepMethod(const StepMethod&) = delete;
  StepMethod& operator=(const StepMethod&) = delete;

  /// Throws if `weight` cannot be stepped with `gradient`.
  virtual void check(const at::Tensor& weight, const at::Tensor& gradient,
                     ErrorPlace where) const = 0;
  /// Whether check() would pass.
  virtual bool holds(const at::Tensor& weight, const at::Tensor& gradient) const = 0;
  /// The master that the weight represents, in its layout: a state starts from it.
  virtual at::Tensor master(const at::Tensor& weight) const = 0;

  /// The value of list.buffer for step().
  virtual at::Tensor buffer(const StepList& list) const = 0;
  virtual void step(KernelStep kernel, const StepList& list) const = 0;
  /// Called after step(), when the weight has its new version.
  virtual void note_stepped(const at::Tensor& weight) const = 0;

 protected:
  ~StepMethod() = default;
};

/// Null if the tensor itself is stepped.
inline const StepMethod* step_method_of(const at::Tensor& weight) {
  const WeightMeta* const meta = weight_meta_of(weight);
  return meta ? static_cast<const StepMethod*>(meta->step_method) : nullptr;
}

}  // namespace TORCHAMP_NAMESPACE::detail
