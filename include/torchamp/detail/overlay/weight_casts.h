// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/optim/optimizer.h>

#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// Lives where weights are written to, and at its end, also if what writes throws, drops LibTorch's
/// cached casts of them, which would go on giving the old values within an autocast region, and
/// what is kept until weights step. What is dropped is cast again.
class DropWeightCasts {
 public:
  /// Where LibTorch counts the writes.
  DropWeightCasts() = default;
  /// Where it may not: the optimizer's parameters are told to have changed, too.
  explicit DropWeightCasts(const torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  ~DropWeightCasts() {
    at::autocast::clear_cache();
    KeptWeights* const kept = kept_weights();
    if (kept == nullptr) return;
    kept->end_window();
    if (optimizer_ == nullptr) return;
    for (const auto& group : optimizer_->param_groups()) kept->changed(group.params());
  }
  DropWeightCasts(const DropWeightCasts&) = delete;
  DropWeightCasts& operator=(const DropWeightCasts&) = delete;

 private:
  const torch::optim::Optimizer* optimizer_ = nullptr;
};

/// A region that begins with an empty cache of LibTorch's weight casts, and whose casts nobody
/// finds after it: they are part of its autograd graph.
class EmptyCastCache {
 public:
  EmptyCastCache() { at::autocast::clear_cache(); }
  ~EmptyCastCache() { at::autocast::clear_cache(); }
  EmptyCastCache(const EmptyCastCache&) = delete;
  EmptyCastCache& operator=(const EmptyCastCache&) = delete;
};

}  // namespace torchamp::detail
