// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. TrainingStepOptions::group: gradients averaged over a process group.

// Not in the umbrella header: it needs LibTorch's distributed part.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>

#include "torchamp/detail/extras/training/parts.h"
#include "torchamp/distributed/checkpoint.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/training_checkpoint.h"
#include "torchamp/version.h"

/// @file
/// With this header a TrainingStep takes a process group:
///
///     const auto group = torchamp::make_process_group();
///     torchamp::TrainingStep train(model, optimizer, {.group = group});
///
/// or `{group, DistributedDataParallelOptions{…}}`. The function that computes the loss calls the
/// model as usual; backward averages the gradients as DistributedDataParallel does, once per
/// window. If masters are ShardedMasterWeightsOptions (distributed/sharded_masters.h), the masters
/// average instead. All processes construct and call the TrainingStep, finish(), save() and load()
/// together; see Note [Collective calls].

namespace TORCHAMP_NAMESPACE::detail {

/// A TrainingStep's process group.
class ProcessStepGroup final : public StepGroup {
 public:
  ProcessStepGroup(ProcessGroupPtr group, const DistributedDataParallelOptions& options)
      : group_(std::move(group)), options_(options) {}

  void broadcast(const torch::nn::Module& model) override { broadcast_module(model, group_); }
  void attach(const std::shared_ptr<torch::nn::Module>& model, Masters* masters) override {
    if (masters && masters->syncs()) {
      masters_ = masters;
    } else {
      net_.emplace(Forward{model}, group_, options_);
    }
  }
  at::Tensor forward(const std::function<at::Tensor()>& loss) override {
    return net_ ? net_->forward(loss) : loss();
  }
  std::shared_ptr<void> no_sync() override {
    if (!net_) return std::make_shared<NoSync>(*masters_->syncs());
    // NOLINTNEXTLINE(modernize-make-shared): it cannot be moved
    return std::shared_ptr<NoSync>(new NoSync(net_->no_sync()));
  }
  void sync_gradients() override {
    if (net_) net_->sync_gradients();  // the Accumulation sends gradients of masters
  }
  const void* find(const std::type_info& type) const override {
    return type == typeid(ProcessGroupPtr) ? &group_ : nullptr;
  }
  void save(TrainingCheckpoint& checkpoint) override { save_together(checkpoint, group_); }
  bool load(TrainingCheckpoint& checkpoint) override { return load_together(checkpoint, group_); }

 private:
  /// A "model" whose forward is any function that computes a loss with the model.
  struct Forward {
    torch::nn::Module& operator*() const { return *model; }
    torch::nn::Module* operator->() const { return model.get(); }
    at::Tensor operator()(const std::function<at::Tensor()>& loss) const { return loss(); }
    std::shared_ptr<torch::nn::Module> model;
  };

  ProcessGroupPtr group_;
  DistributedDataParallelOptions options_;
  std::optional<DistributedDataParallel<Forward>> net_;
  Masters* masters_ = nullptr;  // if the masters average
};

template <>
struct StepGroupOf<c10d::ProcessGroup> {
  static std::unique_ptr<StepGroup> make(const ProcessGroupPtr& group,
                                         const DistributedDataParallelOptions& options = {}) {
    TORCH_CHECK_VALUE(group, "TrainingStep: the group is null. Leave .group out for one process.");
    return std::make_unique<ProcessStepGroup>(group, options);
  }
};

}  // namespace TORCHAMP_NAMESPACE::detail
