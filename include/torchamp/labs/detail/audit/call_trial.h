// SPDX-License-Identifier: BSD-3-Clause
// A call of an op, run again in fp32 and in 16 bits: its results, its time, and why it cannot run.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "torchamp/autocast_state.h"
#include "torchamp/detail/core/autocast/autocast_kernel.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/detail/extras/shared/rng_state.h"
#include "torchamp/rule.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The seconds that `device` takes for `work`, without earlier work.
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

/// A call of an op, saved before it runs, to be repeated with the same arguments.
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
    for (std::size_t i = 0; i < arguments_.size(); ++i) keep_statistic(i, arguments_[i]);
    if (op.hasTag(at::Tag::nondeterministic_seeded)) rng_ = RngState::now();
  }

  /// Repeats the call with arguments cast by `rule` for the autocast dtype `low`; also its backward
  /// if gradients are computed. Does not affect the program.
  Result run(Cast rule, at::ScalarType low) const {
    const at::DisableRecordFunctionGuard not_recorded;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const NoCastCache no_cache;
    const auto before = DeviceAutocastState::of(device_.type());
    const auto put_back = c10::make_scope_exit([&] { before.apply(); });
    at::autocast::set_autocast_dtype(device_.type(), low);
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
  /// The cast arguments of one call, as leaves of a separate graph.
  struct Arguments {
    torch::jit::Stack stack;
    std::vector<at::Tensor> leaves;  // of which gradients are wanted
    std::vector<bool> is_cast;       // for each of these
  };

  /// A copy of what the op updates.
  void keep_statistic(std::size_t i, c10::IValue& value) const {
    if (!is_running_statistic(op_.schema().arguments()[i])) return;
    value = with_tensors_changed(value, [](const at::Tensor& tensor) { return tensor.clone(); });
  }

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
      keep_statistic(i, stack[i]);
    }
    (void)casts_(rule, device_.type(), nullptr, op_.schema(), stack);
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

}  // namespace TORCHAMP_NAMESPACE::detail
