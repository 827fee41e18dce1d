// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "torchamp/detail/core/base/device_work.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/extras/distributed/collective.h"
#include "torchamp/detail/extras/distributed/reducer.h"
#include "torchamp/detail/extras/masters/masters_of_model.h"
#include "torchamp/detail/extras/masters/split_step.h"
#include "torchamp/detail/extras/masters/split_weight.h"
#include "torchamp/detail/extras/shared/tensor_pairs.h"
#include "torchamp/distributed/checkpoint.h"
#include "torchamp/distributed/sharded_masters.h"

namespace TORCHAMP_NAMESPACE {

inline ShardedMasterWeights::ShardedMasterWeights(std::shared_ptr<torch::nn::Module> model,
                                                  ProcessGroupPtr group,
                                                  ShardedMasterWeightsOptions options)
    : MastersOfModel("ShardedMasterWeights", std::move(model)), options_(std::move(options)) {
  TORCH_CHECK_VALUE(group, owner_, ": the group is null. Pass the result of make_process_group().");
  TORCH_CHECK_VALUE(options_.bucket_bytes > 0, owner_, ": bucket_bytes is ", options_.bucket_bytes,
                    ". It must be above 0.");
  detail::check_reduce_dtype(owner_, options_.reduce_dtype);
  const detail::InternalOps guard;
  const at::ScalarType wire = options_.reduce_dtype.value_or(at::kFloat);
  list_weights(options_, /*main_gradients=*/false);
  for (const Weight& weight : weights_) {
    const at::ScalarType dtype = weight.parameter.scalar_type();
    TORCH_CHECK_VALUE(!weight.parameter.requires_grad() || dtype == at::kFloat || weight.is_narrow,
                      owner_, ": the parameter '", weight.name, "' is ", dtype,
                      detail::is_16_bit(dtype)
                          ? " and listed to stay fp32. Cast it first."
                          : " and requires grad. Trained weights must be fp32.");
  }
  int64_t elements = 0;
  for (const Weight& weight : weights_) {
    if (weight.parameter.requires_grad()) elements += weight.parameter.numel();
  }
  detail::BucketLayout layout(group->getSize(), options_.bucket_bytes, c10::elementSize(wire),
                              elements);
  for (std::size_t w = weights_.size(); w-- > 0;) {  // backward reaches the last ones first
    Weight& weight = weights_[w];
    const at::Tensor& parameter = weight.parameter;
    if (!parameter.requires_grad() || parameter.numel() == 0) continue;
    weight.index = by_index_.size();
    by_index_.push_back(w);
    layout.add(weight.name, parameter, weight.is_narrow ? options_.dtype : at::kFloat);
  }
  TORCH_CHECK_VALUE(!by_index_.empty(), owner_, ": no parameter of the model requires grad.");
  layout.sort_buckets();
  check_same_everywhere(group, layout);
  detail::broadcast(owner_, group, model_->parameters(), 0);
  detail::broadcast(owner_, group, model_->buffers(), 0);

  shards_ = std::make_shared<detail::ShardGroup>(std::move(group), std::move(layout));
  make_shards();
  std::vector<at::Tensor> parameters, shards;
  for (const std::size_t w : by_index_) {
    parameters.push_back(weights_[w].parameter);
    shards.push_back(weights_[w].master);
  }
  scatter_ = std::make_shared<detail::GradientScatter>(shards_->layout(), shards_->group(),
                                                       std::move(parameters), std::move(shards),
                                                       wire, options_.find_unused_parameters);
  scatter_->hook();
  shards_->unsent = scatter_;
  for (const std::size_t w : by_index_) {
    detail::note_masters(weights_[w].parameter, scatter_, /*apart=*/true);
  }
  note_copied();
}

/// Throws if another process has other options or another model, whose exchanges would not match.
inline void ShardedMasterWeights::check_same_everywhere(const ProcessGroupPtr& group,
                                                        const detail::BucketLayout& layout) const {
  detail::SameEverywhere same;
  same.add("dtype", static_cast<int64_t>(options_.dtype));
  same.add("storage", static_cast<int64_t>(options_.storage));
  same.add("find_unused_parameters", options_.find_unused_parameters);
  same.add("bucket_bytes", options_.bucket_bytes);
  same.add("reduce_dtype", static_cast<int64_t>(options_.reduce_dtype.value_or(at::kFloat)));
  detail::Fingerprint model;
  model.mix(layout.fingerprint());
  const auto mix = [&](const at::Tensor& tensor) {
    model.mix(static_cast<int64_t>(tensor.scalar_type()));
    model.mix(tensor.sizes());
  };
  for (const Weight& weight : weights_) {
    mix(weight.parameter);
    model.mix((weight.is_narrow ? 2 : 0) + (weight.index ? 1 : 0));
  }
  for (const at::Tensor& buffer : model_->buffers()) mix(buffer);
  same.add("model or other options (keep_fp32, keep_norms)", model.value());
  same.check(owner_, group);
}

inline void ShardedMasterWeights::make_shards() {
  const detail::BucketLayout& layout = shards_->layout();
  const int64_t rank = shards_->group()->getRank();
  const auto is_split = [&](const detail::BucketShape& bucket) {
    return options_.storage == MasterStorage::split && bucket.dtype != at::kFloat;
  };
  for (const detail::BucketShape& bucket : layout.buckets()) {
    const auto options =
        at::device(bucket.device).dtype(is_split(bucket) ? at::kShort : at::kFloat);
    shares_.push_back(at::zeros({bucket.slot}, options));
  }
  std::vector<at::Tensor> narrow;  // the model's new weights; stored when all exist
  for (Weight& weight : weights_) {
    const at::Tensor& parameter = weight.parameter;
    const at::Tensor value = parameter.variable_data();
    if (!weight.index) {
      narrow.push_back(weight.is_narrow ? value.to(options_.dtype) : at::Tensor());
      continue;
    }
    const detail::BucketedWeight& place = layout.weights()[*weight.index];
    const detail::BucketShape& bucket = layout.buckets()[place.bucket];
    const at::Tensor& share = shares_[place.bucket];
    c10::intrusive_ptr<detail::WeightMeta> meta;
    if (is_split(bucket)) {
      // The shard is a part of the model's weight and its padding.
      const at::Tensor padded = at::zeros({place.shard_elements * layout.processes()},
                                          parameter.options().dtype(bucket.dtype));
      narrow.push_back(detail::sharing(padded, 0, place.sizes, place.strides));
      weight.master = detail::sharing(padded, rank * place.shard_elements, place.shard_elements);
      meta = detail::make_split_weight(detail::sharing(share, place.offset, place.shard_elements));
    } else {
      narrow.push_back(
          at::empty_strided(place.sizes, place.strides, parameter.options().dtype(bucket.dtype)));
      weight.master = detail::sharing(share, place.offset, place.shard_elements);
      meta = c10::make_intrusive<detail::WeightMeta>();
    }
    meta->shards = shards_;
    meta->index = *weight.index;
    weight.master.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
    set(weight, value, narrow.back());
    weight.master.set_requires_grad(true);
  }
  for (std::size_t w = 0; w < weights_.size(); ++w) {
    const at::Tensor& parameter = weights_[w].parameter;
    detail::remove_weight_meta(parameter);  // of earlier MasterWeights
    detail::unhook_main_gradient(parameter);
    parameter.mutable_grad().reset();
    if (narrow[w].defined()) parameter.set_data(narrow[w]);
  }
}

inline std::vector<std::pair<std::string, at::Tensor>> ShardedMasterWeights::named_parameters()
    const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const Weight& weight : weights_) {
    if (weight.index && weight.parameter.requires_grad()) {
      result.emplace_back(weight.name, weight.master);
    }
  }
  return result;
}

inline void ShardedMasterWeights::note_copied() {
  MastersOfModel::note_copied();
  scatter_->note_copied();
  whole_.clear();
}

inline void ShardedMasterWeights::set(const Weight& weight, const at::Tensor& value,
                                      const at::Tensor& parameter) const {
  if (!weight.index) {
    parameter.copy_(value);
    return;
  }
  const at::Tensor wide = detail::empty_fp32_like(parameter).copy_(value);
  const auto copy_own = [&](const at::Tensor& shard, const at::Tensor& whole) {
    const auto own = shards_->layout().shard_of(*weight.index, shards_->group()->getRank(), whole);
    shard.narrow(0, 0, own.numel()).copy_(own);
  };
  if (detail::SplitWeight* const split = weight.split()) {
    const at::Tensor high = at::empty_like(wide, at::kBFloat16);
    const at::Tensor low = at::empty_like(wide, at::kShort);
    detail::write_split(wide, high, low);
    parameter.copy_(high);
    copy_own(split->low, low);
    weight.master.unsafeGetTensorImpl()->bump_version();
    split->note_version(weight.master);
    return;
  }
  parameter.copy_(wide);
  copy_own(weight.master.detach(), wide);
}

inline void ShardedMasterWeights::check_stepped(const std::string& call) const {
  bool has_optimizer = false, has_gradient = false;
  for (const Weight& weight : weights_) {
    TORCH_CHECK(weight.index || weight.parameter.numel() == 0 ||
                    !weight.parameter.requires_grad() || !weight.parameter.grad().defined(),
                call, ": the parameter '", weight.name,
                "' has a gradient but no master: it did not require grad when the "
                "ShardedMasterWeights were made. Make them after unfreezing it.");
    if (!weight.index) continue;
    const bool has_one = weight.master.grad().defined();
    has_optimizer |= detail::weight_meta_of(weight.master)->has_optimizer;
    has_gradient |= has_one;
    detail::check_split(weight.master, weight.in(call));
    if (has_one) detail::check_not_half_stepped(weight.master, weight.in(call));
  }
  TORCH_CHECK(!scatter_->any(), call,
              ": gradients of backward passes within no_sync() were not sent, so the step misses "
              "them. Leave the last backward of a step out of no_sync(), call "
              "sync_gradients() before the step, or drop them by the model's zero_grad().");
  TORCH_CHECK(has_optimizer || !has_gradient, call,
              ": no optimizer is known to treat each element of the shards independently. Use a "
              "fused optimizer or a GradScaler, or call check_optimizer() with your optimizer.");
}

inline void ShardedMasterWeights::copy_to_model() {
  const std::string call = "ShardedMasterWeights::copy_to_model";
  detail::GraphBody::check(call +
                           ": processes exchange weights, which the iteration of a CudaGraph "
                           "cannot hold. Run that iteration eagerly, with {.enabled = false}.");
  check_stepped(call);
  warn_of_written_model();
  const detail::InternalOps guard;
  const detail::DropWeightCasts drop_weight_casts;
  const detail::BucketLayout& layout = shards_->layout();
  for (std::size_t b = 0; b < layout.buckets().size(); ++b) {
    const at::Tensor all = gathered(call.c_str(), b, layout.buckets()[b].dtype);
    detail::TensorPairs copies;
    for (const std::size_t i : layout.buckets()[b].weights) {
      layout.for_each_part(
          i, all, weights_[by_index_[i]].parameter,
          [&](const at::Tensor& part, const at::Tensor& of_model) { copies.add(of_model, part); });
    }
    copies.copy();
  }
  note_copied();
}

inline void ShardedMasterWeights::gather() {
  const detail::InternalOps guard;
  const detail::BucketLayout& layout = shards_->layout();
  whole_.assign(layout.weights().size(), at::Tensor());
  for (std::size_t b = 0; b < layout.buckets().size(); ++b) {
    at::Tensor all = gathered("ShardedMasterWeights::gather", b, at::kFloat);
    if (shards_->group()->getRank() != 0) continue;
    all = all.cpu();
    for (const std::size_t i : layout.buckets()[b].weights) {
      const detail::BucketedWeight& place = layout.weights()[i];
      whole_[i] = at::empty_strided(place.sizes, place.strides, all.options());
      layout.for_each_part(i, all, whole_[i], [](const at::Tensor& part, const at::Tensor& whole) {
        whole.copy_(part);
      });
    }
  }
}

/// The slots of a bucket, from all processes: the masters in fp32, or in the dtype of the weights.
inline at::Tensor ShardedMasterWeights::gathered(const char* call, std::size_t b,
                                                 at::ScalarType dtype) const {
  const detail::BucketLayout& layout = shards_->layout();
  at::Tensor mine = shares_[b];
  if (mine.scalar_type() != at::kShort) {
    mine = mine.to(dtype);
  } else {
    mine = at::empty({layout.buckets()[b].slot}, mine.options().dtype(dtype));
    detail::TensorPairs copies;
    for (const std::size_t i : layout.buckets()[b].weights) {
      const detail::BucketedWeight& place = layout.weights()[i];
      const Weight& weight = weights_[by_index_[i]];
      copies.add(mine.narrow(0, place.offset, place.shard_elements),
                 dtype == at::kFloat ? detail::joined(weight.master, *weight.split())
                                     : weight.master.detach());
    }
    copies.copy();
  }
  return shards_->all_gathered(call, mine);
}

inline void ShardedMasterWeights::check_saved(const std::string& call) const {
  TORCH_CHECK(!whole_.empty() && whole_[0].defined(), call,
              ": the masters are sharded over several processes. Call gather() on all of them, "
              "then this on process 0.");
}

inline at::Tensor ShardedMasterWeights::value_of(const Weight& weight) const {
  return weight.index ? whole_[*weight.index] : weight.parameter.variable_data();
}

}  // namespace TORCHAMP_NAMESPACE
