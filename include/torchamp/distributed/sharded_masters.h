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

/// Options of ShardedMasterWeights. All processes must pass equal options.
struct ShardedMasterWeightsOptions {
  using Masters = ShardedMasterWeights;  ///< the class of these options
  using Group = ProcessGroupPtr;         ///< the type of their group

  /// Like MasterWeightsOptions::dtype: fp16 or bf16.
  at::ScalarType dtype = at::kHalf;
  /// Like MasterWeightsOptions::keep_fp32. These weights are also sharded.
  std::vector<std::string> keep_fp32 = {};
  /// Like MasterWeightsOptions::keep_norms.
  bool keep_norms = true;
  /// How each process stores its shards of the masters: full takes 4 bytes per weight of its shard,
  /// split 2 (bf16 and fused optimizers only).
  MasterStorage storage = MasterStorage::full;
  /// Like DistributedDataParallelOptions::find_unused_parameters.
  bool find_unused_parameters = false;
  /// Like DistributedDataParallelOptions::bucket_bytes; a bucket holds at least one whole weight.
  int64_t bucket_bytes = int64_t{25} * 1024 * 1024;
  /// The dtype in which gradients are sent: fp32 unless set. bf16 or fp16 halve the bytes; sums are
  /// still in fp32. With the model's own 16-bit dtype, gradients of 16-bit weights are sent without
  /// rounding, unless they were accumulated under no_sync(), in fp32. An overflow in fp16 becomes
  /// an inf, for which the scaler skips the step.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

/// MasterWeights for several processes, each of which trains on its part of the batch. Every
/// process holds the whole model in 16 bits, but masters and optimizer states only for its shard
/// (ZeRO-1). With n processes and AdamW this takes 2 + 12/n bytes per weight instead of 14.
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
/// each gradient at once, sends full buckets while it runs, and writes the averages over all
/// processes to the shards' gradients. clip_grad_norm_ clips by the norm of the shards of all
/// processes, which differs from the norm on one process only by rounding. A GradScaler skips a
/// step on all processes or on none, without agree_found_inf. copy_to_model() gathers the 16-bit
/// weights. checkpoint() works. If backward() throws after it has begun to send, the run cannot
/// continue: resume from a checkpoint.
///
/// Sums are in fp32, in the order of the ranks. If the optimizer's kernel treats all elements
/// alike, the weights are bitwise identical to the weights that one process computes from the same
/// gradients. ATen's CPU kernels do not treat them alike: they process the last elements of a
/// tensor, or of a thread's part, without vector instructions. A shard ends at other elements than
/// the whole weight, so these elements may differ by a rounding in each step. Two runs on CPUs
/// compute the same gradients only with the same number of threads, because LibTorch's layer norm
/// adds the gradients of its weight by thread.
///
/// save_together() of a TrainingCheckpoint with masters and optimizer gathers both. Its file holds
/// whole weights and states: load_shared() reads it on any number of processes, and a program with
/// MasterWeights also reads it. For other files, see gather().
///
/// Optimizers must treat each element independently: the fused optimizers except FusedMuon, and
/// LibTorch's Adam, AdamW, SGD, RMSprop and Adagrad. With any other optimizer GradScaler::step,
/// unscale_ and check_optimizer() throw. Without a scaler, LibTorch's own optimizers need one call
/// of check_optimizer(); otherwise copy_to_model() throws.
///
/// Construction, backward(), clipping, the scaler's step and copy_to_model() are collective: all
/// processes call them equally often, see Note [Collective calls]. Buffers stay local;
/// broadcast_module() makes them equal. Not in a CudaGraph. One thread at a time. Source: ZeRO
/// (Rajbhandari et al., 2020), stage 1.
class ShardedMasterWeights final : public detail::MastersOfModel {
 public:
  /// Casts the parameters of `model`, in place, and creates this process's shards of their masters.
  /// Errors, before anything is changed: all errors of MasterWeights; a trained parameter that is
  /// not fp32, fp16 or bf16; a 16-bit parameter that keep_fp32 or keep_norms selects; a
  /// reduce_dtype that is not fp32, fp16 or bf16; a model or an option that differs between
  /// processes. Until the constructor returns, the weights exist in fp32 and in `dtype`. If memory
  /// runs out, the model has the values of process 0, in fp32.
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

  /// This process's shards of the masters, for the optimizer, in the model's order. Each shard is a
  /// tensor of one dimension, of the same size on all processes. Parameters that do not require
  /// grad or have no elements are left out.
  using MastersOfModel::parameters;

  /// parameters(), with their names in the model: for parameter groups. Select by name: every shard
  /// has one dimension.
  inline std::vector<std::pair<std::string, at::Tensor>> named_parameters() const override;

  /// Does nothing, because backward() has already taken the gradients. For programs that also run
  /// with MasterWeights.
  using Masters::take_gradients;

  /// Sends gradients that backward passes under no_sync() have accumulated. Call it if a step comes
  /// before the last micro-batch. An Accumulation's flush() calls it. Does nothing if there are no
  /// such gradients. Collective.
  void sync_gradients() {
    if (scatter_->any()) scatter_->send();
  }

  /// After the optimizer's step, taken or skipped: gathers the new weights of all processes into
  /// the model, in 16 bits, or in fp32 if they stay fp32. Collective. Error, before anything is
  /// changed: gradients under no_sync() were not sent, so the step has not used them. Warns once
  /// if the program has written to the model's weights since the last call: these values are lost.
  inline void copy_to_model() override;

  /// Throws unless `optimizer` treats each element independently. Call it once if you use one of
  /// LibTorch's own optimizers without a scaler; otherwise torchamp calls it.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const {
    shards_->check(optimizer, "ShardedMasterWeights::check_optimizer");
  }

  /// A region in which backward passes send nothing: gradients accumulate on each process, in fp32,
  /// in the model's own .grad (zero_grad() drops them). The next backward outside the region sends
  /// the sums. Use it for all micro-batches of a step except the last; if the step comes earlier,
  /// first call sync_gradients(). Without such a region every backward sends, and the averages
  /// accumulate, with less memory and more traffic. Do not use it with
  /// AccumulationOptions::drop_bad, which checks each micro-batch.
  using NoSync = detail::NoSync;

  /// Begins such a region. If `enabled` is false, the region has no effect.
  [[nodiscard]] NoSync no_sync(bool enabled = true) { return NoSync(scatter_->sends(), enabled); }

  /// Gathers the masters of all processes in the host memory of process 0. Process 0 may then call
  /// save(), until the next copy_to_model(). Collective; synchronises.
  inline void gather() override;

  /// For torch::save(masters, path) on process 0 after gather(): writes the same file as
  /// torch::save(model, path), with the masters' fp32 values. An fp32 model, MasterWeights and
  /// ShardedMasterWeights can load it. With a `dtype` after the archive, weights that the model
  /// keeps in 16 bits are written in that dtype.
  using MastersOfModel::save;

  /// For torch::load(masters, path) on every process: fills the model, and this process's shards,
  /// from a file of save(), or of torch::save of a model with the same names and shapes. If it
  /// throws, nothing is changed.
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
  std::vector<std::size_t> by_index_;  // for each position in the layout, its weight
  std::shared_ptr<detail::ShardGroup> shards_;
  std::vector<at::Tensor> shares_;  // per bucket: the shards, or the shards' lower bits
  std::shared_ptr<detail::GradientScatter> scatter_;
  std::vector<at::Tensor> whole_;  // on process 0, after gather()
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/extras/distributed/sharded_masters_bodies.h"  // IWYU pragma: export
