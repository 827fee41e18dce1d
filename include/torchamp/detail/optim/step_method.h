// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/optim/kernel.h"
#include "torchamp/detail/optim/pieces.h"
#include "torchamp/detail/optim/scalars.h"

namespace torchamp::detail {

/// Kernel::step with the options of a group, for what is the same for all kernels.
struct KernelStep {
  c10::function_ref<void(const StepList&, const StepScalars&)> step;
  bool takes_parts;  ///< whether it does to a part of a parameter what it would do to the whole
  void operator()(const StepList& list, const StepScalars& scalars) const { step(list, scalars); }
};

/// The buffers of a step, for masters and for gradients that are divided apart.
struct StepBuffers {
  PieceBuffers masters{}, gradients{};
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
