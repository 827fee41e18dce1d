// SPDX-License-Identifier: BSD-3-Clause
// How all kinds of masters check and list the weights of a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <regex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/products/cpu_products.h"
#include "torchamp/detail/extras/shared/stable_order.h"
#include "torchamp/master_weights.h"

namespace TORCHAMP_NAMESPACE::detail {

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
                    " weights cannot be split, because they are not the upper half of fp32 "
                    "numbers. Pass .dtype = torch::kBFloat16 with MasterStorage::split.");
}

/// Throws for a parameter that already has a master, that no optimizer can step, or that cannot be
/// split. With main_gradients it also throws if the program's own hook is in the place of ours.
inline void check_may_be_master(const char* owner, const std::string& name,
                                const at::Tensor& parameter, bool splits, bool main_gradients) {
  const auto main = main_gradient_of(parameter);
  TORCH_CHECK(!main || !main->is_averaged, owner, ": the gradients of the parameter '", name,
              "' are averaged by a DistributedDataParallel. Destroy that first, and make a new one "
              "after the masters.");
  const WeightMeta* const meta = weight_meta_of(parameter);
  TORCH_CHECK(!meta || meta->masters.expired(), owner, ": the parameter '", name,
              "' has a master already in other MasterWeights or ShardedMasterWeights, which would "
              "overwrite the model's weights. Use these masters, or destroy them first.");
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

/// Throws if two of these weights have the same memory, one of them is trained, and the cast would
/// give one its own: it would no longer follow the other.
template <class Weights>
void check_apart(const char* owner, const Weights& weights) {
  using Weight = typename Weights::value_type;
  struct Range {
    std::uintptr_t memory;   // the storage: elements of MPS have no addresses
    std::size_t begin, end;  // in bytes
    const Weight* weight;
  };
  std::vector<Range> ranges;
  for (const Weight& weight : weights) {
    const at::Tensor& parameter = weight.parameter;
    const bool is_one_range = parameter.layout() == at::kStrided && parameter.has_storage() &&
                              parameter.is_non_overlapping_and_dense();
    if (!is_one_range || parameter.numel() == 0) continue;
    const auto memory = reinterpret_cast<std::uintptr_t>(storage_of(parameter));
    const auto begin = static_cast<std::size_t>(parameter.storage_offset()) * parameter.itemsize();
    ranges.push_back({memory, begin, begin + parameter.nbytes(), &weight});
  }
  sort_in_stable_order(ranges, [](const Range& one) { return std::pair(one.memory, one.begin); });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    const Range &one = ranges[i - 1], &other = ranges[i];
    const bool overlap = one.memory == other.memory && other.begin < one.end;
    const bool part = one.weight->is_narrow || other.weight->is_narrow;
    const bool any_trained =
        one.weight->parameter.requires_grad() || other.weight->parameter.requires_grad();
    TORCH_CHECK(
        !overlap || !part || !any_trained, owner, ": the parameters '", one.weight->name, "' and '",
        other.weight->name,
        "' are two tensors in the same memory, which the cast would separate. Use one tensor in "
        "both places (decoder->weight = encoder->weight), or give each its own memory: "
        "parameter.set_data(parameter.clone()).");
  }
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
    if (is_narrow && parameter.is_cpu()) prepare_cpu_products(options.dtype);
    weights_.push_back({std::move(name), std::move(parameter), is_narrow});
  }
  check_apart(owner_, weights_);
}

}  // namespace TORCHAMP_NAMESPACE::detail
