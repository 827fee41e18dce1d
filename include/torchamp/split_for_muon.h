// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/shared/model.h"
#include "torchamp/version.h"

/// @file
/// @brief Extra. split_for_muon(): which parameters of a model FusedMuon steps, and which
/// FusedAdamW.

namespace TORCHAMP_NAMESPACE {

/// The parameters of a model, each in one of the two lists, in the model's order.
struct MuonSplit {
  std::vector<at::Tensor> matrices;  ///< for FusedMuon
  std::vector<at::Tensor> others;    ///< for FusedAdamW
};

/// Options of split_for_muon. An aggregate, for designated initialisers.
struct MuonSplitOptions {
  /// Names of the model's heads: the modules or parameters that compute the model's results.
  /// Examples: "head", or "decoder.head" in a module "decoder". Empty: the head's weight is the
  /// last parameter of at least two dimensions, in the model's order.
  std::vector<std::string> heads = {};
  /// True: the model computes its results with the weight of an embedding, and has no head.
  bool tied_head = false;
  /// The tensors to split, with the names of the model's parameters: pass named_parameters() of the
  /// masters. A parameter whose name is missing here is in neither list. Unset: the model's
  /// parameters.
  std::optional<std::vector<std::pair<std::string, at::Tensor>>> parameters = std::nullopt;
};

/// Splits a model's parameters into parameters for FusedMuon and parameters for FusedAdamW:
///
///     auto [matrices, others] = torchamp::split_for_muon(model);
///     torchamp::FusedMuon muon(matrices, torchamp::MuonOptions(0.02));
///     torchamp::FusedAdamW adamw(others, torch::optim::AdamWOptions(3e-4));
///     torchamp::TrainingStep train(model, {muon, adamw});
///
/// `matrices` has the parameters of at least two dimensions, except for the parameters of
/// embeddings (torch::nn::Embedding and EmbeddingBag) and heads. `others` has all other parameters.
/// A parameter that several modules share is listed once; if one of the modules is an embedding or
/// a head, it is in `others`. Errors: a name in `heads` or `parameters` that the model does not
/// have.
inline MuonSplit split_for_muon(const detail::Model& model, const MuonSplitOptions& options = {});

// ---- Implementation -----------------------------------------------------------------------------

namespace detail {

using Parameters = std::unordered_set<const c10::TensorImpl*>;

/// The parameters of embeddings and, by name, of heads.
inline Parameters parameters_off_muon(const torch::nn::Module& model,
                                      const MuonSplitOptions& options) {
  Parameters found;
  const auto add_all = [&found](const torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters()) {
      found.insert(parameter.unsafeGetTensorImpl());
    }
  };
  const auto add_embedding = [&](const torch::nn::Module& module) {
    if (dynamic_cast<const torch::nn::EmbeddingImpl*>(&module) ||
        dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module)) {
      add_all(module);
    }
  };
  const auto modules = model.named_modules("", /*include_self=*/false);
  add_embedding(model);
  for (const auto& item : modules) add_embedding(*item.value());
  const auto parameters = model.named_parameters();
  for (const std::string& head : options.heads) {
    const auto* const module = modules.find(head);
    const auto* const parameter = parameters.find(head);
    TORCH_CHECK_VALUE(module || parameter, "split_for_muon: the model has no module or parameter '",
                      head,
                      "', which heads names. named_modules() of the model lists its modules.");
    module ? add_all(**module) : void(found.insert(parameter->unsafeGetTensorImpl()));
  }
  if (!options.heads.empty() || options.tied_head) return found;
  at::Tensor last;
  for (const auto& item : parameters) {
    if (item.value().dim() >= 2) last = item.value();
  }
  if (last.defined()) found.insert(last.unsafeGetTensorImpl());
  return found;
}

}  // namespace detail

inline MuonSplit split_for_muon(const detail::Model& model, const MuonSplitOptions& options) {
  const torch::nn::Module& module = *model.get();
  const auto named = module.named_parameters();
  const detail::Parameters off_muon = detail::parameters_off_muon(module, options);

  MuonSplit split;
  detail::Parameters seen;
  const auto add = [&](const at::Tensor& own, const at::Tensor& tensor) {
    const auto* const key = own.unsafeGetTensorImpl();
    if (!seen.insert(key).second) return;
    const bool is_matrix = own.dim() >= 2 && off_muon.count(key) == 0;
    (is_matrix ? split.matrices : split.others).push_back(tensor);
  };
  if (options.parameters) {
    for (const auto& [name, tensor] : *options.parameters) {
      const at::Tensor* const own = named.find(name);
      TORCH_CHECK_VALUE(
          own, "split_for_muon: the model has no parameter '", name,
          "', which parameters names. Pass named_parameters() of the model's masters.");
      add(*own, tensor);
    }
  } else {
    for (const auto& item : named) add(item.value(), item.value());
  }
  return split;
}

}  // namespace TORCHAMP_NAMESPACE
