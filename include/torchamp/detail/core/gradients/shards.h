// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The processes that have shards of the same masters.
class Shards {
 public:
  Shards() = default;
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;
  virtual ~Shards() = default;

  /// Replaces a number by its maximum over all processes.
  virtual void agree_largest(at::Tensor& number) const = 0;

  /// The norm of all gradients, from the norms of each process's own gradients.
  virtual at::Tensor norm_of_all(const at::Tensor& own, double norm_type) const = 0;

  /// Throws for an optimizer that does not treat each element of a weight independently.
  virtual void check(const torch::optim::Optimizer& optimizer, const char* call) const = 0;
};

/// Null if the tensor is no shard of a master.
inline std::shared_ptr<Shards> shards_of(const at::Tensor& tensor) {
  const WeightMeta* const meta = weight_meta_of(tensor);
  return meta ? meta->shards : nullptr;
}

/// The shards to which the optimizer's parameters belong; null if they are no shards. Errors: an
/// optimizer that cannot step shards; an optimizer of weights that have masters.
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

}  // namespace TORCHAMP_NAMESPACE::detail
