// SPDX-License-Identifier: BSD-3-Clause
// The common part of all kinds of masters; and MasterWeights, which has fp32 values of all weights
// of a model, on one process.
#pragma once

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstddef>

#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/extras/io/archives.h"
#include "torchamp/detail/extras/masters/masters_of_model.h"
#include "torchamp/detail/extras/masters/split_step.h"
#include "torchamp/detail/extras/shared/kept_tensors.h"
#include "torchamp/master_weights.h"

namespace TORCHAMP_NAMESPACE::detail {

TORCHAMP_BODY auto MastersOfModel::weight_of(const at::Tensor& parameter) const -> const Weight* {
  const auto found = std::ranges::find_if(
      weights_, [&](const Weight& weight) { return weight.parameter.is_same(parameter); });
  return found == weights_.end() ? nullptr : &*found;
}

TORCHAMP_BODY void MastersOfModel::note_copied() {
  for (Weight& weight : weights_) weight.given.note(weight.parameter);
}

/// Warns once of weights of the model that differ from those last written.
TORCHAMP_BODY void MastersOfModel::warn_of_written_model() {
  for (const Weight& weight : weights_) {
    if (warned_of_written_) return;
    if (!weight.master.defined() || !weight.given.was_written(weight.parameter)) continue;
    warned_of_written_ = true;
    TORCH_WARN(owner_, "::copy_to_model: the model's weight '", weight.name,
               "' was written to since the last call, and its master's value replaces what was "
               "written. To fill the model from a file, call torch::load(masters, path); to change "
               "weights, change the tensors of parameters(). This warning is given once.");
  }
}

TORCHAMP_BODY void MastersOfModel::save(torch::serialize::OutputArchive& archive,
                                        at::ScalarType dtype) const {
  const std::string call = std::string(owner_) + "::save";
  TORCH_CHECK_VALUE(c10::isFloatingType(dtype), call, ": ", dtype,
                    " is not a floating-point dtype.");
  check_saved(call);
  const InternalOps guard;
  write_module(*model_, archive, [&](const at::Tensor& parameter) {
    const Weight* const weight = weight_of(parameter);
    if (!weight) return parameter;
    const at::Tensor value = value_of(*weight);
    return weight->is_narrow ? value.to(dtype) : value;
  });
}

TORCHAMP_BODY void MastersOfModel::load(torch::serialize::InputArchive& archive) {
  const InternalOps guard;
  const auto read = read_all(*model_, archive, owner_);
  const DropWeightCasts drop_weight_casts;
  const std::function<void()> back = MastersOfModel::keep();
  try {
    for (const auto& [to, from] : read) {
      const Weight* const weight = weight_of(to);
      weight ? set(*weight, from, to) : void(to.copy_(from));
    }
  } catch (...) {  // for lack of memory
    back();
    throw;
  }
  note_copied();
}

TORCHAMP_BODY std::function<void()> MastersOfModel::keep() {
  const InternalOps guard;
  WriteBack kept;  // on the host: memory of the device may be short
  const auto add = [&](const at::Tensor& tensor) { kept.add(tensor, WriteBack::Copies::on_host); };
  for (const Weight& weight : weights_) {
    add(weight.parameter);
    add(weight.master);
    if (const SplitWeight* const split = weight.split()) add(split->low);
  }
  for (const at::Tensor& buffer : model_->buffers()) add(buffer);
  return [this, kept = std::move(kept), was_copied = is_copied()] {
    const InternalOps internal;
    const DropWeightCasts drop_weight_casts;
    kept.put_back();
    for (const Weight& weight : weights_) {
      if (SplitWeight* const split = weight.split()) {
        split->note_version(weight.master.defined() ? weight.master : weight.parameter);
      }
    }
    note_copied();
    // Masters that were ahead of the model must be so again: is_copied() compares their versions.
    for (const Weight& weight : weights_) {
      if (!was_copied && weight.master.defined()) {
        weight.master.unsafeGetTensorImpl()->bump_version();
      }
    }
  };
}

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY MasterWeights::MasterWeights(std::shared_ptr<torch::nn::Module> model,
                                           MasterWeightsOptions options)
    : MastersOfModel("MasterWeights", std::move(model)), options_(std::move(options)) {
  const detail::InternalOps guard;
  list_weights(options_, options_.main_gradients);

  struct Halves {
    at::Tensor high, low;
  };
  std::vector<Halves> narrow(weights_.size());  // the model changes once all exist
  for (std::size_t w = 0; w < weights_.size(); ++w) {
    Weight& weight = weights_[w];
    if (!weight.is_narrow) continue;
    const at::Tensor wide = value_of(weight).to(at::kFloat);
    detail::remove_weight_meta(wide);  // it may be the parameter itself, under another name
    if (!weight.parameter.requires_grad() || options_.storage == MasterStorage::full) {
      narrow[w].high = wide.to(options_.dtype, /*non_blocking=*/false, /*copy=*/true);
      if (weight.parameter.requires_grad()) weight.master = wide.set_requires_grad(true);
    } else {
      weight.is_split = true;
      narrow[w] = {at::empty_like(wide, options_.dtype), at::empty_like(wide, at::kShort)};
      detail::write_split(wide, narrow[w].high, narrow[w].low);
    }
  }

  // In this order: remove data of earlier masters, and the gradient, whose dtype would not fit;
  // set_data(); then attach the new data, which records the version and dtype of the new weight.
  for (std::size_t w = 0; w < weights_.size(); ++w) {
    Weight& weight = weights_[w];
    const at::Tensor& parameter = weight.parameter;
    detail::unhook_main_gradient(parameter);
    if (!weight.is_narrow) continue;
    detail::remove_weight_meta(parameter);
    parameter.mutable_grad().reset();
    parameter.set_data(narrow[w].high);
    if (weight.is_split) {
      auto split = detail::make_split_weight(narrow[w].low);
      split->note_version(parameter);
      parameter.unsafeGetTensorImpl()->set_backend_meta(std::move(split));
    }
    if (weight.master.defined()) {
      detail::note_narrow(weight.master, parameter);
      model_from_masters_.add(parameter, weight.master);
    }
    if (options_.main_gradients) {
      weight.main = detail::hook_main_gradient(weight.name, parameter, weight.master);
    }
    if (weight.is_split || weight.master.defined()) {
      detail::note_masters(parameter, token_, /*apart=*/weight.master.defined());
    }
  }
  note_copied();
}

TORCHAMP_BODY std::vector<std::pair<std::string, at::Tensor>> MasterWeights::named_parameters()
    const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const Weight& weight : weights_) {
    const bool is_own_master = !weight.is_narrow || weight.is_split;
    const at::Tensor& tensor = is_own_master ? weight.parameter : weight.master;
    if (tensor.defined() && tensor.requires_grad()) result.emplace_back(weight.name, tensor);
  }
  return result;
}

TORCHAMP_BODY at::Tensor MasterWeights::value_of(const Weight& weight) const {
  if (weight.master.defined()) return weight.master.detach();
  const detail::SplitWeight* const split = weight.split();
  return split ? detail::joined(weight.parameter, *split) : weight.parameter.variable_data();
}

TORCHAMP_BODY void MasterWeights::set(const Weight& weight, const at::Tensor& value,
                                      const at::Tensor& parameter) const {
  if (!weight.is_narrow) {
    parameter.copy_(value);
    return;
  }
  const at::Tensor wide = value.to(parameter.device(), at::kFloat);
  if (detail::SplitWeight* const split = weight.split()) {
    detail::write_split(wide, parameter, split->low);
    parameter.unsafeGetTensorImpl()->bump_version();
    split->note_version(parameter);
    return;
  }
  parameter.copy_(wide);
  if (weight.master.defined()) weight.master.copy_(wide);
}

/// Throws if split weights were moved, or, with `unwritten`, if other code has written them.
TORCHAMP_BODY void MasterWeights::check_split_weights(const std::string& call,
                                                      bool unwritten) const {
  if (options_.storage != MasterStorage::split) return;
  for (const Weight& weight : weights_) {
    if (!weight.is_split) continue;
    const detail::SplitWeight* const split = weight.split();
    TORCH_CHECK_VALUE(split && split->fits(weight.parameter), weight.in(call)(),
                      detail::split_was_moved);
    if (unwritten) detail::check_split(weight.parameter, weight.in(call));
  }
}

TORCHAMP_BODY int64_t MasterWeights::master_versions() const {
  int64_t sum = 0;
  for (const Weight& weight : weights_) {
    if (weight.master.defined()) sum += weight.master._version();
  }
  return sum;
}

/// Throws if the model's gradients cannot be given to the masters.
TORCHAMP_BODY void MasterWeights::check_takes_gradients() const {
  TORCH_CHECK(is_copied(),
              "MasterWeights::take_gradients: the masters have changed and were not copied to the "
              "model. Call copy_to_model() after each step, taken or skipped.");
  const std::string call = "MasterWeights::take_gradients";
  check_split_weights(call);
  for (const Weight& weight : weights_) {
    const at::Tensor& gradient = detail::gradient_of(weight.parameter);
    if (!gradient.defined()) continue;
    TORCH_CHECK(!weight.is_narrow || weight.master.defined() || weight.split(), call,
                ": the parameter '", weight.name,
                "' has a gradient but no master: it did not require grad when the MasterWeights "
                "were made. Make them after unfreezing it.");
    if (gradient.scalar_type() == at::kFloat) continue;
    detail::check_not_half_stepped(weight.parameter, weight.in(call));
  }
}

TORCHAMP_BODY void MasterWeights::take_gradients() {
  check_takes_gradients();
  warn_of_left_gradients();
  const detail::InternalOps guard;
  std::vector<detail::MovedGradient> gradients;
  for (const Weight& weight : weights_) {
    const at::Tensor& owner = weight.is_split ? weight.parameter : weight.master;
    if (owner.defined()) gradients.push_back({weight.parameter, owner});
  }
  was_taken_ = detail::move_gradients(std::move(gradients)) || was_taken_;
}

TORCHAMP_BODY void MasterWeights::zero_grad() {
  for (const Weight& weight : weights_) {
    weight.parameter.mutable_grad().reset();
    if (weight.master.defined()) weight.master.mutable_grad().reset();
    detail::note_gradient_dropped(weight.parameter);
  }
}

/// Throws if the model's gradients cannot have reached the optimizer. If masters have changed, they
/// were stepped or the program has written them: then they are copied in any case.
TORCHAMP_BODY void MasterWeights::check_taken() const {
  if (was_taken_ || options_.main_gradients || !is_copied()) return;
  for (const Weight& weight : weights_) {
    TORCH_CHECK(!weight.master.defined() || !weight.parameter.grad().defined(),
                "MasterWeights::copy_to_model: the weight '", weight.name,
                "' has a gradient, but none were taken since the last copy_to_model(), so the step "
                "missed it. Call take_gradients() after backward(), before unscale_ and the "
                "step; or drop the gradients with the model's zero_grad().");
  }
}

/// Warns once if backward has added to gradients from before the optimizer's zero_grad(), which has
/// recorded them in MasterMeta::left.
TORCHAMP_BODY void MasterWeights::warn_of_left_gradients() {
  if (warned_of_left_) return;
  for (const Weight& weight : weights_) {
    const at::Tensor& gradient = weight.parameter.unsafeGetTensorImpl()->grad();
    if (!weight.master.defined() || !gradient.defined()) continue;
    const detail::MasterMeta* const meta = detail::master_meta_of(weight.master);
    if (!meta || meta->left.diff(gradient) != detail::Change::written) continue;
    warned_of_left_ = true;
    TORCH_WARN(
        "MasterWeights::take_gradients: the model still held the gradient of the weight '",
        weight.name,
        "' when the optimizer's zero_grad() was called, and backward() has added to it. Call "
        "masters.zero_grad() instead, which drops it, after an exception as well. This warning is "
        "given once.");
    return;
  }
}

TORCHAMP_BODY void MasterWeights::copy_to_model() {
  check_taken();
  warn_of_written_model();
  const std::string call = "MasterWeights::copy_to_model";
  check_split_weights(call);
  for (const Weight& weight : weights_) {
    if (!weight.parameter.grad().defined()) continue;
    detail::check_not_half_stepped(weight.parameter, weight.in(call));
  }
  const detail::InternalOps guard;
  // LibTorch counts these writes, so stored casts become stale. Split weights are not copied: their
  // optimizer has stepped them in place.
  model_from_masters_.copy();
  note_copied();
  note_stepped();
  was_taken_ = false;
}

TORCHAMP_BODY void MasterWeights::note_copied() {
  MastersOfModel::note_copied();
  copied_versions_ = master_versions();
  for (const Weight& weight : weights_) {
    if (weight.main && weight.master.defined()) weight.main->note_copied(weight.master);
  }
}

/// Reports the step to the MainGradient of one weight, whose hook warns if masters' gradients are
/// not cleared. One weight is enough for one warning.
TORCHAMP_BODY void MasterWeights::note_stepped() {
  for (const Weight& weight : weights_) {
    if (!weight.main || !weight.master.defined()) continue;
    return weight.main->note_stepped(weight.master);
  }
}

TORCHAMP_BODY void MasterWeights::load(torch::serialize::InputArchive& archive) {
  check_split_weights("MasterWeights::load", /*unwritten=*/false);
  MastersOfModel::load(archive);
  was_taken_ = true;  // gradients in the model are older
}

inline std::function<void()> MasterWeights::keep() {
  return [this, back = MastersOfModel::keep(), was_taken = was_taken_] {
    back();
    was_taken_ = was_taken;
  };
}

}  // namespace TORCHAMP_NAMESPACE
