// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/modules/sequential.h"
#include "torchamp/detail/modules/with_policy.h"
#include "torchamp/detail/overlay/weight_casts.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/rng_state.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// The audit's own arithmetic, which no observer sees.
class NotRecordedOps {
 private:
  at::DisableRecordFunctionGuard not_recorded_;
  InternalOps internal_;
};

/// What a step may change of a model and of random numbers, put back bit for bit at the end.
class ModelState {
 public:
  explicit ModelState(const torch::nn::Module& model) : model_(model), random_(RngState::now()) {
    const NotRecordedOps internal;
    for (const auto& item : model.named_parameters()) {
      if (!item.value().defined()) continue;
      parameters_.emplace_back(item.key(), item.value());
      gradients_.push_back(item.value().grad());
    }
    for (const auto& item : model.named_buffers()) {
      if (item.value().defined()) {
        buffers_.emplace_back(item.key(), item.value());
      }
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
      TORCH_WARN("PrecisionAudit: cannot put the model back as it was: ", error.what());
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].tensor.mutable_grad() = gradients_[i];
    }
  }

  /// As at first, without gradients.
  void begin_step() const {
    const NotRecordedOps internal;
    const DropWeightCasts drop_casts;
    for (const Kept& kept : parameters_) {
      kept.put_back();
      kept.tensor.mutable_grad() = at::Tensor();
    }
    for (const Kept& kept : buffers_) kept.put_back();
    for (const auto& [module, trains] : trains_) {
      if (module->is_training() != trains) module->train(trains);
    }
    random_.apply();
  }

  void check_parameters_unchanged() const {
    const NotRecordedOps internal;
    check_all_known(parameters_, model_.named_parameters());
    check_all_known(buffers_, model_.named_buffers());
    for (const Kept& kept : parameters_) {
      TORCH_CHECK(!kept.differs(), "PrecisionAudit::run: the step has changed the parameter '",
                  kept.name,
                  "'. It computes the loss and calls backward(); leave the optimizer out.");
    }
  }

  /// Copies of the gradients in fp32, in order of the parameters; undefined ones where there are
  /// none.
  std::vector<at::Tensor> gradients() const {
    const NotRecordedOps internal;
    std::vector<at::Tensor> all;
    for (const Kept& kept : parameters_) {
      at::Tensor gradient =
          kept.tensor.grad().defined() ? dense(kept.tensor.grad().detach()) : at::Tensor();
      if (gradient.defined() && gradient.is_complex()) gradient = at::view_as_real(gradient);
      all.push_back(gradient.defined() ? gradient.to(at::kFloat, false, /*copy=*/true) : gradient);
    }
    return all;
  }

  const std::string& name_of_parameter(std::size_t index) const { return parameters_[index].name; }

 private:
  static at::Tensor dense(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided ? tensor : tensor.to_dense();
  }

  /// A parameter or a buffer, its memory, and what was in there.
  struct Kept {
    Kept(std::string its_name, const at::Tensor& its_tensor)
        : name(std::move(its_name)),
          tensor(its_tensor),
          memory(its_tensor.detach()),
          values(memory.clone()),
          requires_grad(its_tensor.requires_grad()) {}

    /// Bit for bit, for NaN differs from itself; also if it is of another kind.
    bool differs() const {
      if (!is_alike(tensor, values)) return true;
      const at::Tensor now = dense(tensor.detach()), before = dense(values);
      if (at::equal(now, before)) return false;
      const auto bits = [](const at::Tensor& numbers) {
        return numbers.reshape({-1}).contiguous().view(at::kByte);
      };
      return !at::equal(bits(now), bits(before));
    }

    void put_back() const {
      at::Tensor same = tensor;
      const bool has_its_memory =
          is_alike(tensor, memory) && (!tensor.has_storage() || tensor.is_alias_of(memory));
      if (!has_its_memory || !tensor.has_storage()) same.set_data(memory);
      if (differs()) same.detach().copy_(values);
      if (same.requires_grad() != requires_grad) same.set_requires_grad(requires_grad);
    }

    static bool is_alike(const at::Tensor& one, const at::Tensor& other) {
      return one.layout() == other.layout() && one.device() == other.device() &&
             one.scalar_type() == other.scalar_type() && one.sizes().equals(other.sizes());
    }

    std::string name;
    at::Tensor tensor, memory, values;
    bool requires_grad;
  };

  template <class Items>
  static void check_all_known(const std::vector<Kept>& all, const Items& items) {
    std::set<const at::TensorImpl*> known;
    for (const Kept& kept : all) known.insert(kept.tensor.unsafeGetTensorImpl());
    for (const auto& item : items) {
      TORCH_CHECK(!item.value().defined() || known.contains(item.value().unsafeGetTensorImpl()),
                  "PrecisionAudit::run: the step has registered '", item.key(),
                  "' in the model. Run it once before the audit.");
    }
  }

  const torch::nn::Module& model_;
  RngState random_;
  std::vector<Kept> parameters_, buffers_;
  std::vector<at::Tensor> gradients_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> trains_;
};

/// How far `gradients` are from `exact`: the squared length of the difference over that of the
/// exact one, the mean over all parameters that have one. A gradient that is nearly nothing beside
/// the others, of a bias before a batch norm, say, counts as if its numbers had a thousandth of the
/// others' mean square; and one that is wrong altogether counts as 1: of a bias that attention does
/// not depend on, all is noise. Infinite where not finite.
inline double gradient_error(const std::vector<at::Tensor>& gradients,
                             const std::vector<at::Tensor>& exact) {
  const NotRecordedOps internal;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  double squares = 0., elements = 0.;
  for (const at::Tensor& gradient : exact) {
    if (!gradient.defined()) continue;
    squares += gradient.to(at::kDouble).square().sum().item<double>();
    elements += static_cast<double>(gradient.numel());
  }
  const double least = 1e-3 * squares / std::max(elements, 1.);
  double sum = 0.;
  int64_t count = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (!exact[i].defined()) continue;
    if (!gradients[i].defined()) return infinity;
    const at::Tensor wide = exact[i].to(at::kDouble);
    const double all =
        std::max(wide.square().sum().item<double>(), least * static_cast<double>(wide.numel()));
    const auto error = gradients[i].to(at::kDouble).sub(wide).square().sum().item<double>();
    if (!std::isfinite(error)) return infinity;
    if (all > 0.) sum += std::min(error / all, 1.);
    ++count;
  }
  return count == 0 ? 0. : sum / static_cast<double>(count);
}

/// The policies of a model's modules, put back at the end.
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

}  // namespace torchamp::detail
