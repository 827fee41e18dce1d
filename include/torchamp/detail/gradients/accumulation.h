// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/optim/optimizer.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "torchamp/detail/gradients/attached.h"
#include "torchamp/detail/gradients/clip_left.h"
#include "torchamp/detail/gradients/shards.h"
#include "torchamp/detail/scaler/step_ledger.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// What both kinds of accumulation do.

/// Throws for a loss that was computed, by few ops, from one of `scaled`, as a half of it is. Not
/// where the program has asked for the scale, and may have divided by it.
inline void check_not_scaled_within(const at::Tensor& loss, const char* call,
                                    const ScaledOutputs& scaled, const StepOrder& order) {
  if (!loss.defined() || order.was_asked()) return;
  constexpr int most_ops = 3;
  const auto search = [&](const auto& self, const torch::autograd::Node* node, int ops) -> void {
    if (!node) return;
    TORCH_CHECK_VALUE(!scaled.are_made_by(*node), call,
                      ": this loss was computed from one that has been scaled already, and its "
                      "gradients would be too large by the scale. Give the loss as it was before "
                      "scale(): it is scaled here.");
    if (ops == most_ops) return;
    for (const auto& edge : node->next_edges()) self(self, edge.function.get(), ops + 1);
  };
  search(search, loss.grad_fn().get(), 0);
}

/// Whether a reducer has left gradients of an optimizer as they are on this process. Null unless
/// one has ever done so.
inline std::atomic<bool (*)(const torch::optim::Optimizer&)>& has_local_gradients() {
  static std::atomic<bool (*)(const torch::optim::Optimizer&)> any = nullptr;
  return any;
}
/// Warns of a step with such, unless `warned`, which it sets.
inline void warn_of_local_gradients(const torch::optim::Optimizer& optimizer, const char* who,
                                    bool& warned) {
  auto* const any = has_local_gradients().load();
  if (warned || !any || !any(optimizer)) return;
  warned = true;
  TORCH_WARN(who,
             ": the last forward was within DistributedDataParallel::no_sync(), so these gradients "
             "are local, and the replicas would diverge after a step. Call sync_gradients() in "
             "before_unscale(). This warning is given once.");
}

/// Makes a "ready" optimizer "unscaled" whose gradients are the program's own, with a flag that
/// says whether to step.
inline void take_unscaled(StepLedger& ledger, torch::optim::Optimizer& optimizer,
                          at::Tensor found_inf, bool had_gradients) {
  ledger.optimizers.of(optimizer) = {.stage = OptimizerState::Stage::unscaled,
                                     .found_inf = {std::move(found_inf), std::nullopt},
                                     .had_gradients = had_gradients,
                                     .gradients = count_gradients(optimizer),
                                     .taken = gradients_taken(),
                                     .shards = shards_of(optimizer, "GradScaler::step")};
}

/// Changes, but for chance, where a gradient is written to or replaced.
inline uint64_t versions_of_gradients(const torch::optim::Optimizer& optimizer) {
  uint64_t sum = 0;
  any_gradient(optimizer, [&sum](const at::Tensor& gradient) {
    sum = sum * 31 + reinterpret_cast<std::uintptr_t>(gradient.unsafeGetTensorImpl());
    sum = sum * 31 + version_of(gradient);
    return false;
  });
  return sum;
}

/// Drops the gradients, and a clip of them that is left to the next step.
inline void clear_gradients(torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  ClipLeft::forget(optimizer);
}

inline std::shared_ptr<AccumulationWindow> open_window(torch::optim::Optimizer& optimizer) {
  return std::make_shared<AccumulationWindow>(
      AccumulationWindow{.optimizer = OptimizerNumber::give(optimizer)});
}

/// A warning out of a destructor.
template <class... Parts>
void warn(const Parts&... parts) noexcept {
  try {
    TORCH_WARN(parts...);
  } catch (...) {  // by the program's handler
  }
}

}  // namespace torchamp::detail
