// SPDX-License-Identifier: BSD-3-Clause
// The state that runs of a step may change in a model; it is restored at the end.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/detail/extras/shared/kept_tensors.h"
#include "torchamp/detail/extras/shared/rng_state.h"
#include "torchamp/labs/detail/modules/sequential.h"
#include "torchamp/labs/detail/modules/with_policy.h"
#include "torchamp/labs/module_policy.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The state of a model and of random generators that a step may change, restored bit for bit at
/// the end.
class ModelState {
 public:
  explicit ModelState(const torch::nn::Module& model) : model_(model), random_(RngState::now()) {
    const NotRecordedOps internal;
    for (const auto& item : model.named_parameters()) {
      if (!item.value().defined()) continue;
      names_.push_back(item.key());
      gradients_.push_back(item.value().grad());
      before_.add(item.value(), WriteBack::Copies::on_device);
    }
    for (const at::Tensor& buffer : model.buffers()) {
      before_.add(buffer, WriteBack::Copies::on_device);
    }
    for (const auto& item : model.named_modules("", /*include_self=*/true)) {
      trains_.emplace_back(item.value(), item.value()->is_training());
    }
  }
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;
  ~ModelState() {
    try {
      begin_step();
    } catch (const std::exception& error) {
      TORCH_WARN("PrecisionAudit: cannot restore the model: ", error.what());
    }
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      parameter(i).tensor.mutable_grad() = gradients_[i];
    }
  }

  /// Restores the initial state, without gradients.
  void begin_step() const {
    const NotRecordedOps internal;
    const DropWeightCasts drop_casts;
    before_.put_back();
    for (std::size_t i = 0; i < gradients_.size(); ++i) parameter(i).tensor.mutable_grad().reset();
    for (const auto& [module, trains] : trains_) {
      if (module->is_training() != trains) module->train(trains);
    }
    random_.apply();
  }

  void check_parameters_unchanged() const {
    const NotRecordedOps internal;
    std::set<const at::TensorImpl*> known;
    for (const auto& kept : before_.all()) known.insert(kept.tensor.unsafeGetTensorImpl());
    for (const auto& items : {model_.named_parameters(), model_.named_buffers()}) {
      for (const auto& item : items) {
        TORCH_CHECK(!item.value().defined() || known.contains(item.value().unsafeGetTensorImpl()),
                    "PrecisionAudit::run: the step has registered '", item.key(),
                    "' in the model. Run it once before the audit.");
      }
    }
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      TORCH_CHECK(is_unchanged(parameter(i)),
                  "PrecisionAudit::run: the step has changed the parameter '", names_[i],
                  "'. Let it compute the loss and call backward(), without the optimizer.");
    }
  }

  /// Copies of the gradients in fp32, in order of the parameters; undefined if missing.
  std::vector<at::Tensor> gradients() const {
    const NotRecordedOps internal;
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      at::Tensor gradient = parameter(i).tensor.grad();
      if (gradient.defined()) {
        gradient = dense(gradient.detach());
        if (gradient.is_complex()) gradient = at::view_as_real(gradient);
        gradient = gradient.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      }
      all.push_back(gradient);
    }
    return all;
  }

  const std::string& name_of_parameter(std::size_t index) const { return names_[index]; }

 private:
  static at::Tensor dense(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided ? tensor : tensor.to_dense();
  }

  /// Compares bits, because NaN differs from itself.
  static bool is_unchanged(const WriteBack::Kept& kept) {
    if (!is_alike(kept.tensor, kept.values)) return false;
    const at::Tensor now = kept.tensor.detach();
    const auto bits = [](const at::Tensor& tensor) {
      return dense(tensor).reshape({-1}).contiguous().view(at::kByte);
    };
    return same_numbers(now, kept.values) || at::equal(bits(now), bits(kept.values));
  }

  const WriteBack::Kept& parameter(std::size_t i) const { return before_.all()[i]; }

  const torch::nn::Module& model_;
  RngState random_;
  WriteBack before_;  // the parameters, and then the buffers
  std::vector<std::string> names_;
  std::vector<at::Tensor> gradients_;  // of the parameters
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> trains_;
};

/// The policies of a model's modules, restored at the end.
class KeptModulePolicies {
 public:
  explicit KeptModulePolicies(const ForwardSites& sites) {
    for (std::size_t i = 0; i < sites.size(); ++i) {
      if (sites[i].holder != nullptr) {
        holders_.emplace_back(sites[i].holder, sites[i].holder->shared_module_policy());
      } else {
        for (torch::nn::AnyModule* entry : sites[i].entries) entries_.emplace_back(entry, *entry);
      }
    }
  }
  KeptModulePolicies(const KeptModulePolicies&) = delete;
  KeptModulePolicies& operator=(const KeptModulePolicies&) = delete;
  ~KeptModulePolicies() {
    for (auto& [holder, policy] : holders_) holder->set_module_policy(policy);
    for (auto& [entry, former] : entries_) *entry = former;
  }

 private:
  std::vector<std::pair<PolicyHolder*, std::shared_ptr<const ModulePolicy>>> holders_;
  std::vector<std::pair<torch::nn::AnyModule*, torch::nn::AnyModule>> entries_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
