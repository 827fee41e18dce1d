// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstddef>
#include <regex>
#include <unordered_set>

#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/extras/io/archives.h"
#include "torchamp/detail/extras/masters/split_step.h"
#include "torchamp/detail/extras/shared/kept_tensors.h"
#include "torchamp/master_weights.h"

namespace TORCHAMP_NAMESPACE {

namespace detail {

/// The parameters that stay fp32. Throws for an unknown name in `keep_fp32`; `owner` begins the
/// message.
inline std::unordered_set<const at::TensorImpl*> parameters_kept_fp32(
    const char* owner, const torch::nn::Module& model, const std::vector<std::string>& keep_fp32,
    bool keep_norms) {
  std::unordered_set<const at::TensorImpl*> kept;
  // By type name: LibTorch's layers and the user's own have no common base.
  static const auto& norm = *new std::regex("Norm([123]d)?(Impl)?$");  // never destroyed
  for (const auto& module : model.modules()) {
    if (!keep_norms || !std::regex_search(module->name(), norm)) continue;
    for (const at::Tensor& parameter : module->parameters()) {
      kept.insert(parameter.unsafeGetTensorImpl());
    }
  }
  const auto parameters = model.named_parameters();
  for (const std::string& name : keep_fp32) {
    bool found = false;
    for (const auto& item : parameters) {
      if (item.key() != name && !item.key().starts_with(name + '.')) continue;
      kept.insert(item.value().unsafeGetTensorImpl());
      found = true;
    }
    TORCH_CHECK_VALUE(found, owner, ": keep_fp32 names '", name,
                      "', but the model has no parameter of that name and no module with parameters"
                      ". Its parameters are: ",
                      c10::Join(", ", parameters.keys()), ".");
  }
  return kept;
}

/// Throws for an unsupported dtype; split masters need bf16.
inline void check_narrow_dtype(const char* owner, at::ScalarType dtype, MasterStorage storage) {
  TORCH_CHECK_VALUE(is_16_bit(dtype), owner, ": a model cannot be kept in ", dtype,
                    ". Pass torch::kHalf or torch::kBFloat16.");
  TORCH_CHECK_VALUE(storage != MasterStorage::split || dtype == at::kBFloat16, owner,
                    ": masters of ", dtype,
                    " weights cannot be split, as these are not the upper half of "
                    "fp32 numbers. Pass .dtype = torch::kBFloat16 with MasterStorage::split.");
}

/// Throws for a parameter that already has a master, that no optimizer can step, that cannot be
/// split, or, if backward is to take gradients, that has the program's own hook in the place of
/// ours.
inline void check_may_be_master(const char* owner, const std::string& name,
                                const at::Tensor& parameter, bool splits, bool main_gradients) {
  const auto main = main_gradient_of(parameter);
  TORCH_CHECK(!main || !main->is_averaged, owner, ": the gradients of the parameter '", name,
              "' are averaged by a DistributedDataParallel. Destroy that first, and make a new one "
              "after the masters.");
  const WeightMeta* const meta = weight_meta_of(parameter);
  TORCH_CHECK(!meta || meta->masters.expired(), owner, ": the parameter '", name,
              "' has a master already in other MasterWeights or ShardedMasterWeights, which would "
              "overwrite the model's weights. Use those, or destroy them first.");
  TORCH_CHECK(!parameter.requires_grad() || !repeats_elements(parameter), owner,
              ": several elements of the parameter '", name, "' (sizes ", parameter.sizes(),
              ", strides ", parameter.strides(),
              ") share memory, as after expand(), so no optimizer can step it. Give it its own "
              "memory: parameter.set_data(parameter.contiguous()).");
  TORCH_CHECK(!splits || meta || !parameter.unsafeGetTensorImpl()->get_backend_meta(), owner,
              ": the parameter '", name,
              "' has data specific to its device, so it cannot be split. Pass "
              "MasterStorage::full.");
  TORCH_CHECK(!main_gradients || main || !hook_of(parameter), owner, ": the parameter '", name,
              "' has a hook that runs after its gradient is accumulated, and LibTorch stores only "
              "one. Make the MasterWeights without main_gradients.");
}

template <class Options>
void MastersOfModel::list_weights(const Options& options, bool main_gradients) {
  check_narrow_dtype(owner_, options.dtype, options.storage);
  const auto kept = parameters_kept_fp32(owner_, *model_, options.keep_fp32, options.keep_norms);
  for (auto& [name, parameter] : named_parameters_once(*model_)) {
    check_may_be_master(owner_, name, parameter, options.storage == MasterStorage::split,
                        main_gradients);
    const at::ScalarType dtype = parameter.scalar_type();
    const bool is_narrow = (dtype == at::kFloat || is_16_bit(dtype)) &&
                           !kept.contains(parameter.unsafeGetTensorImpl());
    weights_.push_back({std::move(name), std::move(parameter), is_narrow});
  }
}

inline auto MastersOfModel::weight_of(const at::Tensor& parameter) const -> const Weight* {
  const auto found = std::ranges::find_if(
      weights_, [&](const Weight& weight) { return weight.parameter.is_same(parameter); });
  return found == weights_.end() ? nullptr : &*found;
}

inline void MastersOfModel::note_copied() {
  for (Weight& weight : weights_) weight.given.note(weight.parameter);
}

/// Warns once of weights of the model that differ from those last written.
inline void MastersOfModel::warn_of_written_model() {
  for (const Weight& weight : weights_) {
    if (warned_of_written_) return;
    if (!weight.master.defined() || !weight.given.was_written(weight.parameter)) continue;
    warned_of_written_ = true;
    TORCH_WARN(owner_, "::copy_to_model: the model's weight '", weight.name,
               "' was written to since the last call, and its master's value replaces what was "
               "written. To fill the model from a file, call torch::load(masters, path); to change "
               "weights, change those of parameters(). This warning is given once.");
  }
}

inline void MastersOfModel::save(torch::serialize::OutputArchive& archive,
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

inline void MastersOfModel::load(torch::serialize::InputArchive& archive) {
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

inline std::function<void()> MastersOfModel::keep() {
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
    for (const Weight& weight : weights_) {
      if (!was_copied && weight.master.defined()) {
        weight.master.unsafeGetTensorImpl()->bump_version();
      }
    }
  };
}

}  // namespace detail

inline MasterWeights::MasterWeights(std::shared_ptr<torch::nn::Module> model,
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
    detail::remove_weight_meta(wide);  // which may be the parameter under another name
    if (!weight.parameter.requires_grad() || options_.storage == MasterStorage::full) {
      narrow[w].high = wide.to(options_.dtype, /*non_blocking=*/false, /*copy=*/true);
      if (weight.parameter.requires_grad()) weight.master = wide.set_requires_grad(true);
    } else {
      weight.is_split = true;
      narrow[w] = {at::empty_like(wide, options_.dtype), at::empty_like(wide, at::kShort)};
      detail::write_split(wide, narrow[w].high, narrow[w].low);
    }
  }

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

inline std::vector<std::pair<std::string, at::Tensor>> MasterWeights::named_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const Weight& weight : weights_) {
    const bool is_own_master = !weight.is_narrow || weight.is_split;
    const at::Tensor& tensor = is_own_master ? weight.parameter : weight.master;
    if (tensor.defined() && tensor.requires_grad()) result.emplace_back(weight.name, tensor);
  }
  return result;
}

inline at::Tensor MasterWeights::value_of(const Weight& weight) const {
  if (weight.master.defined()) return weight.master.detach();
  const detail::SplitWeight* const split = weight.split();
  return split ? detail::joined(weight.parameter, *split) : weight.parameter.variable_data();
}

inline void MasterWeights::set(const Weight& weight, const at::Tensor& value,
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

/// Throws if split weights were moved, or, if `unwritten`, were written to by others.
inline void MasterWeights::check_split(const std::string& call, bool unwritten) const {
  if (options_.storage != MasterStorage::split) return;
  for (const Weight& weight : weights_) {
    if (!weight.is_split) continue;
    const detail::SplitWeight* const split = weight.split();
    TORCH_CHECK_VALUE(split && split->fits(weight.parameter), weight.in(call)(),
                      detail::split_was_moved);
    if (unwritten) detail::check_split(weight.parameter, weight.in(call));
  }
}

inline int64_t MasterWeights::master_versions() const {
  int64_t sum = 0;
  for (const Weight& weight : weights_) {
    if (weight.master.defined()) sum += weight.master._version();
  }
  return sum;
}

inline void MasterWeights::take_gradients() {
  TORCH_CHECK(is_copied(),
              "MasterWeights::take_gradients: the masters have changed and were not copied to the "
              "model. Call copy_to_model() after each step, taken or skipped.");
  const std::string call = "MasterWeights::take_gradients";
  check_split(call);
  warn_of_left_gradients();
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
  const detail::InternalOps guard;
  detail::TensorPairs copies, sums;
  struct Taken {
    at::Tensor parameter, owner, gradient;  // in fp32, of the owner
  };
  std::vector<Taken> taken;  // in place once nothing can fail
  for (const Weight& weight : weights_) {
    const at::Tensor& parameter = weight.parameter;
    const at::Tensor gradient = parameter.grad();
    const at::Tensor& owner = weight.is_split ? parameter : weight.master;
    if (!gradient.defined() || !owner.defined()) continue;
    // Of a split weight, backward has added to the fp32 sum.
    if (weight.is_split && gradient.scalar_type() == at::kFloat) continue;
    at::Tensor sum = weight.is_split ? at::Tensor() : owner.grad();
    if (gradient.layout() != at::kStrided || (sum.defined() && sum.layout() != at::kStrided)) {
      detail::add_to_main(sum, gradient, owner);
    } else {
      const at::Tensor wide = detail::empty_fp32_like(owner);
      copies.add(wide, gradient);
      sum.defined() ? sums.add(sum, wide) : void(sum = wide);
    }
    taken.push_back({parameter, owner, std::move(sum)});
  }
  copies.copy();
  sums.accumulate();
  if (taken.empty()) return;
  const uint64_t times = ++detail::gradients_moved();
  for (Taken& one : taken) {
    if (detail::SplitWeight* const split = detail::split_of(one.parameter)) {
      split->note_taken();  // and unscaled already, if its weight's was
    } else if (detail::WeightMeta* const meta = detail::weight_meta_of(one.owner)) {
      meta->moved = times;
    }
    one.parameter.mutable_grad().reset();
    one.owner.mutable_grad() = std::move(one.gradient);
  }
  was_taken_ = true;
}

inline void MasterWeights::zero_grad() {
  for (const Weight& weight : weights_) {
    weight.parameter.mutable_grad().reset();
    if (weight.master.defined()) weight.master.mutable_grad().reset();
    detail::note_gradient_dropped(weight.parameter);
  }
}

/// Throws if the model's gradients cannot have reached the optimizer. Changed masters were stepped,
/// or written to by the program, and are copied in any case.
inline void MasterWeights::check_taken() const {
  if (was_taken_ || options_.main_gradients || !is_copied()) return;
  for (const Weight& weight : weights_) {
    TORCH_CHECK(!weight.master.defined() || !weight.parameter.grad().defined(),
                "MasterWeights::copy_to_model: the weight '", weight.name,
                "' has a gradient, but none were taken since the last copy_to_model(), so the step "
                "missed it. Call take_gradients() after backward(), before unscale_ and the "
                "step; or drop the gradients with the model's zero_grad().");
  }
}

/// Warns once of gradients added to those from before the optimizer's zero_grad().
inline void MasterWeights::warn_of_left_gradients() {
  if (warned_of_left_) return;
  for (const Weight& weight : weights_) {
    const at::Tensor& gradient = weight.parameter.unsafeGetTensorImpl()->grad();
    if (!weight.master.defined() || !gradient.defined()) continue;
    const detail::MasterMeta* const meta = detail::master_meta_of(weight.master);
    if (!meta || !meta->left || !meta->left->is(gradient) || meta->left->is_unchanged(gradient)) {
      continue;
    }
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

inline void MasterWeights::copy_to_model() {
  check_taken();
  warn_of_written_model();
  const std::string call = "MasterWeights::copy_to_model";
  check_split(call);
  for (const Weight& weight : weights_) {
    if (!weight.parameter.grad().defined()) continue;
    detail::check_not_half_stepped(weight.parameter, weight.in(call));
  }
  const detail::InternalOps guard;
  model_from_masters_.copy();
  note_copied();
  note_stepped();
  was_taken_ = false;
}

inline void MasterWeights::note_copied() {
  MastersOfModel::note_copied();
  copied_versions_ = master_versions();
  for (const Weight& weight : weights_) {
    if (weight.main && weight.master.defined()) weight.main->note_copied(weight.master);
  }
}

/// Of one weight, as one warning is enough.
inline void MasterWeights::note_stepped() {
  for (const Weight& weight : weights_) {
    if (!weight.main || !weight.master.defined()) continue;
    return weight.main->note_stepped(weight.master);
  }
}

inline void MasterWeights::load(torch::serialize::InputArchive& archive) {
  check_split("MasterWeights::load", /*unwritten=*/false);
  MastersOfModel::load(archive);
  was_taken_ = true;  // gradients that the model holds are of before
}

inline std::function<void()> MasterWeights::keep() {
  return [this, back = MastersOfModel::keep(), was_taken = was_taken_] {
    back();
    was_taken_ = was_taken;
  };
}

}  // namespace TORCHAMP_NAMESPACE
