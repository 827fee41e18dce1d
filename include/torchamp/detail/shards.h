// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <memory>

#include "torchamp/detail/gradients/weight_meta.h"

namespace torchamp::detail {

// Note [Shards]
// ShardedMasterWeights gives the optimizer of each process a piece of each master. What looks at
// all gradients, or writes all of an optimizer's state, has to ask the other processes, and finds
// them at the piece: the tensors of its WeightMeta. All processes have a piece of every master, and
// pieces of equal size, so that they always ask together.

/// Gradients in the model that backward passes have not sent to the pieces.
class UnsentGradients {
 public:
  UnsentGradients() = default;
  UnsentGradients(const UnsentGradients&) = delete;
  UnsentGradients& operator=(const UnsentGradients&) = delete;
  virtual ~UnsentGradients() = default;

  /// Whether there are some of passes within no_sync().
  virtual bool any() const = 0;
  /// Sends them, as a backward pass outside of no_sync() does at its end. All processes call it.
  virtual void send() = 0;
  /// Drops them, and those that an exception has left.
  virtual void drop() = 0;
};

/// What shards do beyond what a step asks of them.
class StoredShards : public Shards {
 public:
  /// Brings the whole state of `optimizer` to process 0, for save().
  virtual void gather(const torch::optim::Optimizer& optimizer) = 0;
  virtual void save(const torch::optim::Optimizer& optimizer,
                    torch::serialize::OutputArchive& archive) = 0;
  /// Takes this process's pieces of a whole state.
  virtual void load(torch::optim::Optimizer& optimizer,
                    torch::serialize::InputArchive& archive) const = 0;

  std::weak_ptr<UnsentGradients> unsent{};
};

/// What the optimizer's parameters are pieces of; null if they are none. Errors: as of shards_of.
inline std::shared_ptr<StoredShards> stored_shards_of(const torch::optim::Optimizer& optimizer,
                                                      const char* call) {
  return std::dynamic_pointer_cast<StoredShards>(shards_of(optimizer, call));
}

/// Where the gradients of the optimizer's pieces come from; null if it has none.
inline std::shared_ptr<UnsentGradients> unsent_of(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& tensor : group.params()) {
      if (!tensor.defined()) continue;
      const auto shards = std::dynamic_pointer_cast<StoredShards>(shards_of(tensor));
      if (shards) return shards->unsent.lock();
    }
  }
  return nullptr;
}

/// An object of which each process holds a share, for files.
class HeldInShares {
 public:
  /// Brings what the other processes hold to process 0. All call it.
  virtual void gather() = 0;
  /// What brings back the share of now.
  virtual std::function<void()> keep() const = 0;

 protected:
  ~HeldInShares() = default;
};

}  // namespace torchamp::detail
