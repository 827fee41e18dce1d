// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. DistributedDataParallel: gradients averaged over processes.

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
#include <utility>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/extras/distributed/collective.h"
#include "torchamp/detail/extras/distributed/reducer.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/detail/extras/shared/tensor_tree.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

// Note [Collective calls]
// Data-parallel training runs on several processes over LibTorch's c10d. All functions here are
// collective: every process of the group calls them, in the same order. If another process dies, a
// waiting process gets a c10::Error that names the call, at once; if another process stalls, after
// the group's timeout. In backward(), which LibTorch runs, it gets the std::exception of the
// group's backend. NCCL does not report errors by exceptions: see add_nccl(). After such an error
// the group is unusable, and the process should end. Create groups by make_process_group() in
// distributed/process_group.h, or by c10d.

/// The type of a process group.
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Copies the parameters and buffers of process `root` to all processes, which call it together;
/// see Note [Collective calls] for errors.
inline void broadcast_module(const torch::nn::Module& module, const ProcessGroupPtr& group,
                             int root = 0) {
  detail::broadcast("broadcast_module", group, module.parameters(), root);
  detail::broadcast("broadcast_module", group, module.buffers(), root);
}

/// Returns a function for GradScalerOptions::agree_found_inf: an overflow on any process counts on
/// all processes, so all skip the step and their scales stay equal.
///
///     torchamp::GradScaler scaler({.agree_found_inf = torchamp::found_inf_agreement(group)});
///
/// Needed if each process steps its own parameters (ShardedMasterWeights do this themselves). With
/// DistributedDataParallel it is not needed, because averaging also spreads infs and NaNs. Costs
/// one reduction of one number per optimizer and iteration: with Gloo the host waits for it, with
/// NCCL the device.
inline std::function<void(at::Tensor&)> found_inf_agreement(ProcessGroupPtr group) {
  return [group = std::move(group)](at::Tensor& found_inf) {
    detail::reduce_over("found_inf_agreement", *group, found_inf, c10d::ReduceOp::MAX);
  };
}

/// Returns a function for PrecisionAuditOptions::average. It replaces the elements of a tensor by
/// their means over all processes, bitwise identical on each process.
///
///     torchamp::PrecisionAudit audit(*model, {.average = torchamp::average_over(group)});
inline std::function<void(at::Tensor&)> average_over(ProcessGroupPtr group) {
  return [group = std::move(group)](at::Tensor& numbers) {
    detail::reduce_over("average_over", *group, numbers);
    numbers.div_(group->getSize());
  };
}

/// Options of DistributedDataParallel.
struct DistributedDataParallelOptions {
  /// Whether each forward in training mode first copies the buffers of process 0, such as batch
  /// norm's running statistics, to all processes.
  bool broadcast_buffers = true;
  /// True: forward may leave parameters unused; each backward then collects the unused parameters
  /// of all processes, and synchronises. False: if a parameter is unused, backward() throws.
  bool find_unused_parameters = false;
  /// Gradients are averaged in buckets. A bucket is full at this number of bytes. In a small model
  /// it is full earlier: at an eighth of all gradients, or at 1 MiB if an eighth is less. The first
  /// bucket is full at 1 MiB, so that it is sent early.
  int64_t bucket_bytes = int64_t{25} * 1024 * 1024;
  /// How gradients are sent, by c10d's names: FP16_COMPRESS is reduce_dtype torch::kHalf;
  /// ALLREDUCE, the default, keeps their dtype.
  std::optional<c10d::BuiltinCommHookType> communication = std::nullopt;
  /// The dtype in which gradients are sent. bf16 or fp16 halve the bytes of fp32 gradients; an
  /// overflow becomes an inf, for which the scaler skips the step. fp32 doubles the bytes of 16-bit
  /// gradients, and adds them in fp32 before rounding. Unset: the gradients' dtype; for the main
  /// gradients of MasterWeights fp32. Error: `communication` is also set.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

/// Trains replicas of a model on several processes: each computes the gradients of its part of the
/// batch, and backward averages them over all processes.
///
///     torchamp::DistributedDataParallel net(model, group);
///     torch::optim::SGD optimizer(model->parameters(), 0.1);
///     ...
///     loss_of(net.forward(part), target).backward();   // averages the gradients
///     optimizer.step();                                // the replicas stay equal
///
/// Construction copies the parameters and buffers of process 0 to all processes; if the shapes
/// differ, it throws. Call backward() at most once after each forward(): a second backward() does
/// not average its gradients. The average of scaled gradients is also scaled. checkpoint() works,
/// even if calls are nested.
///
/// With MasterWeights, first call broadcast_module(), then create the masters, then this object.
/// With main_gradients, the masters' gradients are averaged, in fp32; under no_sync() they
/// accumulate, and the next backward averages the sums. Errors, while this object averages main
/// gradients: a second DistributedDataParallel for them; new MasterWeights for the same model.
///
/// Backward sends a bucket as soon as all gradients in it are computed, while it computes the
/// others. Construction and forward are collective, see Note [Collective calls]; a forward without
/// gradients sends nothing. Error: a call in a CudaGraph. One thread at a time. Source: Python's
/// torch.nn.parallel.DistributedDataParallel (Li et al., 2020).
template <class Model>
class DistributedDataParallel {
 public:
  /// `model`: a module holder or a std::shared_ptr to a module, on one device.
  DistributedDataParallel(Model model, const ProcessGroupPtr& group,
                          DistributedDataParallelOptions options = {})
      : model_(std::move(model)),
        options_(options),
        averages_(detail::make_averages(*model_, group, wire_dtype(options), options.bucket_bytes,
                                        options.find_unused_parameters)) {}

  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// Calls the model's forward. The backward of its result averages the gradients.
  template <class... Inputs>
  auto forward(Inputs&&... inputs) {
    const bool reduces = torch::autograd::GradMode::is_enabled() && syncs_;
    if (reduces) {
      detail::GraphBody::check(
          "DistributedDataParallel: it averages gradients on its own streams, which the iteration "
          "of a CudaGraph cannot hold. Run that iteration eagerly, with {.enabled = false}.");
    }
    if (reduces && options_.broadcast_buffers && model_->is_training()) {
      detail::broadcast("DistributedDataParallel::forward", group(), model_->buffers(), 0);
    }
    auto outputs = detail::call_forward(model_, inputs...);
    if (torch::autograd::GradMode::is_enabled()) leave_local(!reduces);
    if (reduces) averages_->prepare_for_backward();
    return outputs;
  }

  /// The model.
  const Model& module() const { return model_; }
  /// The process group.
  const ProcessGroupPtr& group() const { return averages_->group(); }

  /// Averages gradients that backward passes under no_sync() have accumulated. If a step comes
  /// before the last micro-batch, call this first, before gradients are taken, unscaled or clipped.
  /// Example: in before_unscale() of an Accumulation, because its last window may be incomplete.
  /// Does nothing if the last forward with gradients was outside no_sync(). Collective;
  /// synchronises.
  void sync_gradients() {
    if (!averages_->are_local) return;
    detail::GraphBody::check(
        "DistributedDataParallel::sync_gradients: processes exchange gradients, which the "
        "iteration of a CudaGraph cannot hold. Run that iteration eagerly, with {.enabled = "
        "false}.");
    averages_->average_now();
    leave_local(false);
  }

  /// A region in which backward passes do not average: gradients accumulate on each process. Use it
  /// for all micro-batches of a step except the last. If the step comes earlier, first call
  /// sync_gradients(); otherwise the replicas diverge.
  ///
  ///     for (int i = 0; i < parts; ++i) {
  ///       const auto no_sync = net.no_sync(/*enabled=*/i + 1 < parts);
  ///       loss_of(net.forward(part[i]), target[i]).backward();
  ///     }
  using NoSync = detail::NoSync;

  /// Begins such a region. If `enabled` is false, the region has no effect.
  [[nodiscard]] NoSync no_sync(bool enabled = true) { return NoSync(syncs_, enabled); }

 private:
  static std::optional<at::ScalarType> wire_dtype(const DistributedDataParallelOptions& options) {
    TORCH_CHECK_VALUE(!options.communication || !options.reduce_dtype,
                      "DistributedDataParallel: communication and reduce_dtype both select how "
                      "gradients are sent. Pass one of them.");
    if (options.communication == c10d::BuiltinCommHookType::FP16_COMPRESS) return at::kHalf;
    return options.reduce_dtype;
  }
  void leave_local(bool are_local) {
    averages_->are_local = are_local;
    if (are_local) detail::any_has_left_local = true;
  }

  Model model_;
  DistributedDataParallelOptions options_;
  std::shared_ptr<detail::GradientAverages> averages_;
  bool syncs_ = true;
};

}  // namespace TORCHAMP_NAMESPACE
