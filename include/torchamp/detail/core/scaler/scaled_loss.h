// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "torchamp/detail/core/check_order/order_check.h"
#include "torchamp/detail/core/scaler/divided_gradients.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Data that a scaler shares with the backward passes of its losses. Backward may run in several
/// threads, one for each device, so each use takes the lock.
struct ScaledBackward {
  /// Calls `f(check)` in a scaler's first iterations; not in a CudaGraph, nor after it. No call of
  /// the scaler fails if a check does (a device without memory, or without a kernel for a norm):
  /// then nothing is checked from now on.
  template <class F>
  void with_check(const F& f) {
    if (check && !check->is_looking()) check.reset();
    if (!check) return;
    try {
      f(*check);
    } catch (const c10::Error&) {
      check.reset();
    }
  }

  std::mutex mutex;
  DividedGradients divided{};
  std::optional<OrderCheck> check{};  ///< in a scaler's first iterations
  int task = -1;  ///< autograd's number of the call of backward() that has begun last
};

/// A hook at each loss that a scaler has scaled. It runs before the backward of the loss continues,
/// and it marks the loss as scaled.
class ScaledLoss final : public torch::autograd::FunctionPreHook {
 public:
  explicit ScaledLoss(std::shared_ptr<ScaledBackward> backward) : backward_(std::move(backward)) {}

  TORCHAMP_BODY torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override;

  /// Marks `scaled`, if it has a graph.
  static void mark(const at::Tensor& scaled, const std::shared_ptr<ScaledBackward>& backward) {
    const auto& node = scaled.grad_fn();
    if (node) node->add_tensor_pre_hook(std::make_unique<ScaledLoss>(backward));
  }

  /// Whether `node`, which may be null, made a loss that the scaler of `backward` has scaled.
  static bool is_made_by(torch::autograd::Node* node, const ScaledBackward& backward) {
    if (!node) return false;
    const auto& hooks = node->tensor_pre_hooks();
    return std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) {
      const auto* const loss = dynamic_cast<const ScaledLoss*>(hook.get());
      return loss && loss->backward_.get() == &backward;
    });
  }

 private:
  std::shared_ptr<ScaledBackward> backward_;
};

}  // namespace TORCHAMP_NAMESPACE::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/scaler/scaled_loss-inl.h"  // IWYU pragma: export
#endif
