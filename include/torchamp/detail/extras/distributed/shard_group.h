// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/optim/kernels.h"
#include "torchamp/detail/core/optim/state_tensors.h"
#include "torchamp/detail/extras/distributed/buckets.h"
#include "torchamp/detail/extras/distributed/collective.h"
#include "torchamp/detail/extras/io/archives.h"
#include "torchamp/detail/extras/masters/split_weight.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/detail/extras/shared/optimizer_set.h"
#include "torchamp/optim.h"
#include "torchamp/training_checkpoint.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Whether the optimizer is known to treat each element independently.
inline bool is_elementwise(const torch::optim::Optimizer& optimizer) {
  if (const auto* const fused = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    return fused->is_elementwise();
  }
  return any_libtorch_kind([&]<class Kind>(Kind) {
    return Kind::is_elementwise && dynamic_cast<const typename Kind::Optimizer*>(&optimizer);
  });
}

/// An optimizer that reads and writes the archives of `optimizer`, which is_elementwise(), with its
/// defaults and without groups.
inline std::shared_ptr<torch::optim::Optimizer> counterpart_of(
    const torch::optim::Optimizer& optimizer) {
  if (const auto* const fused = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
    return fused->make_counterpart();
  }
  std::shared_ptr<torch::optim::Optimizer> made;
  any_libtorch_kind([&]<class Kind>(Kind) {
    if (!dynamic_cast<const typename Kind::Optimizer*>(&optimizer)) return false;
    const auto& defaults = static_cast<const typename Kind::Options&>(optimizer.defaults());
    made = std::make_shared<typename Kind::Optimizer>(ParamGroups(), defaults);
    return true;
  });
  return made;
}

// Note [The state of a sharded optimizer in files]
// It is written as LibTorch's own optimizer of that kind writes it for whole weights, so any number
// of processes, and an unsharded optimizer, can read it. An optimizer of LibTorch's converts: with
// the shards of this process, as it reads and writes archives of its kind, and with the whole
// weights, of which it needs only the shapes.

/// The processes with the shards of a layout.
class ShardGroup final : public StoredShards {
 public:
  ShardGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, BucketLayout layout)
      : group_(std::move(group)), layout_(std::move(layout)) {}

  const BucketLayout& layout() const { return layout_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  void agree_largest(at::Tensor& number) const override {
    reduce_over("the step of ShardedMasterWeights", *group_, number, c10d::ReduceOp::MAX);
  }

  at::Tensor norm_of_all(const at::Tensor& own, double norm_type) const override {
    TORCH_CHECK_VALUE(norm_type != 0.,
                      "clip_grad_norm_: the 0-norm counts whole gradients, of which "
                      "ShardedMasterWeights have only shards. Pass another norm_type.");
    const InternalOps internal;
    at::Tensor mine = own.reshape({1});
    at::Tensor norms = all_gathered("clip_grad_norm_", mine);
    // Divided by the largest, so powers do not overflow fp32.
    const at::Tensor largest = norms.max().clamp_min_(1e-30);
    return at::linalg_vector_norm(norms.div_(largest), norm_type).mul_(largest);
  }

  void check(const torch::optim::Optimizer& optimizer, const char* call) const override {
    bool all_fit = true;
    for_each_optimizer(optimizer,
                       [&](const torch::optim::Optimizer& one) { all_fit &= is_elementwise(one); });
    TORCH_CHECK_TYPE(
        all_fit, call,
        ": this optimizer has shards of ShardedMasterWeights, and is not known to treat each "
        "element independently. Use ",
        FusedNames::text(/*elementwise_only=*/true),
        ", or LibTorch's Adam, AdamW, SGD, RMSprop or Adagrad; for others use MasterWeights.");
    any_parameter(optimizer, [](const at::Tensor& shard) {
      if (WeightMeta* const meta = weight_meta_of(shard)) meta->has_optimizer = true;
      return false;
    });
  }

  /// `mine` of all processes, concatenated.
  at::Tensor all_gathered(const char* call, at::Tensor& mine) const {
    if (layout_.processes() == 1) return mine.clone();
    at::Tensor all = at::empty({layout_.processes() * mine.numel()}, mine.options());
    collective(call, [&] { start_all_gather(*group_, all, mine)->wait(); });
    return all;
  }

  void gather(const torch::optim::Optimizer& optimizer) override {
    check(optimizer, "save_together");
    const InternalOps internal;
    const bool writes = group_->getRank() == 0;
    const auto sharded = like(optimizer, /*whole=*/false);
    const auto whole = like(optimizer, /*whole=*/true);
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    auto written = archive_of(bytes_of(archive));
    sharded->load(written);
    for_each_state(*sharded, *whole, [&](const State& own, void* key, std::size_t w) {
      auto state = own.clone();
      for_each_tensor_in_state(
          optimizer, *state, [&](at::Tensor& tensor) { tensor = joined_state(w, tensor, writes); });
      if (writes) whole->state()[key] = std::move(state);
    });
    if (writes) gathered_[&optimizer] = whole;
  }

  void save(const torch::optim::Optimizer& optimizer,
            torch::serialize::OutputArchive& archive) override {
    const auto gathered = gathered_.find(&optimizer);
    TORCH_CHECK(
        gathered != gathered_.end(),
        "its state is sharded over several processes. Call save_together() on all of them.");
    gathered->second->save(archive);
    gathered_.erase(gathered);
  }

  void load(torch::optim::Optimizer& optimizer,
            torch::serialize::InputArchive& archive) const override {
    check(optimizer, "TrainingCheckpoint::load");
    const InternalOps internal;
    const auto sharded = like(optimizer, /*whole=*/false);
    const auto whole = like(optimizer, /*whole=*/true);
    load_optimizer(*whole, archive);
    for (std::size_t g = 0; g < whole->param_groups().size(); ++g) {
      sharded->param_groups()[g].set_options(whole->param_groups()[g].options().clone());
    }
    for_each_state(*whole, *sharded, [&](const State& all, void* key, std::size_t w) {
      auto state = all.clone();
      for_each_tensor_in_state(optimizer, *state,
                               [&](at::Tensor& tensor) { tensor = own_part(w, tensor); });
      sharded->state()[key] = std::move(state);
    });
    torch::serialize::OutputArchive own;
    sharded->save(own);
    auto written = archive_of(bytes_of(own));
    load_optimizer(optimizer, written);
  }

  /// This process's shard, padded, of a tensor of the weight's shape.
  at::Tensor own_part(std::size_t w, const at::Tensor& whole) const {
    const BucketedWeight& weight = layout_.weights()[w];
    const at::Tensor laid_out = at::empty_strided(weight.sizes, weight.strides, whole.options());
    laid_out.copy_(whole);
    const at::Tensor part = layout_.shard_of(w, group_->getRank(), laid_out);
    at::Tensor padded = at::zeros({weight.shard_elements}, whole.options());
    padded.narrow(0, 0, part.numel()).copy_(part);
    return padded;
  }

 private:
  using State = torch::optim::OptimizerParamState;

  /// The counterpart of `optimizer`, with its groups and no states, over its shards, or over
  /// tensors without memory in the weights' shapes.
  std::shared_ptr<torch::optim::Optimizer> like(const torch::optim::Optimizer& optimizer,
                                                bool whole) const {
    std::shared_ptr<torch::optim::Optimizer> result = counterpart_of(optimizer);
    for (const auto& group : optimizer.param_groups()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& shard : group.params()) {
        tensors.push_back(whole ? at::zeros({}).expand(layout_.weights()[index_of(shard)].sizes)
                                : shard);
      }
      result->param_groups().emplace_back(std::move(tensors), group.options().clone());
    }
    return result;
  }

  static std::size_t index_of(const at::Tensor& shard) {
    const WeightMeta* const meta = weight_meta_of(shard);
    TORCH_CHECK(meta && meta->shards,
                "it has shards of ShardedMasterWeights and other parameters. Give the others their "
                "own optimizer.");
    return meta->index;
  }

  /// Calls visit(state, key in `to`, weight) for each state of `from`, which has the same groups.
  template <class Visit>
  static void for_each_state(torch::optim::Optimizer& from, torch::optim::Optimizer& to,
                             const Visit& visit) {
    for (std::size_t g = 0; g < from.param_groups().size(); ++g) {
      for (std::size_t i = 0; i < from.param_groups()[g].params().size(); ++i) {
        const at::Tensor& mine = from.param_groups()[g].params()[i];
        const at::Tensor& other = to.param_groups()[g].params()[i];
        const auto state = from.state().find(mine.unsafeGetTensorImpl());
        if (state == from.state().end()) continue;
        const WeightMeta* const meta = weight_meta_of(mine);
        visit(*state->second, other.unsafeGetTensorImpl(), index_of(meta ? mine : other));
      }
    }
  }

  /// The state of a whole weight, in host memory, on process 0.
  at::Tensor joined_state(std::size_t w, const at::Tensor& own, bool writes) const {
    const BucketedWeight& weight = layout_.weights()[w];
    at::Tensor shard = own.contiguous();
    const at::Tensor all = all_gathered("save_together", shard);
    if (!writes) return own;
    at::Tensor whole =
        at::empty_strided(weight.sizes, weight.strides, own.options().device(at::kCPU));
    in_memory_order(whole).copy_(all.narrow(0, 0, weight.elements));
    return whole;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  BucketLayout layout_;
  std::map<const torch::optim::Optimizer*, std::shared_ptr<torch::optim::Optimizer>> gathered_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
