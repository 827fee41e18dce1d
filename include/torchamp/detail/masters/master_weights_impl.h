// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ops/empty_like.h>

#include <cstddef>
#include <regex>
#include <unordered_set>

#include "torchamp/detail/gradients/attached.h"
#include "torchamp/detail/io/archives.h"
#include "torchamp/detail/kept_tensors.h"
#include "torchamp/detail/scaler/step_ledger.h"
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

/// The weight of that parameter; null if there is none.
template <class Weight>
const Weight* weight_of(const std::vector<Weight>& weights, const at::Tensor& parameter) {
  for (const Weight& weight : weights) {
    if (weight.parameter.is_same(parameter)) return &weight;
  }
  return nullptr;
}

inline void MastersOfModel::save(torch::serialize::OutputArchive& archive,
                                 at::ScalarType dtype) const {
  const std::string call = std::string(owner_) + "::save";
  TORCH_CHECK_VALUE(c10::isFloatingType(dtype), call, ": ", dtype,
                    " is not a floating-point dtype.");
  check_saved(call);
  const InternalOps guard;
  write_module(*model_, archive,
               [&](const at::Tensor& parameter) { return value_of(parameter, dtype); });
}

}  // namespace detail

inline MasterWeights::MasterWeights(std::shared_ptr<torch::nn::Module> model,
                                    MasterWeightsOptions options)
    : MastersOfModel("MasterWeights", std::move(model)), options_(std::move(options)) {
  const bool splits = options_.storage == MasterStorage::split;
  detail::check_narrow_dtype(owner_, options_.dtype, options_.storage);
  const detail::InternalOps guard;
  const auto parameters = model_->named_parameters();
  const auto kept =
      detail::parameters_kept_fp32(owner_, *model_, options_.keep_fp32, options_.keep_norms);
  for (const auto& item : parameters) {
    detail::check_may_be_master(owner_, item.key(), item.value(), splits, options_.main_gradients);
  }

  // The new weights, in new memory: the model changes once all exist.
  std::vector<detail::NarrowWeight> narrow;
  std::unordered_set<const at::TensorImpl*> seen;  // a parameter may have several names
  for (const auto& item : parameters) {
    const at::Tensor& parameter = item.value();
    const at::ScalarType dtype = parameter.scalar_type();
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const bool is_narrow = (dtype == at::kFloat || detail::is_16_bit(dtype)) &&
                           !kept.contains(parameter.unsafeGetTensorImpl());
    Weight weight{item.key(), parameter, is_narrow, /*is_split=*/false, {}};
    narrow.emplace_back();
    if (is_narrow) {
      const at::Tensor wide = weight.value().to(at::kFloat);
      detail::remove_weight_meta(wide);  // which may be the parameter under another name
      weight.is_split = splits && parameter.requires_grad();
      narrow.back() = weight.is_split ? detail::NarrowWeight::split(wide, wide)
                                      : detail::NarrowWeight::of(wide, options_.dtype);
      if (parameter.requires_grad() && !weight.is_split) {
        weight.master = wide.set_requires_grad(true);
      }
    }
    weights_.push_back(std::move(weight));
  }

  for (std::size_t w = 0; w < weights_.size(); ++w) {
    Weight& weight = weights_[w];
    const at::Tensor& parameter = weight.parameter;
    detail::unhook_main_gradient(parameter);
    if (!weight.is_narrow) continue;
    detail::remove_weight_meta(parameter);
    parameter.mutable_grad().reset();
    narrow[w].give_to(parameter);
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

inline void MasterWeights::Weight::set(const at::Tensor& value,
                                       const detail::NarrowWeight& halves) const {
  if (detail::SplitWeight* const split = detail::split_of(parameter)) {
    parameter.copy_(halves.high);
    split->low.copy_(halves.low);
    parameter.unsafeGetTensorImpl()->bump_version();
    split->note_version(parameter);
    return;
  }
  parameter.copy_(value);
  if (master.defined()) master.copy_(value);
}

/// Throws if split weights were moved, or, if `unwritten`, were written to by others.
inline void MasterWeights::check_split(const std::string& call, bool unwritten) const {
  if (options_.storage != MasterStorage::split) return;
  for (const Weight& weight : weights_) {
    if (!weight.is_split) continue;
    const auto where = [&] { return c10::str(call, ": the weight '", weight.name, "'"); };
    const detail::SplitWeight* const split = detail::split_of(weight.parameter);
    TORCH_CHECK_VALUE(split && split->fits(weight.parameter), where(), detail::split_was_moved);
    if (unwritten) detail::check_split(weight.parameter, where);
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
  TORCH_CHECK(master_versions() == copied_versions_,
              "MasterWeights::take_gradients: the masters have changed and were not copied to the "
              "model. Call copy_to_model() after each step, taken or skipped.");
  check_split("MasterWeights::take_gradients");
  warn_of_left_gradients();
  for (const Weight& weight : weights_) {
    const detail::SplitWeight* const split = detail::split_of(weight.parameter);
    TORCH_CHECK(
        !weight.is_narrow || weight.master.defined() || split || !weight.parameter.grad().defined(),
        "MasterWeights::take_gradients: the parameter '", weight.name,
        "' has a gradient but no master: it did not require grad when the MasterWeights were made. "
        "Make them after unfreezing it.");
    if (split && weight.parameter.grad().defined() &&
        weight.parameter.grad().scalar_type() != at::kFloat) {
      weight.check_not_half_stepped("MasterWeights::take_gradients");
    }
  }
  const detail::InternalOps guard;
  detail::TensorPairs copies, sums;
  struct Taken {
    at::Tensor parameter, owner, gradient;  // in fp32, of the owner
  };
  std::vector<Taken> taken;  // in place once nothing can fail
  for (const Weight& weight : weights_) {
    const at::Tensor gradient = weight.parameter.grad();
    if (!gradient.defined()) continue;
    if (detail::split_of(weight.parameter)) {
      if (gradient.scalar_type() == at::kFloat) continue;  // backward has added to the fp32 sum
      taken.push_back({weight.parameter, weight.parameter,
                       detail::widened(weight.parameter, gradient, copies)});
      continue;
    }
    if (!weight.master.defined()) continue;
    at::Tensor sum = weight.master.grad();
    if (gradient.layout() != at::kStrided || (sum.defined() && sum.layout() != at::kStrided)) {
      detail::add_to_main(sum, gradient, weight.master);
    } else if (!sum.defined()) {
      sum = at::empty_like(weight.master);
      copies.add(sum, gradient);
    } else {
      const at::Tensor wide = at::empty_like(weight.master);
      copies.add(wide, gradient);
      sums.add(sum, wide);
    }
    taken.push_back({weight.parameter, weight.master, std::move(sum)});
  }
  copies.copy();
  sums.accumulate();
  if (taken.empty()) return;
  for (Taken& one : taken) {
    if (detail::SplitWeight* const split = detail::split_of(one.parameter)) split->note_taken();
    one.parameter.mutable_grad().reset();
    one.owner.mutable_grad() = std::move(one.gradient);
  }
  const uint64_t times = ++detail::gradients_taken();
  for (const Taken& one : taken) {
    if (one.owner.is_same(one.parameter)) continue;  // split: unscaled already, if its weight's was
    if (detail::WeightMeta* const meta = detail::weight_meta_of(one.owner)) meta->taken = times;
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
  if (was_taken_ || options_.main_gradients || master_versions() != copied_versions_) return;
  for (const Weight& weight : weights_) {
    TORCH_CHECK(!weight.master.defined() || !weight.parameter.grad().defined(),
                "MasterWeights::copy_to_model: the weight '", weight.name,
                "' has a gradient, but none were taken since the last copy_to_model(), so the step "
                "missed it. Call take_gradients() after backward(), before unscale_ and the "
                "step; or drop the gradients with the model's zero_grad().");
  }
}

/// Warns once of weights of the model that differ from those last written.
inline void MasterWeights::warn_of_written_model() {
  if (warned_of_written_) return;
  for (const Weight& weight : weights_) {
    if (!weight.master.defined() || !weight.given.was_written(weight.parameter)) continue;
    warned_of_written_ = true;
    return detail::warn_of_written_weight("MasterWeights", weight.name);
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
  check_split("MasterWeights::copy_to_model");
  for (const Weight& weight : weights_) {
    if (weight.parameter.grad().defined()) {
      weight.check_not_half_stepped("MasterWeights::copy_to_model");
    }
  }
  const detail::InternalOps guard;
  model_from_masters_.copy();
  note_copied();
  was_taken_ = false;
}

inline void MasterWeights::note_copied() {
  copied_versions_ = master_versions();
  for (Weight& weight : weights_) {
    weight.given.note(weight.parameter);
    if (weight.main && weight.master.defined()) weight.main->note_copied(weight.master);
  }
}

inline at::Tensor MasterWeights::value_of(const at::Tensor& parameter,
                                          at::ScalarType narrow) const {
  const Weight* const weight = detail::weight_of(weights_, parameter);
  return weight && weight->is_narrow ? weight->value().to(narrow) : parameter;
}

inline void MasterWeights::load(torch::serialize::InputArchive& archive) {
  check_split("MasterWeights::load", /*unwritten=*/false);
  const detail::InternalOps guard;
  auto read = detail::read_all(*model_, archive, owner_);
  std::vector<detail::NarrowWeight> halves(read.size());
  for (std::size_t i = 0; i < read.size(); ++i) {  // memory first: then nothing fails
    auto& [to, from] = read[i];
    const Weight* const weight = detail::weight_of(weights_, to);
    from = from.to(to.device(), weight && weight->is_narrow ? at::kFloat : to.scalar_type());
    if (weight && weight->is_split) halves[i] = detail::NarrowWeight::split(from, to);
  }
  const detail::DropWeightCasts drop_weight_casts;
  for (std::size_t i = 0; i < read.size(); ++i) {
    const auto& [to, from] = read[i];
    if (const Weight* const weight = detail::weight_of(weights_, to)) {
      weight->set(from, halves[i]);
    } else {
      to.copy_(from);
    }
  }
  note_copied();
  was_taken_ = true;  // gradients that the model holds are of before
}

inline std::function<void()> MasterWeights::keep() {
  const detail::InternalOps guard;
  constexpr auto on_host = detail::WriteBack::Copies::on_host;
  detail::WriteBack kept;
  for (const Weight& weight : weights_) {
    kept.add(weight.parameter, on_host);
    kept.add(weight.master, on_host);
    if (const auto* const split = detail::split_of(weight.parameter)) kept.add(split->low, on_host);
  }
  for (const at::Tensor& buffer : model_->buffers()) kept.add(buffer, on_host);
  const bool was_copied = master_versions() == copied_versions_;
  return [this, kept = std::move(kept), was_copied, was_taken = was_taken_] {
    const detail::InternalOps internal;
    const detail::DropWeightCasts drop_weight_casts;
    kept.put_back();
    for (const Weight& weight : weights_) {
      detail::SplitWeight* const split = detail::split_of(weight.parameter);
      if (split) split->note_version(weight.parameter);
    }
    if (was_copied) {
      note_copied();
    } else {
      copied_versions_ = master_versions() - 1;
      for (Weight& weight : weights_) weight.given.note(weight.parameter);
    }
    was_taken_ = was_taken;
  };
}

}  // namespace TORCHAMP_NAMESPACE
