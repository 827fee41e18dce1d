// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. ShardedMasterWeights: master weights and optimizer states, sharded over processes.

// Not in the umbrella header: it needs LibTorch's distributed part.
#if !__has_include(<torch/csrc/distributed/c10d/reducer.hpp>)
#error \
    "torchamp/distributed/sharded_masters.h: this LibTorch was built without its distributed part (c10d)."
#endif

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/distributed/gradient_scatter.h"
#include "torchamp/detail/extras/distributed/shard_group.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/master_weights.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

class ShardedMasterWeights;

/// Options of ShardedMasterWeights, equal on all processes.
struct ShardedMasterWeightsOptions {
  using Masters = ShardedMasterWeights;  ///< made with these options
  using Group = ProcessGroupPtr;         ///< and with such a group

  /// Like MasterWeightsOptions::dtype: fp16 or bf16.
  at::ScalarType dtype = at::kHalf;
  /// The same as MasterWeightsOptions::keep_fp32. These weights are also sharded.
  std::vector<std::string> keep_fp32 = {};
  /// Like MasterWeightsOptions::keep_norms.
  bool keep_norms = true;
  /// How each process stores its shards of the masters: full takes 4 bytes per weight of its shard,
  /// split 2 (bf16 and fused optimizers only).
  MasterStorage storage = MasterStorage::full;
  /// Like DistributedDataParallelOptions::find_unused_parameters.
  bool find_unused_parameters = false;
  /// As DistributedDataParallelOptions::bucket_bytes; a bucket holds at least one whole weight.
  int64_t bucket_bytes = int64_t{25} * 1024 * 1024;
  /// The dtype in which gradients are sent: fp32 unless set. bf16 or fp16 halve the bytes; sums are
  /// still in fp32. The model's own 16-bit dtype loses nothing if every backward sends; an overflow
  /// in fp16 is an inf that the scaler finds.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

/// MasterWeights for several processes, each of which trains on its part of the batch: every
/// process has the whole model in 16 bits, and masters and optimizer states of its shard only
/// (ZeRO-1). With n processes and AdamW that is 2 + 12/n bytes per weight instead of 14.
///
///     torchamp::ShardedMasterWeights masters(model, group, {.dtype = torch::kBFloat16});
///     torchamp::FusedAdamW optimizer(masters.parameters(), torch::optim::AdamWOptions(1e-3));
///     ...
///     optimizer.zero_grad();
///     scaler.scale(loss_of(model->forward(part), target)).backward();
///     torchamp::clip_grad_norm_(scaler, optimizer, 1.);
///     scaler.step(optimizer);
///     scaler.update();
///     masters.copy_to_model();
///
/// Construction copies the parameters and buffers of process 0 to all processes. backward() frees
/// each gradient as soon as it is made, sends full buckets while it runs, and leaves the averages
/// over all processes in the shards. Sums are in fp32, in the order of the ranks, so elementwise
/// optimizers compute the weights of one process that adds the same gradients, bit for bit if a
/// kernel treats all elements alike. ATen's CPU kernels may not: they process the last elements of
/// a tensor, or of a thread's part of it, without vector instructions; a shard ends at other
/// elements than the whole weight, and these may differ by a rounding in each step. On a CPU
/// gradients are the same only with the same number of threads, since LibTorch's layer norm sums
/// those of its weight by thread. clip_grad_norm_ uses the norm of all shards, exact to its
/// rounding. A GradScaler skips a step on all processes or on none, without agree_found_inf.
/// copy_to_model() gathers the 16-bit weights. checkpoint() works. An exception in a backward()
/// that has begun to send ends the run: resume from a checkpoint. A TrainingCheckpoint with masters
/// and optimizer gathers them in save_together(); its file holds whole weights and states, and
/// load_shared() reads it on any number of processes, as does a program with MasterWeights. For
/// other files, see gather().
///
/// Optimizers must treat each element independently: the fused ones except FusedMuon, and
/// LibTorch's Adam, AdamW, SGD, RMSprop and Adagrad. Any other is an error in GradScaler::step and
/// unscale_ or, without a scaler, in copy_to_model(); see check_optimizer().
///
/// Construction, backward(), clipping, the scaler's step and copy_to_model() are collective: all
/// processes call them equally often, see Note [Collective calls]. Buffers stay local;
/// broadcast_module() makes them equal. Not within a CudaGraph. One thread at a time. Source: ZeRO
/// (Rajbhandari et al., 2020), stage 1.
class ShardedMasterWeights final : public detail::MastersOfModel {
 public:
  /// Casts the parameters of `model`, in place, and creates this process's shards of their masters.
  /// Errors, before anything is changed: those of MasterWeights; a trained parameter that is not
  /// fp32, fp16 or bf16, or a 16-bit one that is to stay fp32; a reduce_dtype that is not fp32,
  /// fp16 or bf16; a model or an option that differs between processes. If memory runs out, the
  /// model has the values of process 0, in fp32: until the constructor returns, the weights exist
  /// in fp32 and in `dtype`.
  ShardedMasterWeights(std::shared_ptr<torch::nn::Module> model, ProcessGroupPtr group,
                       ShardedMasterWeightsOptions options = {});

  /// For a module holder, as TORCH_MODULE makes it.
  template <class Module>
  ShardedMasterWeights(const torch::nn::ModuleHolder<Module>& model, ProcessGroupPtr group,
                       ShardedMasterWeightsOptions options = {})
      : ShardedMasterWeights(std::shared_ptr<torch::nn::Module>(model.ptr()), std::move(group),
                             std::move(options)) {}

  ShardedMasterWeights(const ShardedMasterWeights&) = delete;
  ShardedMasterWeights& operator=(const ShardedMasterWeights&) = delete;

  /// This process's shards of the masters, in the model's order, for the optimizer: one vector for
  /// each parameter that requires grad and has an element, of the same size on all processes.
  using MastersOfModel::parameters;

  /// parameters(), with their names in the model: for parameter groups. Select by name: every shard
  /// has one dimension.
  inline std::vector<std::pair<std::string, at::Tensor>> named_parameters() const override;

  /// Does nothing, since backward() has taken the gradients; for programs written for
  /// MasterWeights.
  using Masters::take_gradients;

  /// Sends the gradients of backward passes within no_sync(), before an early step. An
  /// Accumulation's flush() calls it. Does nothing if there are none. Collective.
  void sync_gradients() {
    if (scatter_->any()) scatter_->send();
  }

  /// After the optimizer's step, taken or skipped: gathers the new weights of all processes, in 16
  /// bits (or fp32 for those that stay fp32), into the model. Collective. An error, before anything
  /// is changed, if gradients within no_sync() were not sent: the step has missed them. Warns once
  /// if the model's weights were written to since the last call: those values are lost.
  inline void copy_to_model() override;

  /// Throws unless `optimizer` treats each element independently. Call it once if you use one of
  /// LibTorch's own optimizers without a scaler; otherwise it is called for you.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const {
    shards_->check(optimizer, "ShardedMasterWeights::check_optimizer");
  }

  /// A region whose backward passes send nothing: gradients accumulate on each process, in fp32, in
  /// the model's own .grad (zero_grad() drops them), and the next backward outside it sends the
  /// sums. For all micro-batches of a step but the last; before an earlier step call
  /// sync_gradients(). Without it every backward sends, and the averages accumulate, with less
  /// memory and more traffic. Not with AccumulationOptions::drop_bad, which checks each
  /// micro-batch.
  using NoSync = detail::NoSync;

  /// Begins such a region; with `enabled` false, one without effect.
  [[nodiscard]] NoSync no_sync(bool enabled = true) { return NoSync(scatter_->sends(), enabled); }

  /// Gathers the masters of all processes in the host memory of process 0, which may then save()
  /// them until the next copy_to_model(). Collective; synchronises.
  inline void gather() override;

  /// For torch::save(masters, path) on process 0 after gather(): writes what torch::save(model,
  /// path) writes, with the masters' fp32 values, for any fp32 model, MasterWeights and
  /// ShardedMasterWeights. With a `dtype` after the archive, weights that the model keeps in 16
  /// bits are written in that dtype.
  using MastersOfModel::save;

  /// For torch::load(masters, path) on every process: fills the model, and this process's shards,
  /// from a file of save(), or of torch::save of such a model. All or nothing.
  using MastersOfModel::load;

  /// For TrainingCheckpoint: returns a function that restores the present weights on this process.
  /// Valid while these masters live.
  using MastersOfModel::keep;

  /// The options of construction.
  const ShardedMasterWeightsOptions& options() const { return options_; }
  /// The process group.
  const ProcessGroupPtr& group() const { return shards_->group(); }

 private:
  bool* syncs() override { return &scatter_->sends(); }
  inline void check_saved(const std::string& call) const override;
  inline at::Tensor value_of(const Weight& weight) const override;
  inline void set(const Weight& weight, const at::Tensor& value,
                  const at::Tensor& parameter) const override;
  inline void note_copied() override;
  void check_same_everywhere(const ProcessGroupPtr& group,
                             const detail::BucketLayout& layout) const;
  void make_shards();
  void check_stepped(const std::string& call) const;
  at::Tensor gathered(const char* call, std::size_t b, at::ScalarType dtype) const;

  ShardedMasterWeightsOptions options_;
  std::vector<std::size_t> by_index_;  // the weight of each in the layout
  std::shared_ptr<detail::ShardGroup> shards_;
  std::vector<at::Tensor> shares_;  // per bucket: the shards, or their lower bits
  std::shared_ptr<detail::GradientScatter> scatter_;
  std::vector<at::Tensor> whole_;  // on process 0, after gather()
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/extras/distributed/sharded_masters-inl.h"  // IWYU pragma: export
