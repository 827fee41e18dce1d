// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief DistributedDataParallel: gradients averaged over processes.

// Not in the umbrella header: it needs LibTorch's distributed part.
#if !__has_include(<torch/csrc/distributed/c10d/reducer.hpp>)
#error \
    "torchamp/distributed/data_parallel.h: this LibTorch was built without its distributed part (c10d)."
#endif

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/distributed/collective.h"
#include "torchamp/detail/distributed/reducer.h"
#include "torchamp/detail/distributed/unsynced.h"
#include "torchamp/detail/graph/body.h"
#include "torchamp/detail/modules/call_forward.h"
#include "torchamp/detail/tensor_tree.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

// Note [Collective calls]
// Data-parallel training runs on several processes over LibTorch's c10d. All functions here are
// collective: every process of the group calls them, in the same order. A process that waits for
// another one gets a c10::Error that names the call: at once if that one has died, after the
// group's timeout if it stalls. (From backward(), which LibTorch runs, it gets the std::exception
// that the group's backend throws. NCCL's errors are no exceptions: see add_nccl().) The group is
// of no use after that, and the process should end.
// Groups come from make_process_group() in distributed/process_group.h, or from anywhere else in
// c10d.

/// What make_process_group() returns.
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Gives every process the parameters and buffers of process `root`. All processes of the group
/// call it; see Note [Collective calls] for errors.
inline void broadcast_module(const torch::nn::Module& module, const ProcessGroupPtr& group,
                             int root = 0) {
  detail::broadcast("broadcast_module", group, module.parameters(), root);
  detail::broadcast("broadcast_module", group, module.buffers(), root);
}

/// Makes an overflow on any process one on all, so that all skip the step and their scales stay the
/// same. For GradScalerOptions::agree_found_inf:
///
///     torchamp::GradScaler scaler({.agree_found_inf = torchamp::found_inf_agreement(group)});
///
/// Needed where each process steps parameters of its own; ShardedMasterWeights do this by
/// themselves.
/// DistributedDataParallel averages the gradients, and with them their infs and NaNs, before the
/// scaler looks, so that all processes find the same anyway. Costs one reduction of a single number
/// for each optimizer and iteration. With Gloo the host waits for it, with NCCL the device.
inline std::function<void(at::Tensor&)> found_inf_agreement(ProcessGroupPtr group) {
  return [group = std::move(group)](at::Tensor& found_inf) {
    std::vector<at::Tensor> tensors{found_inf};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    detail::collective("found_inf_agreement", [&] { group->allreduce(tensors, options)->wait(); });
  };
}

/// Replaces the numbers of a tensor by their means over all processes, the same to the bit on each.
/// For PrecisionAuditOptions::average:
///
///     torchamp::PrecisionAudit audit(*model, {.average = torchamp::average_over(group)});
inline std::function<void(at::Tensor&)> average_over(ProcessGroupPtr group) {
  return [group = std::move(group)](at::Tensor& numbers) {
    std::vector<at::Tensor> tensors{numbers};
    detail::collective("average_over", [&] { group->allreduce(tensors)->wait(); });
    numbers.div_(group->getSize());
  };
}

/// What DistributedDataParallel does beyond its default.
struct DistributedDataParallelOptions {
  /// Whether each forward begins with giving all processes the buffers of process 0, such as batch
  /// norm's running statistics.
  bool broadcast_buffers = true;
  /// For models whose forward may leave parameters unused. They are looked for in the graph of the
  /// outputs before each backward, so that forward must not return these in a struct of its own (an
  /// error). Where this is false, an unused parameter is an error in the next forward.
  bool find_unused_parameters = false;
  /// The size of the buckets in which gradients are averaged.
  int64_t bucket_bytes = int64_t{25} * 1024 * 1024;
  /// How gradients are sent, for example c10d::BuiltinCommHookType::FP16_COMPRESS: as fp16. Unset:
  /// in their own dtype.
  std::optional<c10d::BuiltinCommHookType> communication = std::nullopt;
  /// The dtype in which gradients are sent: bf16 or fp16 halve what fp32 ones take on the wire (an
  /// overflow there is an inf that the scaler finds), fp32 doubles what 16-bit ones take, and makes
  /// their sums exact to fp32 before they are rounded. Unset: their own; fp32 for the main
  /// gradients of MasterWeights. An error together with `communication`.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

/// Trains copies of one model on several processes: each computes the gradients of its own part of
/// the batch, and backward averages them over all processes.
///
///     torchamp::DistributedDataParallel net(model, group);
///     torch::optim::SGD optimizer(model->parameters(), 0.1);
///     ...
///     loss_of(net.forward(part), target).backward();   // the gradients are the averages
///     optimizer.step();                                // so that all copies stay the same
///
/// Construction gives all processes the parameters and buffers of process 0; parameters of other
/// shapes than those of process 0 are an error. At most one backward follows each forward. The
/// average of gradients that GradScaler scaled is scaled as well. checkpoint() works, nested too.
/// With MasterWeights, call broadcast_module() first, then make the masters, then this. If they
/// have main_gradients, these are averaged, in fp32 and in buckets of torchamp's own; under
/// no_sync() they add up, and the backward after it averages the sums. A second one for the same
/// main gradients is an error while the first one lives, and so are other masters.
///
/// A bucket of gradients is sent as soon as backward has computed all that go into it, while it
/// goes on with the rest. Construction and forward are collective, see
/// Note [Collective calls]; a forward without gradients sends nothing. An error within a CudaGraph.
///
/// Source: c10d's Reducer, the engine of Python's torch.nn.parallel.DistributedDataParallel.
template <class Model>
class DistributedDataParallel {
 public:
  /// `model`: a module holder or a std::shared_ptr to a module, on one device.
  DistributedDataParallel(Model model, ProcessGroupPtr group,
                          DistributedDataParallelOptions options = {})
      : model_(std::move(model)),
        options_(options),
        reducer_(*model_, std::move(group),
                 {options.bucket_bytes, options.find_unused_parameters, options.communication,
                  options.reduce_dtype}) {}

  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// Calls the model's forward. The backward of what it returns averages the gradients.
  template <class... Inputs>
  auto forward(Inputs&&... inputs) {
    const bool reduces = torch::autograd::GradMode::is_enabled() && syncs_;
    TORCH_CHECK(!reduces || !detail::GraphBody::is_running(),
                "DistributedDataParallel: its gradients are averaged on streams of its own, which "
                "the iteration of a CudaGraph cannot hold. Run that iteration eagerly, with "
                "{.enabled = false}.");
    using Outputs = std::decay_t<decltype(detail::call_forward(model_, inputs...))>;
    TORCH_CHECK_TYPE(!options_.find_unused_parameters || detail::ShowsItsTensors<Outputs>::value,
                     "DistributedDataParallel: find_unused_parameters starts from the tensors that "
                     "forward returns, but its type may hold some out of sight. Return tensors, or "
                     "vectors, arrays, tuples, pairs, optionals and std::maps of them.");
    if (reduces) reducer_.before_forward();
    if (reduces && options_.broadcast_buffers && model_->is_training()) {
      detail::broadcast("DistributedDataParallel::forward", reducer_.group(), model_->buffers(), 0);
    }
    auto outputs = detail::call_forward(model_, inputs...);
    if (torch::autograd::GradMode::is_enabled()) set_synced(reduces);
    if (reduces) {
      reducer_.prepare_for_backward(options_.find_unused_parameters ? detail::tensors_of(outputs)
                                                                    : std::vector<at::Tensor>());
    }
    return outputs;
  }

  /// The model that was given.
  const Model& module() const { return model_; }
  /// The processes that average.
  const ProcessGroupPtr& group() const { return reducer_.group(); }

  /// Averages the gradients that backward passes within no_sync() have left, as the next one
  /// outside of it would: for a step that comes earlier than planned, before gradients are taken,
  /// unscaled or clipped. In the before_unscale() of an Accumulation, say, whose last window may be
  /// incomplete. Does nothing where the last forward with gradients was outside of no_sync().
  /// Collective; reads the device.
  void sync_gradients() {
    if (is_synced_) return;
    TORCH_CHECK(!detail::GraphBody::is_running(),
                "DistributedDataParallel::sync_gradients: processes exchange gradients, which the "
                "iteration of a CudaGraph cannot hold. Run that iteration eagerly, with "
                "{.enabled = false}.");
    reducer_.average_now(*model_);
    set_synced(true);
  }

  /// A region whose forwards and their backwards leave the gradients as they are, added up on each
  /// process: for all micro-batches of a step but the last; a step that comes earlier is preceded
  /// by sync_gradients(), or the processes' weights part.
  ///
  ///     for (int i = 0; i < parts; ++i) {
  ///       const auto no_sync = net.no_sync(/*enabled=*/i + 1 < parts);
  ///       loss_of(net.forward(part[i]), target[i]).backward();
  ///     }
  class NoSync {
   public:
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;
    ~NoSync() { syncs_ = before_; }

   private:
    friend class DistributedDataParallel;
    NoSync(bool& syncs, bool enabled) : syncs_(syncs), before_(syncs) {
      if (enabled) syncs = false;
    }
    bool& syncs_;
    bool before_;
  };

  /// Begins a region in which gradients are not averaged; with `enabled` false, one that changes
  /// nothing.
  [[nodiscard]] NoSync no_sync(bool enabled = true) { return NoSync(syncs_, enabled); }

 private:
  void set_synced(bool is_synced) {
    is_synced_ = is_synced;
    if (!unsynced_ && !is_synced && group()->getSize() > 1) {
      unsynced_ = detail::UnsyncedGradients::of(model_->parameters());
    }
    if (unsynced_) unsynced_->are_unsynced = !is_synced;
  }

  Model model_;
  DistributedDataParallelOptions options_;
  detail::GradientReducer reducer_;
  bool syncs_ = true;
  bool is_synced_ = true;  // no backward within no_sync() has left gradients
  std::shared_ptr<detail::UnsyncedGradients> unsynced_{};  // from the first no_sync() on
};

}  // namespace TORCHAMP_NAMESPACE
