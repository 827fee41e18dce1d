// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/deferred_clip.h"
#include "torchamp/detail/core/gradients/optimizer_identity.h"
#include "torchamp/detail/core/gradients/separate.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/scaler/scaled_loss.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/accumulation/sum.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The terms in an Accumulation's messages: its calls, and the remedies that the program has.
struct AccumulationTerms {
  const char* backward = "Accumulation::backward";
  const char* flush = "Accumulation::flush";
  const char* owner = "the accumulation";
  const char* drop = "Call discard() to begin a new window.";
  const char* change = "Change them in before_unscale or before_step.";
  const char* send = "Call sync_gradients() in before_unscale().";
};

/// Throws for a tensor at which no backward() can begin.
inline void check_is_loss(const at::Tensor& loss, const char* call) {
  TORCH_CHECK_VALUE(loss.numel() == 1 && loss.requires_grad(), call, ": the loss has ",
                    loss.numel(), " element(s), and requires_grad is ", loss.requires_grad(),
                    ". Pass one number that was computed from the parameters, with grad mode on.");
}

/// Throws for a loss that the scaler has scaled, and for a loss that was computed from a scaled
/// loss by few ops, such as half of it. The latter is allowed if the program has read the scale,
/// because it may have divided by it.
inline void check_not_scaled(const at::Tensor& loss, const char* call, const StepLedger& ledger) {
  if (!loss.defined()) return;
  TORCH_CHECK_VALUE(!ScaledLoss::is_made_by(loss.grad_fn().get(), *ledger.backward), call,
                    ": this tensor has been scaled already, and its gradients would be too large "
                    "by the scale. Pass the loss as it was before scale().");
  if (ledger.use.was_read()) return;
  const auto search = [&](const auto& self, torch::autograd::Node* node, int ops) -> void {
    if (!node) return;
    TORCH_CHECK_VALUE(!ScaledLoss::is_made_by(node, *ledger.backward), call,
                      ": this loss was computed from one that has been scaled already, and its "
                      "gradients would be too large by the scale. Pass the loss as it was before "
                      "scale(): this call scales it.");
    if (ops == 3) return;
    for (const auto& edge : node->next_edges()) self(self, edge.function.get(), ops + 1);
  };
  search(search, loss.grad_fn().get(), 0);
}

/// A hook that a reducer attaches to the node that accumulates the gradients of a parameter.
struct ReducerHook : torch::autograd::FunctionPostHook {
  /// Whether the reducer has left the gradients local, without averaging.
  virtual bool has_left_local() const = 0;
};

/// Whether any reducer has ever left gradients local.
inline std::atomic<bool> any_has_left_local = false;

/// Whether a reducer has left the gradient local of a parameter, or of the weight whose master it
/// is.
inline bool has_local_gradient(const at::Tensor& parameter) {
  const at::Tensor weight = narrow_of(parameter);
  const auto accumulator =
      torch::autograd::impl::try_get_grad_accumulator(weight.defined() ? weight : parameter);
  return accumulator && std::ranges::any_of(accumulator->post_hooks(), [](const auto& hook) {
           const auto* const of_reducer = dynamic_cast<const ReducerHook*>(hook.get());
           return of_reducer && of_reducer->has_left_local();
         });
}
/// Warns of a step with local gradients, unless `warned`, which it sets.
inline void warn_of_local_gradients(const torch::optim::Optimizer& optimizer, const char* who,
                                    bool& warned, const char* remedy = AccumulationTerms().send) {
  if (warned || !any_has_left_local || !any_parameter(optimizer, has_local_gradient)) return;
  warned = true;
  TORCH_WARN(who,
             ": the last forward was within DistributedDataParallel::no_sync(), so these gradients "
             "are local, and the replicas would diverge after a step. ",
             remedy, " This warning is given once.");
}

/// Makes a "ready" optimizer "unscaled" whose gradients are `mean`. Without effect for a disabled
/// scaler.
inline void take_unscaled(GradScaler& scaler, torch::optim::Optimizer& optimizer,
                          GradientSum::Mean mean) {
  if (!scaler.is_enabled()) return;
  const InternalOps guard;
  ScalerParts::ledger(scaler).optimizers.of(optimizer) = {
      .stage = OptimizerState::Stage::unscaled,
      .measured = ScalerParts::scale(scaler).measure(std::move(mean.found_inf), mean.gradients,
                                                     Gradients::unscaled),
      .had_gradients = !mean.gradients.empty(),
      .gradients = count_gradients(optimizer),
      .moved = gradients_moved(),
      .shards = shards_of(optimizer, "GradScaler::step")};
}

/// The result for a disabled scaler if there is no gradient to step with.
inline StepResult no_step() {
  auto record = std::make_shared<StepRecord>();
  record->had_gradients = false;
  return ScalerParts::result(std::move(record));
}

/// Calls `f` with each tensor that may hold a gradient of the optimizer's window, until `f` returns
/// true. Returns whether it did. The tensors are each parameter, the weight whose master it is, and
/// weights of the model whose gradients were not sent to shards.
template <class F>
bool any_holder(const torch::optim::Optimizer& optimizer, const F& f) {
  const auto stops = [&f](const at::Tensor& tensor) { return tensor.defined() && f(tensor); };
  if (any_parameter(optimizer, [&stops](const at::Tensor& parameter) {
        return stops(parameter) || stops(narrow_of(parameter));
      })) {
    return true;
  }
  const auto unsent = unsent_of(optimizer);
  return unsent && std::ranges::any_of(unsent->parameters(), stops);
}

/// The gradients that a window of the optimizer has, as a walk for a Snapshot.
inline auto walk_window(const torch::optim::Optimizer& optimizer) {
  return [&optimizer](const auto& f) {
    return any_holder(optimizer, [&f](const at::Tensor& tensor) {
      return gradient_of(tensor).defined() && f(gradient_of(tensor));
    });
  };
}

/// Gives each gradient of the window its own memory, before a backward adds to the gradients: see
/// Note [Gradients in one memory].
inline void separate_window_gradients(const torch::optim::Optimizer& optimizer) {
  GradientSeparator separator;
  any_holder(optimizer, [&](const at::Tensor& tensor) {
    separator.add(tensor);
    return false;
  });
  separator.separate();
}

/// Drops the gradients and a deferred clip of them.
inline void clear_gradients(torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  if (DeferredClip* const clip = find_deferred_clip(optimizer)) clip->forget();
}

/// Records that the window has its first gradients of this scaler, for `optimizer`.
inline void note_open(StepLedger& ledger, const std::shared_ptr<AccumulationWindow>& window,
                      const torch::optim::Optimizer& optimizer) {
  window->optimizer = OptimizerIdentity(optimizer);
  std::erase_if(ledger.windows,
                [&](const auto& other) { return other.expired() || other.lock() == window; });
  ledger.windows.push_back(window);
}

}  // namespace TORCHAMP_NAMESPACE::detail
