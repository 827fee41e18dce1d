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
// collective: every process of the group calls them, in the same order. A process that waits for
// another one gets a c10::Error that names the call: at once if that one has died, after the
// group's timeout if it stalls. From backward(), which LibTorch runs, it gets the std::exception
// of the group's backend. NCCL does not report errors by exceptions: see add_nccl(). The group is
// unusable after that, and the process should end. Groups come from make_process_group() in
// distributed/process_group.h, or from elsewhere in c10d.

/// The type of a process group.
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Copies the parameters and buffers of process `root` to all processes, which call it together;
/// see Note [Collective calls] for errors.
inline void broadcast_module(const torch::nn::Module& module, const ProcessGroupPtr& group,
                             int root = 0) {
  detail::broadcast("broadcast_module", group, module.parameters(), root);
  detail::broadcast("broadcast_module", group, module.buffers(), root);
}

/// Makes an overflow on any process count on all, so all skip the step and their scales stay equal.
/// For GradScalerOptions::agree_found_inf:
///
///     torchamp::GradScaler scaler({.agree_found_inf = torchamp::found_inf_agreement(group)});
///
/// Needed if each process steps its own parameters (ShardedMasterWeights do this themselves). With
/// DistributedDataParallel it is not needed: averaging also spreads infs and NaNs. Costs one
/// reduction of one number per optimizer and iteration. With Gloo the host waits for it, with NCCL
/// the device.
inline std::function<void(at::Tensor&)> found_inf_agreement(ProcessGroupPtr group) {
  return [group = std::move(group)](at::Tensor& found_inf) {
    detail::reduce_over("found_inf_agreement", *group, found_inf, c10d::ReduceOp::MAX);
  };
}

/// Replaces the elements of a tensor by their means over all processes, equal to the bit on each.
/// For PrecisionAuditOptions::average:
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
  /// Whether each forward first copies the buffers of process 0, such as batch norm's running
  /// statistics, to all processes.
  bool broadcast_buffers = true;
  /// For models whose forward may leave parameters unused: each backward then asks all processes
  /// which were unused, and synchronises. If false, an unused parameter is an error of
  /// backward().
  bool find_unused_parameters = false;
  /// The size of the buckets in which gradients are averaged, at most: a small model has about
  /// eight, of 1 MiB or more. The first is full at 1 MiB, to be sent early.
  int64_t bucket_bytes = int64_t{25} * 1024 * 1024;
  /// How gradients are sent, by c10d's names: FP16_COMPRESS is reduce_dtype torch::kHalf;
  /// ALLREDUCE, the default, keeps their dtype.
  std::optional<c10d::BuiltinCommHookType> communication = std::nullopt;
  /// The dtype in which gradients are sent: bf16 or fp16 halve the bytes of fp32 ones (an overflow
  /// there is an inf that the scaler finds); fp32 doubles the bytes of 16-bit ones, and sums them
  /// in fp32 before rounding. Unset: their own; fp32 for the main gradients of MasterWeights. An
  /// error together with `communication`.
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
/// Construction copies the parameters and buffers of process 0 to all processes; parameters of
/// other shapes are an error. At most one backward follows each forward. The average of scaled
/// gradients is scaled as well. checkpoint() works, nested too. With MasterWeights, first call
/// broadcast_module(), then make the masters, then this. If they have main_gradients, these are
/// averaged, in fp32; under no_sync() they accumulate, and the next backward averages the sums.
/// Errors: a second DistributedDataParallel for the same main gradients, or new masters, while the
/// first one lives.
///
/// A bucket of gradients is sent as soon as backward has computed them, while it computes the
/// others. Construction and forward are collective, see Note [Collective calls]; a forward without
/// gradients sends nothing. An error within a CudaGraph. Source: Python's
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

  /// Averages the gradients of backward passes within no_sync(), before an early step: call it
  /// before gradients are taken, unscaled or clipped, for example in the before_unscale() of an
  /// Accumulation, whose last window may be incomplete. Does nothing if the last forward with
  /// gradients was outside no_sync(). Collective; synchronises.
  void sync_gradients() {
    if (!averages_->are_local) return;
    detail::GraphBody::check(
        "DistributedDataParallel::sync_gradients: processes exchange gradients, which the "
        "iteration of a CudaGraph cannot hold. Run that iteration eagerly, with {.enabled = "
        "false}.");
    averages_->average_now();
    leave_local(false);
  }

  /// A region whose backward passes do not average the gradients, which accumulate on each process:
  /// for all micro-batches of a step but the last. Before an earlier step call sync_gradients();
  /// otherwise the replicas diverge.
  ///
  ///     for (int i = 0; i < parts; ++i) {
  ///       const auto no_sync = net.no_sync(/*enabled=*/i + 1 < parts);
  ///       loss_of(net.forward(part[i]), target[i]).backward();
  ///     }
  using NoSync = detail::NoSync;

  /// Begins such a region; with `enabled` false, one without effect.
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
