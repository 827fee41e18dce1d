// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/extras/distributed/buckets.h"
#include "torchamp/detail/extras/distributed/collective.h"
#include "torchamp/detail/extras/masters/split_weight.h"
#include "torchamp/detail/extras/shared/master_meta.h"
#include "torchamp/detail/extras/shared/tensor_pairs.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Gradients in shards]
// Backward moves each gradient to its bucket. A full bucket is sent, slot r to process r, which
// adds what it receives in the order of the ranks, in fp32: bit for bit the sum of one process that
// adds the same gradients in that order, with any backend. (It is a reduce_scatter made of an
// all-to-all, with the same traffic. c10d's own leaves the order to the backend; Gloo builds it
// from a full allreduce or, in older LibTorch, lacks it.) To limit memory, at most two buckets are
// in flight: before a third is sent, backward waits for the first.

/// Moves a model's gradients, as backward makes them, to the shards of its masters.
class GradientScatter final : public GradientBuckets, public UnsentGradients {
 public:
  GradientScatter(BucketLayout layout, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  std::vector<at::Tensor> parameters, std::vector<at::Tensor> shards,
                  at::ScalarType dtype, bool find_unused)
      : GradientBuckets("ShardedMasterWeights", std::move(group), std::move(layout),
                        std::move(parameters), find_unused),
        dtype_(dtype),
        shards_(std::move(shards)),
        copied_(shards_.size()) {}

  /// Records that the model has the values of the shards.
  void note_copied() { std::ranges::transform(shards_, copied_.begin(), version_of); }

  /// Whether backward sends; otherwise gradients accumulate in place, in fp32.
  bool& sends() { return sends_; }

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  bool any() const override {
    return has_unsent_ && std::ranges::any_of(parameters_, [](const at::Tensor& parameter) {
             return parameter.unsafeGetTensorImpl()->grad().defined();
           });
  }
  void send() override {
    for (std::size_t w = 0; w < shards_.size(); ++w) check_copied(w);
    has_unsent_ = false;
    run_now(find_unused_);
  }
  void drop() override {
    for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
    has_unsent_ = false;
  }

 private:
  const at::Tensor& gradient_of(std::size_t w) const {
    return parameters_[w].unsafeGetTensorImpl()->grad();
  }

  bool takes(std::size_t w) override {
    const at::Tensor gradient = gradient_of(w);
    if (!gradient.defined()) return false;
    TORCH_CHECK(gradient.layout() == at::kStrided, "backward: the gradient of '", name(w),
                "' has the layout ", gradient.layout(),
                ". ShardedMasterWeights need dense gradients: set sparse(false) for an embedding.");
    check_copied(w);
    has_unsent_ = !sends_;
    if (!sends_ && gradient.scalar_type() != at::kFloat) {
      parameters_[w].mutable_grad() = laid_out_as(parameters_[w], gradient).to(at::kFloat);
    }
    return sends_;
  }
  bool begins_anew(int task) const override { return task != task_; }
  bool is_there(std::size_t w) const override { return is_ready_[w]; }
  bool may_lack(std::size_t w) const override { return !parameters_[w].requires_grad(); }

  void check_copied(std::size_t w) const {
    TORCH_CHECK(version_of(shards_[w]) == copied_[w], "backward: the weight '", name(w),
                "' was computed with old values: the optimizer has changed its masters since. Call "
                "ShardedMasterWeights::copy_to_model() after each step, taken or skipped.");
  }

  void take(std::size_t w) override {
    const std::size_t b = layout_.weights()[w].bucket;
    fill(b);
    layout_.for_each_part(w, buckets_[b].sent, laid_out_as(parameters_[w], gradient_of(w).detach()),
                          [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
    parameters_[w].mutable_grad().reset();
  }
  /// Also writes zeros for weights without a gradient, if other weights of the bucket have one.
  void take_rest() override {
    for (std::size_t w = 0; w < shards_.size(); ++w) {
      if (is_ready_[w] || !gradient_of(w).defined()) continue;
      take(w);
      is_ready_[w] = true;
    }
    for (std::size_t w = 0; w < shards_.size(); ++w) {
      const BucketedWeight& weight = layout_.weights()[w];
      const at::Tensor& slots = buckets_[weight.bucket].sent;
      if (is_ready_[w] || !slots.defined()) continue;
      slots.view({layout_.processes(), -1}).narrow(1, weight.offset, weight.shard_elements).zero_();
    }
  }

  /// Creates the bucket's slots, with zeros if gradients may be missing or there is padding.
  void fill(std::size_t b, bool zeros = false) {
    if (buckets_[b].sent.defined()) return;
    const BucketShape& shape = layout_.buckets()[b];
    const std::vector<int64_t> size{shape.slot * layout_.processes()};
    const auto options = at::device(shape.device).dtype(dtype_);
    buckets_[b].sent =
        zeros || shape.is_padded ? at::zeros(size, options) : at::empty(size, options);
  }

  void send(std::size_t b) override {
    if (b >= 2) add_up(b - 2);
    Bucket& bucket = buckets_[b];
    fill(b, /*zeros=*/true);
    bucket.received = bucket.sent;
    if (layout_.processes() == 1) return;
    bucket.received = at::empty_like(bucket.sent);
    collective(call(),
               [&] { bucket.work = start_all_to_all(*group_, bucket.received, bucket.sent); });
  }

  /// Waits for a bucket, and stores the average of the received gradients.
  void add_up(std::size_t b) {
    Bucket& bucket = buckets_[b];
    if (!bucket.sent.defined()) return;  // it was
    wait(bucket);
    const int64_t slot = layout_.buckets()[b].slot, processes = layout_.processes();
    at::Tensor sum = bucket.received.narrow(0, 0, slot)
                         .to(at::kFloat, /*non_blocking=*/false,
                             /*copy=*/true);
    for (int64_t rank = 1; rank < processes; ++rank) {
      sum.add_(bucket.received.narrow(0, rank * slot, slot));
    }
    if (processes > 1) sum.div_(static_cast<double>(processes));
    bucket = {.received = std::move(sum)};
  }

  void give_back(const std::vector<bool>& is_used) override {
    for (std::size_t b = 0; b < buckets_.size(); ++b) add_up(b);
    for (std::size_t w = 0; w < shards_.size(); ++w) {
      check_split(shards_[w], [&] { return c10::str("backward: the weight '", name(w), "'"); });
    }
    TensorPairs sums;
    for (std::size_t w = 0; w < shards_.size(); ++w) {
      if (!is_used[w]) continue;
      const BucketedWeight& weight = layout_.weights()[w];
      at::Tensor part =
          sharing(buckets_[weight.bucket].received, weight.offset, weight.shard_elements);
      at::Tensor& gradient = shards_[w].mutable_grad();
      if (gradient.defined()) {
        sums.add(gradient, std::move(part));
      } else {
        gradient = std::move(part);
        if (auto* const split = split_of(shards_[w])) split->note_taken();
      }
    }
    sums.accumulate();
  }

  at::ScalarType dtype_;  // in which gradients are sent
  std::vector<at::Tensor> shards_;
  std::vector<uint32_t> copied_;  // the versions of the shards whose values the model has
  bool sends_ = true;
  bool has_unsent_ = false;  // whether a pass under no_sync() has left gradients
};

}  // namespace TORCHAMP_NAMESPACE::detail
