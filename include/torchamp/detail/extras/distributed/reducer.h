// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/distributed/buckets.h"
#include "torchamp/detail/extras/distributed/collective.h"
#include "torchamp/detail/extras/masters/make_masters.h"
#include "torchamp/detail/extras/masters/split_weight.h"
#include "torchamp/detail/extras/shared/tensor_pairs.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The memory of an expanded tensor, which cannot be written to itself.
inline at::Tensor without_repetition(at::Tensor tensor) {
  if (tensor.layout() != at::kStrided) return tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  }
  return tensor;
}

/// Copies tensors of process 0 to all processes; of split weights both halves.
inline void broadcast(const char* call, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      const std::vector<at::Tensor>& tensors, int root) {
  constexpr std::size_t together = 250 << 20;
  const at::NoGradGuard no_grad;
  if (tensors.empty()) return;
  std::vector<at::Tensor> all, whole;
  for (const at::Tensor& tensor : tensors) all.push_back(without_repetition(tensor));
  for (const at::Tensor& tensor : tensors) {
    const SplitWeight* const split = split_of(tensor);
    if (!split) continue;
    all.push_back(in_memory_order(split->low).view(at::kByte));  // backends lack int16
    if (split->is_unwritten(tensor)) whole.push_back(tensor);
  }
  for (const at::Tensor& tensor : tensors) {  // their masters get the same values
    if (WeightMeta* const meta = weight_meta_of(tensor)) meta->same_writes -= version_of(tensor);
  }
  collective(call, [&] { c10d::broadcast_coalesced(group, all, together, root); });
  for (const at::Tensor& tensor : tensors) {
    if (WeightMeta* const meta = weight_meta_of(tensor)) meta->same_writes += version_of(tensor);
  }
  for (const at::Tensor& tensor : whole) split_of(tensor)->note_version(tensor);
  if (KeptWeights* const kept = kept_weights()) kept->changed(tensors);
}

inline void check_reduce_dtype(const char* owner, const std::optional<at::ScalarType>& dtype) {
  TORCH_CHECK_VALUE(!dtype || *dtype == at::kFloat || is_16_bit(*dtype), owner,
                    ": gradients cannot be sent as ", dtype.value_or(at::kFloat),
                    ". Pass torch::kFloat, torch::kBFloat16 or torch::kHalf as reduce_dtype.");
}

/// Averages the gradients of a module in place, including main gradients.
class GradientAverages final : public GradientBuckets {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  /// `parameters`: the trained ones. `dtype`: in which gradients are sent; unset: their own.
  GradientAverages(const Named& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                   std::optional<at::ScalarType> dtype, int64_t bucket_bytes, bool find_unused)
      : GradientBuckets("DistributedDataParallel", std::move(group),
                        layout_of(parameters, dtype, bucket_bytes), in_layout(parameters),
                        find_unused),
        is_new_(parameters.size()) {}
  ~GradientAverages() override {
    for (const auto& main : averaged_) main->is_averaged = false;
  }

  /// Call it when a shared_ptr holds this object.
  void hook() {
    for (std::size_t w = parameters_.size(); w-- > 0;) {
      auto main = main_gradient_of(parameters_[w]);
      if (!main) continue;
      TORCH_CHECK(!main->is_averaged, "DistributedDataParallel: the gradients of '", name(w),
                  "' are averaged by another DistributedDataParallel. Destroy that one first.");
      averaged_.push_back(std::move(main));
    }
    for (const auto& main : averaged_) main->is_averaged = true;
    GradientBuckets::hook();
  }

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  /// The next backward averages.
  void prepare_for_backward() {
    const std::lock_guard lock(mutex_);
    runs_ = false;
    is_armed_ = true;
  }

  /// Averages the present gradients, including gradients that only other processes have.
  void average_now() {
    runs_ = is_armed_ = false;
    run_now(/*find_unused=*/true);
  }

 private:
  static at::ScalarType dtype_of_gradient(const at::Tensor& parameter) {
    return main_gradient_of(parameter) ? at::kFloat : parameter.scalar_type();
  }
  static BucketLayout layout_of(const Named& parameters, std::optional<at::ScalarType> dtype,
                                int64_t bytes) {
    int64_t elements = 0;
    for (const auto& [name, parameter] : parameters) elements += parameter.numel();
    BucketLayout layout(/*processes=*/1, bytes, c10::elementSize(dtype.value_or(at::kFloat)),
                        elements);
    for (std::size_t i = parameters.size(); i-- > 0;) {  // backward reaches the last ones first
      const auto& [name, parameter] = parameters[i];
      layout.add(name, parameter, dtype.value_or(dtype_of_gradient(parameter)));
    }
    layout.sort_buckets();
    return layout;
  }
  static std::vector<at::Tensor> in_layout(const Named& parameters) {
    std::vector<at::Tensor> tensors;
    for (std::size_t i = parameters.size(); i-- > 0;) tensors.push_back(parameters[i].second);
    return tensors;
  }

  /// The tensor with the gradient: a master or the parameter itself. Undefined if the master is
  /// destroyed.
  at::Tensor owner_of(std::size_t w) const {
    const auto main = main_gradient_of(parameters_[w]);
    return main ? main->owner(parameters_[w]) : parameters_[w];
  }

  bool takes(std::size_t w) override {
    is_new_[w] = true;
    return std::exchange(is_armed_, false) || runs_;
  }
  bool begins_anew(int /*task*/) const override { return false; }
  bool is_there(std::size_t w) const override {
    const at::Tensor owner = owner_of(w);
    return is_new_[w] && owner.defined() && owner.grad().defined();
  }
  bool may_lack(std::size_t w) const override { return !owner_of(w).defined(); }

  void send(std::size_t b) override {
    const BucketShape& shape = layout_.buckets()[b];
    at::Tensor& flat = buckets_[b].sent;
    flat = at::empty({shape.slot}, at::device(shape.device).dtype(shape.dtype));
    TensorPairs copies;
    for (const std::size_t w : shape.weights) {
      const at::Tensor to = layout_.whole_in(w, flat);
      if (!is_there(w)) {
        to.zero_();
        continue;
      }
      const at::Tensor gradient = owner_of(w).grad();
      TORCH_CHECK(gradient.layout() == at::kStrided, "DistributedDataParallel: the gradient of '",
                  name(w), "' has the layout ", gradient.layout(),
                  ". Only dense gradients are averaged: set sparse(false) for an embedding.");
      copies.add(to, gradient);
    }
    copies.copy();
    if (divides_first(b)) flat.div_(static_cast<double>(group_->getSize()));
    std::vector<at::Tensor> tensors{flat};
    collective(call(), [&] { buckets_[b].work = group_->allreduce(tensors); });
  }

  void give_back(const std::vector<bool>& is_used) override {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      const at::Tensor& flat = buckets_[b].sent;
      wait(buckets_[b]);
      if (!divides_first(b)) flat.div_(static_cast<double>(group_->getSize()));
      TensorPairs copies;
      for (const std::size_t w : layout_.buckets()[b].weights) {
        const at::Tensor owner = owner_of(w);
        if (!owner.defined() || !is_used[w]) continue;
        at::Tensor& gradient = owner.mutable_grad();
        if (!gradient.defined()) {
          const at::ScalarType dtype = dtype_of_gradient(parameters_[w]);
          gradient = at::empty_like(owner, owner.options().dtype(dtype).requires_grad(false));
        }
        copies.add(gradient, layout_.whole_in(w, flat));
      }
      copies.copy();
    }
    is_new_.assign(parameters_.size(), false);
  }

  /// Whether to divide before the sum, because the sum could exceed the dtype's range.
  bool divides_first(std::size_t b) const { return layout_.buckets()[b].dtype == at::kHalf; }

  bool is_armed_ = false;
  std::vector<bool> is_new_;  // gradients that backward has made since the last exchange
  std::vector<std::shared_ptr<MainGradient>> averaged_;
};

/// Copies the model of process 0 to all processes, and averages its gradients from now on.
inline std::shared_ptr<GradientAverages> make_averages(
    const torch::nn::Module& module, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> dtype, int64_t bucket_bytes, bool find_unused) {
  constexpr const char* call = "DistributedDataParallel";
  check_reduce_dtype(call, dtype);
  auto trained = named_parameters_once(module);
  std::erase_if(trained, [](const auto& one) { return !one.second.requires_grad(); });
  std::vector<at::Tensor> parameters;
  parameters.reserve(trained.size());
  for (const auto& [name, parameter] : trained) parameters.push_back(parameter);
  TORCH_CHECK(!parameters.empty(), call, ": no parameter of the model requires grad.");
  collective(call, [&] { c10d::verify_params_across_processes(group, parameters, std::nullopt); });
  broadcast(call, group, module.parameters(), 0);
  broadcast(call, group, module.buffers(), 0);
  auto averages =
      std::make_shared<GradientAverages>(trained, group, dtype, bucket_bytes, find_unused);
  averages->hook();
  return averages;
}

}  // namespace TORCHAMP_NAMESPACE::detail
