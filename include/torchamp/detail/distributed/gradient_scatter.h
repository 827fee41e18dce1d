// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torchamp/detail/distributed/any_process.h"
#include "torchamp/detail/distributed/collective.h"
#include "torchamp/detail/distributed/exchange.h"
#include "torchamp/detail/distributed/main_reducer.h"
#include "torchamp/detail/distributed/shard_layout.h"
#include "torchamp/detail/main_gradient.h"
#include "torchamp/detail/shards.h"
#include "torchamp/detail/split_weight.h"
#include "torchamp/detail/tensor_pairs.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Gradients in shards]
// A hook moves each gradient, as backward makes it, to its bucket, and frees it. A full bucket is
// sent, slot r to process r, which adds up what it gets in the order of the ranks, in fp32: the sum
// is that of one process which adds the same gradients in that order, bit for bit, whatever backend
// sends them. (It is a reduce_scatter made of an all-to-all, of the same traffic. c10d's own leaves
// the order to the backend; Gloo makes it of an allreduce of everything, or, in older LibTorch, has
// none.) Buckets are sent in one order on all processes. At most two are under way, so that memory
// is bounded; before a third is sent, the first is waited for. The end of backward sends the rest,
// and gives the pieces their gradients.

/// Brings the gradients of a model, as backward makes them, to the pieces of its masters.
class GradientScatter final : public UnsentGradients,
                              public std::enable_shared_from_this<GradientScatter> {
 public:
  struct Weight {
    at::Tensor parameter, piece;
  };

  GradientScatter(ShardLayout layout, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  std::vector<Weight> weights, at::ScalarType dtype, bool find_unused)
      : layout_(std::move(layout)),
        group_(std::move(group)),
        weights_(std::move(weights)),
        dtype_(dtype),
        find_unused_(find_unused),
        copied_(weights_.size()),
        is_ready_(weights_.size()),
        buckets_(layout_.buckets().size()) {
    note_copied();
  }
  GradientScatter(const GradientScatter&) = delete;
  GradientScatter& operator=(const GradientScatter&) = delete;
  ~GradientScatter() override {
    for (const Weight& weight : weights_) {
      const auto* const ours = dynamic_cast<const GradientReadyHook*>(hook_of(weight.parameter));
      if (ours) torch::autograd::impl::set_post_acc_grad_hooks(weight.parameter, nullptr);
    }
  }

  /// Once it is held by a shared_ptr.
  void hook() {
    for (std::size_t w = 0; w < weights_.size(); ++w) {
      auto ready = [self = weak_from_this(), w] {
        if (const auto scatter = self.lock()) scatter->note_ready(w);
      };
      torch::autograd::impl::set_post_acc_grad_hooks(
          weights_[w].parameter, std::make_unique<GradientReadyHook>(std::move(ready)));
    }
  }

  /// The model has the values of the pieces.
  void note_copied() {
    for (std::size_t w = 0; w < weights_.size(); ++w) copied_[w] = version_of(weights_[w].piece);
  }

  /// Whether backward sends; else gradients add up, in fp32, where they are.
  bool& sends() { return sends_; }

  bool any() const override {
    return has_unsent_ && std::ranges::any_of(weights_, [](const Weight& weight) {
             return weight.parameter.unsafeGetTensorImpl()->grad().defined();
           });
  }
  void send() override {
    {
      const std::lock_guard lock(mutex_);
      for (std::size_t w = 0; w < weights_.size(); ++w) check_copied(w);
      start(/*task=*/-1);
    }
    finish();
  }
  void drop() override {
    for (const Weight& weight : weights_) weight.parameter.mutable_grad().reset();
    has_unsent_ = false;
  }

 private:
  struct Bucket {
    std::size_t missing = 0;
    at::Tensor sent{}, received{}, sum{};
    c10::intrusive_ptr<c10d::Work> work{};
  };

  void note_ready(std::size_t w) {
    const std::lock_guard lock(mutex_);
    const InternalOps internal;
    const at::Tensor& parameter = weights_[w].parameter;
    const at::Tensor gradient = parameter.unsafeGetTensorImpl()->grad();
    if (!gradient.defined()) return;
    TORCH_CHECK(gradient.layout() == at::kStrided, "backward: the gradient of '", name(w),
                "' has the layout ", gradient.layout(),
                ". ShardedMasterWeights take dense ones: for an embedding, sparse(false).");
    check_copied(w);
    if (!sends_) {
      has_unsent_ = true;
      if (gradient.scalar_type() == at::kFloat) return;
      parameter.mutable_grad() = laid_out_as(parameter, gradient).to(at::kFloat);
      return;
    }
    begin();
    TORCH_CHECK(!is_ready_[w], "backward: '", name(w),
                "' has got two gradients in one backward pass, of which the first may have been "
                "sent. Give ShardedMasterWeights a model without reentrant backward passes.");
    take(w);
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) send_next();
  }

  void check_copied(std::size_t w) const {
    TORCH_CHECK(version_of(weights_[w].piece) == copied_[w], "backward: the weight '", name(w),
                "' was computed with old values: the optimizer has changed its masters since. Call "
                "ShardedMasterWeights::copy_to_model() after each step, taken or skipped.");
  }

  /// At the first gradient of a backward pass.
  void begin() {
    const int task = torch::autograd::get_current_graph_task_id();
    if (runs_ && task == task_) return;
    start(task);
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = shared_from_this()] { self->finish(); });
  }

  void start(int task) {
    TORCH_CHECK(!runs_ || next_ == 0,
                "backward: the one before has ended with an error when some of its gradients were "
                "sent, so that processes may be out of step. End them all, and go on from a "
                "checkpoint.");
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      buckets_[b] = {layout_.buckets()[b].weights.size()};
    }
    is_ready_.assign(weights_.size(), false);
    next_ = 0;
    task_ = task;
    runs_ = true;
    has_unsent_ = false;
  }

  /// Moves a gradient to its bucket.
  void take(std::size_t w) {
    const at::Tensor& parameter = weights_[w].parameter;
    const std::size_t b = layout_.weights()[w].bucket;
    fill(b);
    const at::Tensor gradient =
        laid_out_as(parameter, parameter.unsafeGetTensorImpl()->grad().detach());
    layout_.for_each_part(w, buckets_[b].sent, gradient,
                          [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
    parameter.mutable_grad().reset();
    is_ready_[w] = true;
    --buckets_[b].missing;
  }

  /// Makes the bucket's slots; zeros where gradients may be missing, or where there is padding.
  void fill(std::size_t b, bool zeros = false) {
    if (buckets_[b].sent.defined()) return;
    const ShardBucket& bucket = layout_.buckets()[b];
    const std::vector<int64_t> size{bucket.slot * layout_.processes()};
    const auto options = at::device(bucket.device).dtype(dtype_);
    const bool cleared = zeros || bucket.is_padded;
    buckets_[b].sent = cleared ? at::zeros(size, options) : at::empty(size, options);
  }

  void send_next() {
    if (next_ >= 2) add_up(next_ - 2);
    Bucket& bucket = buckets_[next_];
    fill(next_, /*zeros=*/true);
    if (layout_.processes() == 1) {
      bucket.received = bucket.sent;
    } else {
      bucket.received = at::empty_like(bucket.sent);
      collective(call,
                 [&] { bucket.work = start_all_to_all(*group_, bucket.received, bucket.sent); });
    }
    ++next_;
  }

  /// Waits for a bucket, and makes the average of what came.
  void add_up(std::size_t b) {
    Bucket& bucket = buckets_[b];
    if (bucket.sum.defined()) return;
    if (bucket.work) collective(call, [&] { bucket.work->wait(); });
    const int64_t slot = layout_.buckets()[b].slot, processes = layout_.processes();
    const at::Tensor first = bucket.received.narrow(0, 0, slot);
    bucket.sum = first.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    for (int64_t rank = 1; rank < processes; ++rank) {
      bucket.sum.add_(bucket.received.narrow(0, rank * slot, slot));
    }
    if (processes > 1) bucket.sum.div_(static_cast<double>(processes));
    bucket.sent.reset();
    bucket.received.reset();
    bucket.work.reset();
  }

  /// At the end of backward.
  void finish() {
    const std::lock_guard lock(mutex_);
    if (!runs_) return;
    const InternalOps internal;
    for (std::size_t w = 0; w < weights_.size(); ++w) {  // what only earlier passes have used
      const at::Tensor& gradient = weights_[w].parameter.unsafeGetTensorImpl()->grad();
      if (!is_ready_[w] && gradient.defined()) take(w);
    }
    clear_unused();
    while (next_ < buckets_.size()) send_next();
    runs_ = false;
    const std::vector<bool> is_used = used_anywhere();
    for (std::size_t b = 0; b < buckets_.size(); ++b) add_up(b);
    for (std::size_t w = 0; w < weights_.size(); ++w) {
      const at::Tensor& piece = weights_[w].piece;
      check_split(piece, [&] { return c10::str("backward: the weight '", name(w), "'"); });
    }
    TensorPairs sums;
    for (std::size_t w = 0; w < weights_.size(); ++w) {
      if (!is_used[w]) continue;
      const ShardedWeight& weight = layout_.weights()[w];
      at::Tensor part = sharing(buckets_[weight.bucket].sum, weight.offset, weight.piece);
      at::Tensor& gradient = weights_[w].piece.mutable_grad();
      if (gradient.defined()) {
        sums.add(gradient, std::move(part));
      } else {
        gradient = std::move(part);
        if (auto* const split = split_of(weights_[w].piece)) split->note_taken();
      }
    }
    sums.accumulate();
    for (Bucket& bucket : buckets_) bucket = {};
  }

  /// Zeros for weights without a gradient in buckets that have others.
  void clear_unused() {
    for (std::size_t w = 0; w < weights_.size(); ++w) {
      const ShardedWeight& weight = layout_.weights()[w];
      const at::Tensor& slots = buckets_[weight.bucket].sent;
      if (is_ready_[w] || !slots.defined()) continue;
      slots.view({layout_.processes(), -1}).narrow(1, weight.offset, weight.piece).zero_();
    }
  }

  /// Which weights have a gradient on any process.
  std::vector<bool> used_anywhere() {
    if (!find_unused_) {
      for (std::size_t w = 0; w < weights_.size(); ++w) {
        TORCH_CHECK(is_ready_[w] || !weights_[w].parameter.requires_grad(),
                    "ShardedMasterWeights: backward has given the parameter '", name(w),
                    "' no gradient. Pass {.find_unused_parameters = true} for a model whose "
                    "forward may leave parameters unused.");
      }
      return is_ready_;
    }
    return on_any_process(*group_, is_ready_, weights_[0].parameter.device(), call);
  }

  const std::string& name(std::size_t w) const { return layout_.weights()[w].name; }

  static constexpr const char* call = "backward through ShardedMasterWeights";

  ShardLayout layout_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<Weight> weights_;
  at::ScalarType dtype_;
  bool find_unused_;
  bool sends_ = true;
  bool has_unsent_ = false;  // a pass has left gradients, since one has sent
  std::mutex mutex_;
  bool runs_ = false;             // a backward pass, and has not ended
  int task_ = -1;                 // which one
  std::vector<uint32_t> copied_;  // the versions of the pieces whose values the model has
  std::vector<bool> is_ready_;
  std::vector<Bucket> buckets_;
  std::size_t next_ = 0;  // the bucket to be sent
};

}  // namespace torchamp::detail
