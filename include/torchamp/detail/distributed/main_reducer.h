// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/distributed/any_process.h"
#include "torchamp/detail/distributed/collective.h"
#include "torchamp/detail/main_gradient.h"
#include "torchamp/detail/tensor_pairs.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Averages of main gradients]
// c10d's Reducer averages what is in a parameter's .grad, in its dtype. Main gradients are fp32 and
// may lie at masters, so they go through buckets of torchamp's own. All processes make the same
// buckets, of the last parameters first, since that is the order in which backward comes to them.
// A bucket is sent when all gradients in it are there and those before it have been sent; the end
// of backward sends the rest, waits for all, and takes the averages back. So the order is the same
// on all processes, whatever order backward has.

/// Calls a function when backward has accumulated a parameter's gradient.
struct GradientReadyHook final : torch::autograd::PostAccumulateGradHook {
  explicit GradientReadyHook(std::function<void()> function) : when_ready(std::move(function)) {}
  void operator()(const at::Tensor&) override { when_ready(); }
  std::function<void()> when_ready;
};

/// Averages the gradients of a module of which some are main gradients.
class MainGradientReducer : public std::enable_shared_from_this<MainGradientReducer> {
 public:
  static bool is_for(const torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters()) {
      if (main_gradient_of(parameter)) return true;
    }
    return false;
  }

  MainGradientReducer(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                      at::ScalarType dtype, int64_t bucket_bytes, bool find_unused)
      : group_(std::move(group)), dtype_(dtype), find_unused_(find_unused) {
    std::unordered_set<const at::TensorImpl*> seen;
    for (const auto& item : module.named_parameters()) {
      if (!item.value().requires_grad()) continue;
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      const at::ScalarType type = item.value().scalar_type();
      TORCH_CHECK(type == at::kFloat || is_16_bit(type) || type == at::kDouble,
                  "DistributedDataParallel: the parameter '", item.key(), "' is ", type,
                  ", and only fp32, fp16, bf16 and fp64 gradients can be averaged here.");
      parameters_.push_back({item.key(), item.value()});
    }
    std::ranges::reverse(parameters_);
    const auto limit =
        std::max<int64_t>(bucket_bytes / static_cast<int64_t>(elementSize(dtype)), 1);
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const at::Tensor& tensor = parameters_[p].tensor;
      if (buckets_.empty() || buckets_.back().elements >= limit ||
          parameters_[buckets_.back().begin].tensor.device() != tensor.device()) {
        buckets_.push_back({p, p, 0});
      }
      Bucket& bucket = buckets_.back();
      parameters_[p].offset = bucket.elements;
      parameters_[p].bucket = buckets_.size() - 1;
      bucket.elements += tensor.numel();
      bucket.end = p + 1;
    }
  }
  MainGradientReducer(const MainGradientReducer&) = delete;
  MainGradientReducer& operator=(const MainGradientReducer&) = delete;
  ~MainGradientReducer() {
    if (!is_hooked_) return;
    for (const Parameter& parameter : parameters_) {
      if (const auto main = main_gradient_of(parameter.tensor)) {
        main->when_taken = nullptr;
      } else if (dynamic_cast<GradientReadyHook*>(hook_of(parameter.tensor))) {
        torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, nullptr);
      }
    }
  }

  /// Once it is held by a shared_ptr.
  void hook() {
    for (std::size_t p = parameters_.size(); p-- > 0;) {
      const Parameter& parameter = parameters_[p];
      TORCH_CHECK(
          !has_other_hook(parameter.tensor), "DistributedDataParallel: the parameter '",
          parameter.name,
          "' has a hook after the accumulation of its gradient, of which LibTorch keeps one "
          "only, and which averaging main gradients needs.");
      TORCH_CHECK(!is_averaged(parameter.tensor), "DistributedDataParallel: the gradients of '",
                  parameter.name,
                  "' are averaged by another DistributedDataParallel. Let go of that one first.");
      TORCH_CHECK(parameter.tensor.scalar_type() != at::kDouble,
                  "DistributedDataParallel: the parameter '", parameter.name, "' is ",
                  parameter.tensor.scalar_type(),
                  ", and in a model with main gradients only fp32, fp16 and bf16 are averaged.");
    }
    is_hooked_ = true;
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      auto ready = [self = weak_from_this(), p] {
        if (const auto reducer = self.lock()) reducer->note_ready(p);
      };
      const at::Tensor& tensor = parameters_[p].tensor;
      if (const auto main = main_gradient_of(tensor)) {
        main->when_taken = std::move(ready);
      } else {
        torch::autograd::impl::set_post_acc_grad_hooks(
            tensor, std::make_unique<GradientReadyHook>(std::move(ready)));
      }
    }
  }

  /// The next backward averages.
  void prepare_for_backward() {
    const std::lock_guard lock(mutex_);
    for (Parameter& parameter : parameters_) parameter.is_ready = false;
    for (Bucket& bucket : buckets_) {
      bucket.missing = bucket.end - bucket.begin;
      bucket.flat.reset();
      bucket.work.reset();
    }
    next_ = 0;
    state_ = State::armed;
  }

  /// Averages the gradients as they are; those that only other processes have, too.
  void average_now() {
    prepare_for_backward();
    state_ = State::running;
    finish(/*find_unused=*/true);
  }

 private:
  enum class State { idle, armed, running };

  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::size_t bucket = 0;
    int64_t offset = 0;
    bool is_ready = false;
  };
  struct Bucket {
    std::size_t begin, end;  // of its parameters
    int64_t elements;
    std::size_t missing = 0;
    at::Tensor flat{};
    c10::intrusive_ptr<c10d::Work> work{};
  };

  static at::Tensor owner_of_gradient(const Parameter& parameter) {
    const auto main = main_gradient_of(parameter.tensor);
    return main ? main->owner(parameter.tensor) : parameter.tensor;
  }

  void note_ready(std::size_t p) {
    const std::lock_guard lock(mutex_);
    if (state_ == State::idle) return;
    if (state_ == State::armed) {
      state_ = State::running;
      torch::autograd::Engine::get_default_engine().queue_callback(
          [self = shared_from_this()] { self->finish(self->find_unused_); });
    }
    if (parameters_[p].is_ready) return;
    parameters_[p].is_ready = true;
    --buckets_[parameters_[p].bucket].missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) send(buckets_[next_++]);
  }

  /// The part of `flat` for a parameter, laid out as its gradient.
  static at::Tensor view_of(const at::Tensor& flat, const Parameter& parameter) {
    const at::Tensor& like = parameter.tensor;
    const at::Tensor part = flat.narrow(0, parameter.offset, like.numel());
    if (!like.is_non_overlapping_and_dense()) return part.view(like.sizes());
    return part.as_strided(like.sizes(), like.strides(), part.storage_offset());
  }

  void send(Bucket& bucket) {
    const InternalOps internal;
    const at::Device device = parameters_[bucket.begin].tensor.device();
    bucket.flat = at::empty({bucket.elements}, at::device(device).dtype(dtype_));
    TensorPairs copies;
    for (std::size_t p = bucket.begin; p < bucket.end; ++p) {
      const at::Tensor owner = owner_of_gradient(parameters_[p]);
      const at::Tensor gradient = owner.defined() ? owner.grad() : at::Tensor();
      const at::Tensor to = view_of(bucket.flat, parameters_[p]);
      if (!gradient.defined()) {
        to.zero_();
        continue;
      }
      TORCH_CHECK(gradient.layout() == at::kStrided, "DistributedDataParallel: the gradient of '",
                  parameters_[p].name, "' has the layout ", gradient.layout(),
                  ". Main gradients are averaged where they are dense only.");
      copies.add(to, gradient);
    }
    copies.copy();
    if (divides_first()) bucket.flat.div_(static_cast<double>(group_->getSize()));
    std::vector<at::Tensor> tensors{bucket.flat};
    collective(call, [&] { bucket.work = group_->allreduce(tensors); });
  }

  /// At the end of backward.
  void finish(bool find_unused) {
    const std::lock_guard lock(mutex_);
    if (state_ != State::running) return;
    state_ = State::idle;
    const InternalOps internal;
    while (next_ < buckets_.size()) send(buckets_[next_++]);
    const std::vector<bool> is_used = used_anywhere(find_unused);
    for (Bucket& bucket : buckets_) {
      collective(call, [&] { bucket.work->wait(); });
      TensorPairs copies;
      if (!divides_first()) bucket.flat.div_(static_cast<double>(group_->getSize()));
      for (std::size_t p = bucket.begin; p < bucket.end; ++p) {
        const at::Tensor owner = owner_of_gradient(parameters_[p]);
        if (!owner.defined() || !is_used[p]) continue;
        at::Tensor& gradient = owner.mutable_grad();
        if (!gradient.defined()) {
          const bool is_main = main_gradient_of(parameters_[p].tensor) != nullptr;
          const at::ScalarType dtype = is_main ? at::kFloat : owner.scalar_type();
          gradient = at::empty_like(owner, owner.options().dtype(dtype).requires_grad(false));
        }
        copies.add(gradient, view_of(bucket.flat, parameters_[p]));
      }
      copies.copy();
      bucket.flat.reset();
      bucket.work.reset();
    }
  }

  /// Which parameters have a gradient on any process.
  std::vector<bool> used_anywhere(bool find_unused) {
    std::vector<bool> result(parameters_.size(), true);
    if (!find_unused) {
      for (const Parameter& parameter : parameters_) {
        const at::Tensor owner = owner_of_gradient(parameter);
        TORCH_CHECK(parameter.is_ready || !owner.defined() || owner.grad().defined(),
                    "DistributedDataParallel: backward has given the parameter '", parameter.name,
                    "' no gradient. Pass {.find_unused_parameters = true} for a model whose "
                    "forward may leave parameters unused.");
      }
      return result;
    }
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const at::Tensor owner = owner_of_gradient(parameters_[p]);
      result[p] = owner.defined() && owner.grad().defined();
    }
    return on_any_process(*group_, result, parameters_[0].tensor.device(), call);
  }

  bool divides_first() const { return dtype_ == at::kHalf; }

  static constexpr const char* call = "backward through DistributedDataParallel";

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::ScalarType dtype_;
  bool find_unused_;
  std::vector<Parameter> parameters_;  // those that backward comes to first, first
  std::vector<Bucket> buckets_;
  std::mutex mutex_;
  State state_ = State::idle;
  bool is_hooked_ = false;
  std::size_t next_ = 0;  // the bucket to be sent
};

}  // namespace torchamp::detail
