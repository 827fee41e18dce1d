// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// The processes each of which has a shard of some masters.
class Shards {
 public:
  Shards() = default;
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;
  virtual ~Shards() = default;

  /// Makes a number the largest that any process has: found_inf, or the largest gradient.
  virtual void agree_largest(at::Tensor& number) const = 0;

  /// The norm of all gradients, from that of each process's own.
  virtual at::Tensor norm_of_all(const at::Tensor& own, double norm_type) const = 0;

  /// Throws for an optimizer that does not treat every element of a weight by itself.
  virtual void check(const torch::optim::Optimizer& optimizer, const char* call) const = 0;
};

/// Null for what is no shard of a master.
inline std::shared_ptr<Shards> shards_of(const at::Tensor& tensor) {
  const WeightMeta* const meta = weight_meta_of(tensor);
  return meta ? meta->shards : nullptr;
}

/// What the optimizer's parameters are shards of; null if they are none. An error for an optimizer
/// that cannot step shards, and for one of weights that have masters.
inline std::shared_ptr<Shards> shards_of(const torch::optim::Optimizer& optimizer,
                                         const char* call) {
  std::shared_ptr<Shards> shards;
  any_parameter(optimizer, [&](const at::Tensor& tensor) {
    const WeightMeta* const meta = weight_meta_of(tensor);
    if (!meta) return false;
    TORCHAMP_CHECK(!meta->has_master_apart || meta->masters.expired(), call, ": the parameter ",
                   tensor.sizes(),
                   " of this optimizer belongs to a model under master weights, which would "
                   "overwrite the result of a step. Give the optimizer the masters' parameters().");
    shards = meta->shards;
    return shards != nullptr;
  });
  if (shards) shards->check(optimizer, call);
  return shards;
}

}  // namespace torchamp::detail
