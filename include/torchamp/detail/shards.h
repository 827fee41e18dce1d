// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "torchamp/version.h"

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

/// The processes that have a piece each of some masters.
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

  /// Brings the whole state of `optimizer` to process 0, for save().
  virtual void gather(const torch::optim::Optimizer& optimizer) = 0;
  virtual void save(const torch::optim::Optimizer& optimizer,
                    torch::serialize::OutputArchive& archive) = 0;
  /// Takes this process's pieces of a whole state.
  virtual void load(torch::optim::Optimizer& optimizer,
                    torch::serialize::InputArchive& archive) const = 0;

  std::weak_ptr<UnsentGradients> unsent{};
};

/// What a weight carries for this library.
struct WeightMeta : c10::BackendMeta {
  bool has_optimizer = false;        ///< an optimizer that may step it was given the weight
  std::shared_ptr<Shards> shards{};  ///< where the weight is a piece of a master
  std::size_t index = 0;             ///< of that master
  /// Of a model's weight: those that keep its master. Expired once they are gone.
  std::weak_ptr<const void> masters{};
};

/// Null for most tensors.
inline WeightMeta* weight_meta_of(const at::Tensor& tensor) {
  c10::BackendMeta* const meta = tensor.unsafeGetTensorImpl()->get_backend_meta();
  return meta ? dynamic_cast<WeightMeta*>(meta) : nullptr;
}

/// Null for what is no piece of a master.
inline std::shared_ptr<Shards> shards_of(const at::Tensor& tensor) {
  const WeightMeta* const meta = weight_meta_of(tensor);
  return meta ? meta->shards : nullptr;
}

/// The shards that tensors with a gradient are pieces of. Throws if only some are, or of others,
/// since nobody knows their common norm.
class CommonShards {
 public:
  explicit CommonShards(const char* call) : call_(call) {}
  CommonShards& add(at::TensorList tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->grad().defined()) continue;
      const WeightMeta* const meta = weight_meta_of(tensor);
      Shards* const own = meta ? meta->shards.get() : nullptr;
      TORCH_CHECK_VALUE(is_first_ || own == shards_, call_,
                        ": some parameters are pieces of ShardedMasterWeights, and others are not, "
                        "or are those of another model. Clip them apart.");
      shards_ = own;
      is_first_ = false;
    }
    return *this;
  }
  /// Null if they are no pieces.
  const Shards* get() const { return shards_; }

 private:
  const char* call_;
  Shards* shards_ = nullptr;
  bool is_first_ = true;
};

/// What the optimizer's parameters are pieces of; null if they are none. An error for an optimizer
/// that cannot step pieces.
inline std::shared_ptr<Shards> shards_of(const torch::optim::Optimizer& optimizer,
                                         const char* call) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& tensor : group.params()) {
      if (!tensor.defined()) continue;
      if (auto shards = shards_of(tensor)) {
        shards->check(optimizer, call);
        return shards;
      }
    }
  }
  return nullptr;
}

/// Where the gradients of the optimizer's pieces come from; null if it has none.
inline std::shared_ptr<UnsentGradients> unsent_of(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& tensor : group.params()) {
      if (!tensor.defined()) continue;
      if (const auto shards = shards_of(tensor)) return shards->unsent.lock();
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
