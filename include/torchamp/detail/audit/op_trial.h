// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/observe/recorded_op.h"
#include "torchamp/detail/overlay/cast_arguments.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/rng_state.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Seconds that `device` takes for `work`, what it was doing before not counted.
template <class Work>
double seconds_on(at::Device device, const Work& work) {
  const auto wait = [&] {
    if (!device.is_cpu()) {
      c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    }
  };
  wait();
  const auto begin = std::chrono::steady_clock::now();
  work();
  wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// A call of an op, kept before it runs, to be made again with the same arguments.
class CallTrial {
 public:
  struct Result {
    std::vector<at::Tensor> outputs{};  ///< floating-point ones
    double seconds = 0.;                ///< forward and backward, without casts
    std::string problem{};              ///< why it could not run; empty if it did
  };

  CallTrial(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> arguments,
            at::Device device, bool promotes, bool records)
      : op_(op),
        arguments_(arguments.begin(), arguments.end()),
        device_(device),
        casts_(op.schema(), promotes),
        records_(records) {
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      if (is_running_statistic(op.schema().arguments()[i]) && arguments_[i].isTensor() &&
          arguments_[i].toTensor().defined()) {
        arguments_[i] = arguments_[i].toTensor().clone();  // which the op updates
      }
    }
    if (op.hasTag(at::Tag::nondeterministic_seeded)) rng_ = RngState::now();
  }

  /// Makes the call with arguments cast by `rule`, to which the autocast dtype is `low`, and its
  /// backward where a gradient is wanted. Changes nothing of the program's.
  Result run(Cast rule, at::ScalarType low) const {
    const at::DisableRecordFunctionGuard not_recorded;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const AutocastDtype dtype(device_.type(), low);
    std::optional<RngScope> random;
    if (rng_) random.emplace(*rng_);
    Result result;
    try {
      Arguments call = arguments(rule);
      torch::jit::Stack& stack = call.stack;
      const std::vector<at::Tensor>& leaves = call.leaves;
      const at::AutoGradMode with_grad(!leaves.empty());
      result.seconds = seconds_on(device_, [&] { op_.callBoxed(stack); });
      std::vector<at::Tensor> with_gradient;
      for_each_floating_tensor(stack, [&](const at::Tensor& tensor) {
        result.outputs.push_back(tensor.detach());
        if (tensor.requires_grad()) with_gradient.push_back(tensor);
      });
      if (with_gradient.empty()) return result;
      std::vector<at::Tensor> gradients;
      gradients.reserve(with_gradient.size());
      for (const at::Tensor& tensor : with_gradient) gradients.push_back(at::ones_like(tensor));
      std::vector<at::Tensor> of_leaves;
      result.seconds += seconds_on(device_, [&] {
        of_leaves = torch::autograd::grad(with_gradient, leaves, gradients, /*retain_graph=*/false,
                                          /*create_graph=*/false, /*allow_unused=*/true);
      });
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        TORCH_CHECK(
            !call.is_cast[i] || !of_leaves[i].defined() || of_leaves[i].layout() == at::kStrided,
            "its gradient is sparse, which the backward of a cast does not take");
      }
    } catch (const c10::Error& error) {
      result = {.problem = error.what_without_backtrace()};
    }
    return result;
  }

 private:
  /// The thread's autocast dtype for a device, without its cache of casts, while it lives.
  class AutocastDtype {
   public:
    AutocastDtype(at::DeviceType device, at::ScalarType dtype)
        : device_(device),
          dtype_(at::autocast::get_autocast_dtype(device)),
          cache_(at::autocast::is_autocast_cache_enabled()) {
      at::autocast::set_autocast_dtype(device, dtype);
      at::autocast::set_autocast_cache_enabled(false);
    }
    AutocastDtype(const AutocastDtype&) = delete;
    AutocastDtype& operator=(const AutocastDtype&) = delete;
    ~AutocastDtype() {
      at::autocast::set_autocast_dtype(device_, dtype_);
      at::autocast::set_autocast_cache_enabled(cache_);
    }

   private:
    at::DeviceType device_;
    at::ScalarType dtype_;
    bool cache_;
  };

  /// The arguments of one call, cast, as leaves of a graph of their own.
  struct Arguments {
    torch::jit::Stack stack;
    std::vector<at::Tensor> leaves;  // of which gradients are wanted
    std::vector<bool> is_cast;       // for each of these
  };

  Arguments arguments(Cast rule) const {
    const at::NoGradGuard no_grad;
    std::vector<bool> wants_gradient;
    std::vector<at::ScalarType> dtypes;
    Arguments result;
    torch::jit::Stack& stack = result.stack;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      stack.push_back(with_tensors_changed(arguments_[i], [&](const at::Tensor& tensor) {
        wants_gradient.push_back(records_ && tensor.requires_grad());
        dtypes.push_back(tensor.scalar_type());
        return tensor.detach();
      }));
      if (is_running_statistic(op_.schema().arguments()[i]) && stack[i].isTensor() &&
          stack[i].toTensor().defined()) {
        stack[i] = stack[i].toTensor().clone();
      }
    }
    (void)casts_(rule, device_.type(), stack);
    std::size_t next = 0;
    for (c10::IValue& value : stack) {
      value = with_tensors_changed(value, [&](const at::Tensor& tensor) {
        const std::size_t i = next++;
        if (!wants_gradient[i] || !tensor.is_floating_point()) return tensor;
        result.leaves.push_back(tensor.detach().requires_grad_());
        result.is_cast.push_back(tensor.scalar_type() != dtypes[i]);
        return result.leaves.back();
      });
    }
    return result;
  }

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;
  at::Device device_;
  CastArguments casts_;
  std::optional<RngState> rng_;
  bool records_;  // whether gradients are wanted
};

}  // namespace torchamp::detail
