// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/snapshot.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/shards.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Shards]
// ShardedMasterWeights gives each process's optimizer a shard of each master. Code that needs all
// gradients, or writes an optimizer's whole state, must communicate with the other processes; it
// finds them in the shard's WeightMeta. All processes have a shard of equal size of every master,
// so they always communicate together.

/// Gradients in the model that were not sent to the shards.
class UnsentGradients {
 public:
  virtual ~UnsentGradients() = default;

  /// The model's parameters to which the shards belong.
  virtual const std::vector<at::Tensor>& parameters() const = 0;
  /// Whether there are any from passes under no_sync().
  virtual bool any() const = 0;
  /// Sends them, as the end of a backward pass outside no_sync() does. Collective.
  virtual void send() = 0;
  /// Drops them, and gradients that an exception has left.
  virtual void drop() = 0;
};

/// Operations of shards other than steps.
class StoredShards : public Shards {
 public:
  /// Gathers the whole state of `optimizer` on process 0, for save().
  virtual void gather(const torch::optim::Optimizer& optimizer) = 0;
  virtual void save(const torch::optim::Optimizer& optimizer,
                    torch::serialize::OutputArchive& archive) = 0;
  /// Loads this process's shards from a whole state.
  virtual void load(torch::optim::Optimizer& optimizer,
                    torch::serialize::InputArchive& archive) const = 0;

  std::weak_ptr<UnsentGradients> unsent{};
};

/// The shards that are the optimizer's parameters; null if there are none. Errors: as of shards_of.
inline std::shared_ptr<StoredShards> stored_shards_of(const torch::optim::Optimizer& optimizer,
                                                      const char* call) {
  return std::dynamic_pointer_cast<StoredShards>(shards_of(optimizer, call));
}

/// The source of the gradients of the optimizer's shards; null if it has none.
inline std::shared_ptr<UnsentGradients> unsent_of(const torch::optim::Optimizer& optimizer) {
  std::shared_ptr<StoredShards> shards;
  any_parameter(optimizer, [&](const at::Tensor& tensor) {
    shards = std::dynamic_pointer_cast<StoredShards>(shards_of(tensor));
    return shards != nullptr;
  });
  return shards ? shards->unsent.lock() : nullptr;
}

/// A region in which backward leaves gradients local.
class NoSync {
 public:
  explicit NoSync(bool& syncs, bool enabled = true) : syncs_(syncs), before_(syncs) {
    if (enabled) syncs = false;
  }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;
  ~NoSync() { syncs_ = before_; }

 private:
  bool& syncs_;
  bool before_;
};

/// MasterWeights or ShardedMasterWeights.
class Masters {
 public:
  virtual ~Masters() = default;
  virtual std::vector<std::pair<std::string, at::Tensor>> named_parameters() const = 0;
  /// Moves the model's gradients to the masters, unless backward has.
  virtual void take_gradients() {}
  virtual void copy_to_model() = 0;
  virtual void save(torch::serialize::OutputArchive& archive) const = 0;
  virtual void load(torch::serialize::InputArchive& archive) = 0;
  /// Returns a function that restores the present weights on this process.
  virtual std::function<void()> keep() = 0;
  /// Gathers the other processes' parts on process 0. Collective.
  virtual void gather() {}
  /// Whether backward averages gradients over processes; null where it never does.
  virtual bool* syncs() { return nullptr; }
};

/// Data attached to a master, by which code with only the optimizer finds the model's weight.
struct MasterMeta final : WeightMeta {
  WeakTensor narrow;
  /// The weight's gradient, when only the master's gradient was dropped.
  TensorSnapshot left;

  void note_gradient_dropped() override {
    const at::Tensor weight = narrow.lock();
    left = TensorSnapshot(weight.defined() ? weight.grad() : at::Tensor());
  }
};

/// Does nothing for a master with data that is specific to its device.
inline void note_narrow(const at::Tensor& master, const at::Tensor& narrow) {
  if (master.unsafeGetTensorImpl()->get_backend_meta()) return;
  auto meta = c10::make_intrusive<MasterMeta>();
  meta->narrow = WeakTensor(narrow);
  master.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
}

/// Null if the tensor is no master.
inline const MasterMeta* master_meta_of(const at::Tensor& tensor) {
  return dynamic_cast<const MasterMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

/// The weight of the model whose master this is; undefined if this is no master.
inline at::Tensor narrow_of(const at::Tensor& master) {
  const MasterMeta* const meta = master_meta_of(master);
  return meta ? meta->narrow.lock() : at::Tensor();
}

/// The hook that LibTorch calls after it has accumulated the gradient of `weight`; null if there is
/// none.
inline torch::autograd::PostAccumulateGradHook* hook_of(const at::Tensor& weight) {
  namespace impl = torch::autograd::impl;
  return impl::get_autograd_meta(weight) ? impl::post_acc_grad_hooks(weight).get() : nullptr;
}

/// Drops the model's gradients of weights whose masters `optimizer` has: gradients that were not
/// taken, and gradients that were not sent. (The optimizer's own gradients are already dropped.)
inline void drop_model_gradients(const torch::optim::Optimizer& optimizer) {
  if (const auto unsent = unsent_of(optimizer)) unsent->drop();
  any_parameter(optimizer, [](const at::Tensor& master) {
    note_gradient_dropped(master);
    const at::Tensor narrow = narrow_of(master);
    if (narrow.defined()) narrow.mutable_grad().reset();
    return false;
  });
}

}  // namespace TORCHAMP_NAMESPACE::detail
