// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "torchamp/detail/optim/state_tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// LBFGS holds tensors that are undefined before they are used, which LibTorch cannot write: the
/// memory of a step, and all of its state before a first iteration. They are left out.
inline void save_lbfgs(torch::optim::LBFGS& optimizer, torch::serialize::OutputArchive& archive) {
  auto& states = optimizer.state();
  std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> kept;
  std::vector<void*> keys;
  for (auto& [key, state] : states) keys.push_back(key);
  for (void* const key : keys) {
    auto& state = static_cast<torch::optim::LBFGSParamState&>(*states[key]);
    auto written = std::make_unique<torch::optim::LBFGSParamState>(state);
    written->al(std::nullopt);
    kept.push_back(std::exchange(states[key], std::move(written)));
    if (!state.d().defined()) states.erase(key);
  }
  const auto put_back = [&] {
    for (std::size_t i = 0; i < keys.size(); ++i) states[keys[i]] = std::move(kept[i]);
  };
  try {
    optimizer.save(archive);
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
}

inline void save_optimizer(torch::optim::Optimizer& optimizer,
                           torch::serialize::OutputArchive& archive) {
  if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGS*>(&optimizer)) {
    return save_lbfgs(*lbfgs, archive);
  }
  optimizer.save(archive);
}

/// LibTorch takes over state of any shape, with which the next step fails.
inline void check_state_fits(const torch::optim::Optimizer& optimizer) {
  std::size_t place = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer.state().end() && found->second) {
        for_each_state_tensor(*found->second, [&](const at::Tensor& tensor) {
          TORCH_CHECK(tensor.sizes() == parameter.sizes(), "it holds state of shape ",
                      tensor.sizes(), " for parameter ", place, ", which is ", parameter.sizes(),
                      " in the program");
        });
      }
      ++place;
    }
  }
}

inline void load_optimizer(torch::optim::Optimizer& optimizer,
                           torch::serialize::InputArchive& archive) {
  optimizer.state().clear();  // of parameters that had none in the file
  try {
    optimizer.load(archive);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "it is not of this kind of optimizer with these parameters (",
                error.what_without_backtrace(), ")");
  }
  check_state_fits(optimizer);
  if (!dynamic_cast<torch::optim::Adagrad*>(&optimizer)) return;
  // It makes its states when it is made, and steps without a look.
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
      if (state) continue;
      auto first = std::make_unique<torch::optim::AdagradParamState>();
      first->step(0);
      first->sum(at::full_like(parameter.detach(), options.initial_accumulator_value()));
      state = std::move(first);
    }
  }
}

}  // namespace torchamp::detail
