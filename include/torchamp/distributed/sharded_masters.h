// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief ShardedMasterWeights: master weights and optimizer states, spread over processes.

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
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/distributed/gradient_scatter.h"
#include "torchamp/detail/distributed/shard_group.h"
#include "torchamp/detail/masters/master_meta.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/master_weights.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

class ShardedMasterWeights;

/// How ShardedMasterWeights keep and exchange weights. All processes give the same.
struct ShardedMasterWeightsOptions {
  using Masters = ShardedMasterWeights;  ///< what is made with them
  using Group = ProcessGroupPtr;         ///< and with a group

  /// As MasterWeightsOptions::dtype: fp16 or bf16.
  at::ScalarType dtype = at::kHalf;
  /// As MasterWeightsOptions::keep_fp32. What stays fp32 is sharded, too.
  std::vector<std::string> keep_fp32 = {};
  /// As MasterWeightsOptions::keep_norms.
  bool keep_norms = true;
  /// How each process keeps its pieces of the masters: full takes 4 bytes for each of its weights,
  /// split 2 (bf16 and fused optimizers only).
  MasterStorage storage = MasterStorage::full;
  /// For models whose forward may leave parameters unused. Each backward then asks all processes
  /// which were, and reads the device. Where this is false, an unused parameter is an error of
  /// backward().
  bool find_unused_parameters = false;
  /// The size of the buckets in which gradients are sent; one holds at least a whole weight.
  int64_t bucket_bytes = int64_t{25} * 1024 * 1024;
  /// The dtype in which gradients are sent: fp32 unless it is set. bf16 or fp16 halve what they
  /// take on the wire; sums are made in fp32 all the same. The model's own 16-bit dtype loses
  /// nothing where every backward sends; an overflow in fp16 is an inf that the scaler finds.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

/// MasterWeights for several processes, each of which trains with its part of the batch: every
/// process keeps the whole model in 16 bits, and masters and optimizer states for its share alone
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
/// Construction gives all processes the parameters and buffers of process 0. backward() frees each
/// gradient as it makes it, sends full buckets while it goes on, and leaves the averages over all
/// processes to the pieces: sums in fp32, in the order of the ranks, so that elementwise optimizers
/// make of the weights what one process would that adds up the same gradients: bit for bit where a
/// kernel treats all elements alike. (ATen's CPU kernels take the last elements of a tensor, and of
/// a thread's part of it, which fill no vector, one by one; these are others in a piece than in the
/// whole, and may differ by a rounding in each step.) clip_grad_norm_ takes the norm of all pieces,
/// right to its rounding, and a GradScaler skips a step on all processes or on none, without
/// agree_found_inf. copy_to_model() gathers the 16-bit weights. checkpoint() works. An exception in
/// a backward() that has begun to send ends the run: the processes go on from a checkpoint. For
/// files, see gather(); a TrainingCheckpoint that has the masters and the optimizer calls it by
/// itself in save_together(). Its file holds whole weights and states: load_shared() reads it on
/// any number of processes, and so does a program with MasterWeights.
///
/// Optimizers are those that treat each element by itself: the fused ones, and LibTorch's Adam,
/// AdamW, SGD, RMSprop and Adagrad. Any other is an error of GradScaler::step and unscale_, and,
/// where no scaler is used, of copy_to_model(); see check_optimizer().
///
/// Construction, backward(), clipping, the scaler's step and copy_to_model() are collective: every
/// process calls them equally often, see Note [Collective calls]. Buffers stay each process's own;
/// broadcast_module() makes them alike. Not within a CudaGraph. One thread at a time.
///
/// Source: ZeRO (Rajbhandari et al., 2020), stage 1.
class ShardedMasterWeights final : public detail::MastersOfModel {
 public:
  /// Casts the parameters of `model`, in place, and keeps this process's pieces of their masters.
  /// Errors, before anything is changed: those of MasterWeights; a reduce_dtype that is not fp32,
  /// fp16 or bf16; a model or an option that is another on another process. Where memory runs out,
  /// the model has the values of process 0, in fp32: until it returns, the weights are there in
  /// fp32 and in `dtype`.
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

  /// This process's pieces of the masters, in the model's order, for the optimizer: vectors, one of
  /// every parameter that needs a gradient, of the same size on all processes.
  using MastersOfModel::parameters;

  /// What parameters() returns, with the names that the model has for them: for parameter groups.
  /// Go by these, or by the parameter of that name: every piece has one dimension.
  inline std::vector<std::pair<std::string, at::Tensor>> named_parameters() const override;

  /// Does nothing: backward() has taken the gradients. For programs that were written for
  /// MasterWeights.
  using Masters::take_gradients;

  /// Sends what backward passes within no_sync() have left, as the next one outside of it would:
  /// for a step that comes earlier than planned. An Accumulation's flush() does it. Nothing if
  /// there is none. Collective.
  void sync_gradients();

  /// After the optimizer's step, taken or skipped: gathers the new weights of all processes, in 16
  /// bits (those that stay fp32, in fp32), and gives them to the model. Collective. An error,
  /// before anything is changed, if gradients within no_sync() were not sent: the step has missed
  /// them. A warning, once, if others have written to the model's weights since the last call: what
  /// they wrote is lost.
  inline void copy_to_model() override;

  /// Throws unless `optimizer` treats each element by itself. A program that uses one of LibTorch's
  /// own optimizers without a scaler calls this once; elsewhere it is done for it.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const;

  /// A region whose backward passes send nothing: gradients add up on each process, in fp32, in the
  /// model's own .grad (whose zero_grad() drops them), and the next backward outside of it sends
  /// the sums. For all micro-batches of a step but the last; a step that comes earlier is preceded
  /// by sync_gradients(). Without it every backward sends, and the averages add up, which takes
  /// less memory and more traffic. Not with a SafeAccumulation, which looks at each micro-batch.
  using NoSync = detail::NoSync;

  /// Begins a region in which backward sends nothing; with `enabled` false, one that changes
  /// nothing.
  [[nodiscard]] NoSync no_sync(bool enabled = true) { return NoSync(scatter_->sends(), enabled); }

  /// Brings the masters of all processes to the host memory of process 0, which may then save()
  /// them until the next copy_to_model(). Collective; reads the device.
  inline void gather() override;

  /// For torch::save(masters, path) on process 0 after gather(): what torch::save(model, path)
  /// writes, but with the masters' values, in fp32. Any fp32 model, MasterWeights and
  /// ShardedMasterWeights read it. With a `dtype` behind the archive, weights that the model keeps
  /// in 16 bits are written in that one.
  using MastersOfModel::save;

  /// For torch::load(masters, path) on every process: fills the model, and this process's pieces,
  /// from what save(), or torch::save of such a model, has written. All or nothing.
  inline void load(torch::serialize::InputArchive& archive) override;

  /// For TrainingCheckpoint: what brings back the weights of now, on this process.
  inline std::function<void()> keep() override;

  /// What they were made with.
  const ShardedMasterWeightsOptions& options() const { return options_; }
  /// The processes.
  const ProcessGroupPtr& group() const { return shards_->group(); }

 private:
  struct Weight {
    std::string name;
    at::Tensor parameter;     // of the model
    bool is_narrow;           // kept in 16 bits
    bool is_sharded = false;  // there is a piece
    at::Tensor piece{};
    std::size_t index = 0;  // in the layout
  };

  bool* syncs() override { return &scatter_->sends(); }
  inline void check_saved(const std::string& call) const override;
  inline at::Tensor value_of(const at::Tensor& parameter, at::ScalarType narrow) const override;
  void check_same_everywhere(const ProcessGroupPtr& group,
                             const detail::BucketLayout& layout) const;
  void make_pieces();
  void set(const Weight& weight, const at::Tensor& value, const at::Tensor& parameter) const;
  void check_stepped(const char* call) const;

  ShardedMasterWeightsOptions options_;
  std::vector<Weight> weights_;
  std::vector<std::size_t> by_index_;  // the weight of each in the layout
  std::shared_ptr<detail::ShardGroup> shards_;
  std::vector<at::Tensor> shares_;  // for each bucket: the pieces, or what they lack in the model
  std::shared_ptr<detail::GradientScatter> scatter_;
  std::vector<at::Tensor> whole_;  // on process 0, after gather()
  bool warned_of_written_ = false;
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/distributed/sharded_masters_impl.h"  // IWYU pragma: export
