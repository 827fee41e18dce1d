// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/autograd_node.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/extras/accumulation/accumulation.h"
#include "torchamp/detail/extras/distributed/collective.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Where the shards of a weight lie]
// Every weight is cut, in memory order, into as many shards of equal size as there are processes;
// the last ones are padded with zeros, by less than one element per process. A bucket of some
// weights is a vector of one slot per process; a slot holds that process's shards, one weight after
// the other:
//
//     slot 0: a[0..3) b[0..1)    slot 1: a[3..6) b[1..2)
//
// So one exchange of slots brings each process all gradients of its shards, and one gathers all
// weights. Every process has a shard of every weight, so all have the same parameters, groups and
// states, of the same sizes. Weights of one device and dtype share buckets.

/// A weight that is cut into shards.
struct BucketedWeight {
  std::string name;
  std::vector<int64_t> sizes, strides;
  int64_t elements;
  int64_t shard_elements;  ///< of each shard
  std::size_t bucket = 0;  ///< where its shards lie,
  int64_t offset = 0;      ///< in each slot
};

struct BucketShape : TensorKind {
  std::vector<std::size_t> weights{};
  int64_t slot = 0;    ///< elements of each slot
  int64_t enough = 0;  ///< of all slots, to begin another bucket
  bool is_padded = false;
};

/// A tensor over the memory of `flat`, a vector, that is no view for autograd.
inline at::Tensor sharing(const at::Tensor& flat, int64_t offset, at::IntArrayRef sizes,
                          at::IntArrayRef strides) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(flat.storage()),
                                                               flat.key_set(), flat.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides,
                                                      flat.storage_offset() + offset);
  return tensor;
}
inline at::Tensor sharing(const at::Tensor& flat, int64_t offset, int64_t elements) {
  return sharing(flat, offset, {elements}, {1});
}

/// The place of each shard of each weight or gradient; the same on all processes.
class BucketLayout {
 public:
  /// `width`: bytes of an element; `elements`: of all weights. A bucket is full at `bucket_bytes`,
  /// or at an eighth of all bytes, but at least at 1 MiB: most buckets are sent while backward
  /// runs, and few bytes are in flight. The first bucket of each kind is full at 1 MiB, so that it
  /// is sent early.
  BucketLayout(int64_t processes, int64_t bucket_bytes, std::size_t width, int64_t elements)
      : processes_(processes) {
    constexpr int64_t mebibyte = 1 << 20;
    const auto bytes = static_cast<int64_t>(width);
    const int64_t most = std::min(bucket_bytes, std::max(mebibyte, elements * bytes / 8));
    bucket_elements_ = std::max<int64_t>(most / bytes, 1);
    first_elements_ = std::min(bucket_elements_, mebibyte / bytes);
  }

  /// Add weights in the order in which backward probably reaches them. `dtype`: the dtype of the
  /// weight in the model.
  void add(std::string name, const at::Tensor& tensor, at::ScalarType dtype) {
    const TensorKind kind{tensor.device(), dtype};
    const at::Tensor weight = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    std::size_t b = buckets_.size();
    while (b > 0 && !(static_cast<const TensorKind&>(buckets_[b - 1]) == kind)) --b;
    if (b == 0 || buckets_[b - 1].slot * processes_ >= buckets_[b - 1].enough) {
      buckets_.push_back({kind, {}, 0, b == 0 ? first_elements_ : bucket_elements_});
      b = buckets_.size();
    }
    BucketShape& bucket = buckets_[--b];
    const int64_t elements = weight.numel();
    const int64_t shard = (elements + processes_ - 1) / processes_;
    bucket.weights.push_back(weights_.size());
    bucket.is_padded |= shard * processes_ != elements;
    weights_.push_back({std::move(name), weight.sizes().vec(), weight.strides().vec(), elements,
                        shard, b, bucket.slot});
    bucket.slot += shard;
  }

  /// After all are added: moves complete buckets to the front.
  void sort_buckets() {
    std::ranges::sort(buckets_, {},
                      [](const BucketShape& bucket) { return bucket.weights.back(); });
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      for (const std::size_t w : buckets_[b].weights) weights_[w].bucket = b;
    }
  }

  int64_t processes() const { return processes_; }

  /// A hash of the layout.
  int64_t fingerprint() const {
    Fingerprint print;
    for (const BucketedWeight& weight : weights_) {
      print.mix(weight.sizes);
      print.mix(weight.strides);
      print.mix(static_cast<int64_t>(weight.bucket));
      print.mix(static_cast<int64_t>(buckets_[weight.bucket].dtype));
    }
    return print.value();
  }
  const std::vector<BucketedWeight>& weights() const { return weights_; }
  const std::vector<BucketShape>& buckets() const { return buckets_; }

  /// Calls visit(part of `slots`, part of `whole`) for the common elements of a vector of all slots
  /// of the weight's bucket and a tensor laid out as the weight.
  template <class Visit>
  void for_each_part(std::size_t w, const at::Tensor& slots, const at::Tensor& whole,
                     const Visit& visit) const {
    const BucketedWeight& weight = weights_[w];
    if (weight.elements == 0) return;
    const int64_t slot = buckets_[weight.bucket].slot, shard = weight.shard_elements;
    const int64_t full = weight.elements / shard, rest = weight.elements - full * shard;
    const at::Tensor memory = in_memory_order(whole);
    visit(slots.as_strided({full, shard}, {slot, 1}, slots.storage_offset() + weight.offset),
          memory.narrow(0, 0, full * shard).view({full, shard}));
    if (rest > 0) {
      visit(slots.narrow(0, full * slot + weight.offset, rest),
            memory.narrow(0, full * shard, rest));
    }
  }

  /// A weight in `flat`, the only slot of its bucket with one process.
  at::Tensor whole_in(std::size_t w, const at::Tensor& flat) const {
    const BucketedWeight& weight = weights_[w];
    return flat.as_strided(weight.sizes, weight.strides, flat.storage_offset() + weight.offset);
  }

  /// Process `rank`'s shard of a tensor laid out as the weight, without the padding; may be empty.
  at::Tensor shard_of(std::size_t w, int64_t rank, const at::Tensor& whole) const {
    const BucketedWeight& weight = weights_[w];
    const int64_t begin = std::min(rank * weight.shard_elements, weight.elements);
    return in_memory_order(whole).narrow(0, begin,
                                         std::min(weight.shard_elements, weight.elements - begin));
  }

 private:
  int64_t processes_, bucket_elements_ = 0, first_elements_ = 0;
  std::vector<BucketedWeight> weights_;
  std::vector<BucketShape> buckets_;
};

/// `tensor` itself if it is laid out as `like`; otherwise a copy with this layout.
inline at::Tensor laid_out_as(const at::Tensor& like, const at::Tensor& tensor) {
  if (tensor.strides() == like.strides() && tensor.is_non_overlapping_and_dense()) return tensor;
  at::Tensor copy =
      at::empty_like(like, like.options().dtype(tensor.scalar_type()).requires_grad(false));
  copy.copy_(tensor);
  return copy;
}

// Note [Gradients in buckets]
// All processes put gradients into the same buckets, in the order of backward. A bucket is sent
// when all its gradients are there and the buckets before it have been sent. The end of backward
// sends the rest, waits for all, and distributes the results. So the order is the same on all
// processes, whatever the order of backward. Derived classes define what is sent and received:
// averages for data parallelism, shards of sums for sharded masters.

/// Exchanges the gradients of parameters, bucket by bucket, while backward computes them.
class GradientBuckets : public std::enable_shared_from_this<GradientBuckets> {
 public:
  virtual ~GradientBuckets() {
    for (const auto& [accumulator, hook] : accumulators_) accumulator->del_post_hook(hook);
  }

  /// Whether the last forward was under no_sync().
  std::atomic<bool> are_local = false;

  /// Call it when a shared_ptr holds this object: registers for gradients in backward, after hooks
  /// of the masters and of the program.
  void hook() {
    for (std::size_t w = 0; w < parameters_.size(); ++w) {
      NodePtr accumulator = torch::autograd::impl::grad_accumulator(parameters_[w]);
      const auto hook = accumulator->add_post_hook(std::make_unique<Hook>(weak_from_this(), w));
      accumulators_.emplace_back(std::move(accumulator), hook);
    }
  }

 protected:
  class Hook final : public ReducerHook {
   public:
    Hook(std::weak_ptr<GradientBuckets> buckets, std::size_t w)
        : buckets_(std::move(buckets)), w_(w) {}
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& outputs,
        const torch::autograd::variable_list& /*inputs*/) override {
      if (const auto buckets = buckets_.lock()) buckets->note_ready(w_);
      return outputs;
    }
    bool has_left_local() const override {
      const auto buckets = buckets_.lock();
      return buckets && buckets->are_local && buckets->group_->getSize() > 1;
    }

   private:
    std::weak_ptr<GradientBuckets> buckets_;
    std::size_t w_;
  };
  struct Bucket {
    std::size_t missing = 0;
    at::Tensor sent{}, received{};
    c10::intrusive_ptr<c10d::Work> work{};
  };

  /// `owner` begins error messages.
  GradientBuckets(std::string owner, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  BucketLayout layout, std::vector<at::Tensor> parameters, bool find_unused)
      : group_(std::move(group)),
        layout_(std::move(layout)),
        parameters_(std::move(parameters)),
        find_unused_(find_unused),
        is_ready_(parameters_.size()),
        buckets_(layout_.buckets().size()),
        owner_(std::move(owner)),
        call_("backward through " + owner_) {}

  // Implemented by derived classes; the mutex is locked.

  /// Whether this pass sends the gradient of weight `w`.
  virtual bool takes(std::size_t w) = 0;
  /// Whether the gradient belongs to a backward pass other than `task_`.
  virtual bool begins_anew(int task) const = 0;
  virtual void take(std::size_t /*w*/) {}
  /// At the end of backward: takes the gradients of earlier passes.
  virtual void take_rest() {}
  /// Sends a bucket, the next one.
  virtual void send(std::size_t b) = 0;
  /// Whether the weight has a gradient, and whether it may lack one.
  virtual bool is_there(std::size_t w) const = 0;
  virtual bool may_lack(std::size_t w) const = 0;
  /// Waits for all buckets, and distributes gradients to the weights used on any process.
  virtual void give_back(const std::vector<bool>& is_used) = 0;

  /// Exchanges the present gradients.
  void run_now(bool find_unused) {
    {
      const std::lock_guard lock(mutex_);
      start(/*task=*/-1);
    }
    finish(find_unused);
  }
  void wait(const Bucket& bucket) const {
    if (bucket.work) collective(call(), [&] { bucket.work->wait(); });
  }
  const std::string& name(std::size_t w) const { return layout_.weights()[w].name; }
  const char* call() const { return call_.c_str(); }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const BucketLayout layout_;
  const std::vector<at::Tensor> parameters_;  // by their places in the layout
  const bool find_unused_;
  std::mutex mutex_;
  bool runs_ = false;  // whether a backward pass has not ended
  int task_ = -1;      // the number of that pass
  std::vector<bool> is_ready_;
  std::vector<Bucket> buckets_;

 private:
  void note_ready(std::size_t w) {
    const std::lock_guard lock(mutex_);
    const InternalOps internal;
    if (!takes(w)) return;
    const int task = torch::autograd::get_current_graph_task_id();
    if (!runs_ || begins_anew(task)) {
      start(task);
      torch::autograd::Engine::get_default_engine().queue_callback(
          [self = shared_from_this()] { self->finish(self->find_unused_); });
    }
    TORCH_CHECK(!is_ready_[w], "backward: '", name(w),
                "' got two gradients in one backward pass, and the first may have been sent. Give ",
                owner_, " a model without reentrant backward passes.");
    take(w);
    is_ready_[w] = true;
    --buckets_[layout_.weights()[w].bucket].missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) send(next_++);
  }

  void start(int task) {
    TORCH_CHECK(!runs_ || next_ == 0,
                "backward: the previous backward failed after it had sent some gradients, so the "
                "processes may be out of step. End them all and resume from a checkpoint.");
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      buckets_[b] = {layout_.buckets()[b].weights.size()};
    }
    is_ready_.assign(parameters_.size(), false);
    next_ = 0;
    task_ = task;
    runs_ = true;
  }

  void finish(bool find_unused) {
    const std::lock_guard lock(mutex_);
    if (!runs_) return;
    const InternalOps internal;
    take_rest();
    while (next_ < buckets_.size()) send(next_++);
    runs_ = false;
    give_back(used_anywhere(find_unused));
    for (Bucket& bucket : buckets_) bucket = {};
  }

  /// The weights with a gradient on any process.
  std::vector<bool> used_anywhere(bool find_unused) const {
    std::vector<bool> used(parameters_.size());
    for (std::size_t w = 0; w < used.size(); ++w) {
      used[w] = is_there(w);
      TORCH_CHECK(find_unused || used[w] || may_lack(w), owner_,
                  ": backward has given the parameter '", name(w),
                  "' no gradient. Pass {.find_unused_parameters = true} for a model whose forward "
                  "may leave parameters unused.");
    }
    return find_unused ? on_any_process(call(), *group_, used, parameters_[0].device()) : used;
  }

  std::string owner_, call_;
  std::vector<std::pair<NodePtr, uintptr_t>> accumulators_;  // which the hooks keep alive
  std::size_t next_ = 0;                                     // the bucket to be sent
};

}  // namespace TORCHAMP_NAMESPACE::detail
