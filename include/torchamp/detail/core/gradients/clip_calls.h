// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <atomic>
#include <cstdint>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The latest clips of this thread by the functions of clip_grad.h. A clip before backward() finds
/// no gradients and changes nothing, so only a record of the call can show it.
class ClipCalls {
 public:
  /// Records a clip that has changed gradients, including `gradient`.
  static void note_clipped(const at::Tensor& gradient) { latest().clipped = {next(), gradient}; }
  /// Records a clip of `parameter` and others that found no gradient.
  static void note_in_vain(const at::Tensor& parameter) { latest().in_vain = {next(), parameter}; }
  static void note(at::TensorList parameters) {
    const at::Tensor* first = nullptr;
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.defined()) continue;
      if (gradient_of(parameter).defined()) return note_clipped(gradient_of(parameter));
      if (!first) first = &parameter;
    }
    if (first) note_in_vain(*first);
  }
  static void note(const torch::optim::Optimizer& optimizer) {
    const auto clipped = [](const at::Tensor& gradient) {
      note_clipped(gradient);
      return true;
    };
    if (any_gradient(optimizer, clipped) || optimizer.param_groups().empty()) return;
    note(optimizer.param_groups().front().params());
  }

  /// Whether the latest clip that found gradients came after `time`, and found one of `optimizer`.
  /// (The kernel that multiplies gradients does not count as a write.)
  static bool has_clipped(std::uint64_t time, const torch::optim::Optimizer& optimizer) {
    const Call& call = latest().clipped;
    return call.time > time && any_gradient(optimizer, [&call](const at::Tensor& gradient) {
             return call.tensor.is(gradient);
           });
  }
  /// Whether a clip after `time` ran before the gradients of `optimizer` existed, and no later clip
  /// has clipped gradients that the optimizer still has.
  static bool was_in_vain(std::uint64_t time, const torch::optim::Optimizer& optimizer) {
    const Latest& calls = latest();
    if (calls.in_vain.time <= time) return false;
    const auto is_parameter = [&](const at::Tensor& one) { return calls.in_vain.tensor.is(one); };
    const auto is_clipped = [&](const at::Tensor& one) { return calls.clipped.tensor.is(one); };
    return any_parameter(optimizer, is_parameter) &&
           !(calls.clipped.time > time && any_gradient(optimizer, is_clipped));
  }

  /// Later than all clips until now, in all threads.
  static std::uint64_t now() { return clock().load(std::memory_order_relaxed); }

 private:
  struct Call {
    std::uint64_t time = 0;
    WeakTensor tensor{};
    Call() = default;
    Call(std::uint64_t at, const at::Tensor& of) : time(at), tensor(of) {}
  };
  struct Latest {
    Call clipped, in_vain;
  };
  static Latest& latest() {
    static thread_local Latest latest;
    return latest;
  }
  static std::atomic<std::uint64_t>& clock() {
    static std::atomic<std::uint64_t> time = 0;
    return time;
  }
  static std::uint64_t next() { return clock().fetch_add(1, std::memory_order_relaxed) + 1; }
};

}  // namespace TORCHAMP_NAMESPACE::detail
