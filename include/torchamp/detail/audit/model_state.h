// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
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
  explicit ModelState(const torch::nn::Module& model) : random_(RngState::now()) {
    const NotRecordedOps internal;
    for (const auto& item : model.named_parameters()) {
      if (!item.value().defined()) continue;
      parameters_.push_back({item.key(), item.value(), item.value().detach().clone()});
      gradients_.push_back(item.value().grad());
    }
    for (const auto& item : model.named_buffers()) {
      if (item.value().defined()) {
        buffers_.push_back({item.key(), item.value(), item.value().detach().clone()});
      }
    }
    for (const auto& item : model.named_modules("", /*include_self=*/true)) {
      trains_.emplace_back(item.value(), item.value()->is_training());
    }
  }
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;
  ~ModelState() {
    begin_step();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].tensor.mutable_grad() = gradients_[i];
    }
  }

  /// As at first, without gradients.
  void begin_step() const {
    const NotRecordedOps internal;
    const DropWeightCasts drop_casts;
    for (const Kept& kept : parameters_) {
      if (differs(kept)) kept.tensor.detach().copy_(kept.values);
      kept.tensor.mutable_grad() = at::Tensor();
    }
    for (const Kept& kept : buffers_) {
      if (differs(kept)) kept.tensor.detach().copy_(kept.values);
    }
    for (const auto& [module, trains] : trains_) {
      if (module->is_training() != trains) module->train(trains);
    }
    random_.apply();
  }

  void check_parameters_unchanged() const {
    const NotRecordedOps internal;
    for (const Kept& kept : parameters_) {
      TORCH_CHECK(!differs(kept), "PrecisionAudit::run: the step has changed the parameter '",
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
      const at::Tensor gradient = kept.tensor.grad();
      all.push_back(gradient.defined() ? gradient.detach().to(at::kFloat, false, /*copy=*/true)
                                       : at::Tensor());
    }
    return all;
  }

  const std::string& name_of_parameter(std::size_t index) const { return parameters_[index].name; }

 private:
  struct Kept {
    std::string name;
    at::Tensor tensor, values;
  };

  /// Bit for bit, for NaN differs from itself.
  static bool differs(const Kept& kept) {
    const at::Tensor now = kept.tensor.detach();
    if (at::equal(now, kept.values)) return false;
    const auto bits = [](const at::Tensor& values) {
      return values.reshape({-1}).contiguous().view(at::kByte);
    };
    return !at::equal(bits(now), bits(kept.values));
  }

  RngState random_;
  std::vector<Kept> parameters_, buffers_;
  std::vector<at::Tensor> gradients_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> trains_;
};

/// How far `gradients` are from `exact`: the squared length of the difference over that of the
/// exact one, the mean over all parameters that have one. A gradient that is nearly nothing beside
/// the others, of a bias before a batch norm, say, counts as if its numbers had a thousandth of the
/// others' mean square. Infinite where not finite.
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
    if (all > 0.) sum += error / all;
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
