// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/rsub.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/shards.h"
#include "torchamp/detail/core/optim/device_scalars.h"
#include "torchamp/detail/core/optim/flat_step.h"
#include "torchamp/detail/core/optim/step_list.h"
#include "torchamp/detail/core/optim/stored_optimizer.h"
#include "torchamp/detail/core/products/cpu_products.h"
#include "torchamp/muon_options.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Steps of Muon]
// A step is the step of torch.optim.Muon: the momentum, in the dtype of a FlatStep; Newton-Schulz
// in bf16, as in Python; then the update. Matrices of one shape and layout are stepped together as
// one tensor of three dimensions, at most max_batch_elements at a time: this bounds the memory of a
// step, and larger products are no faster. So the number of launches does not depend on the number
// of matrices of a shape.
//
// The order of a matrix's columns does not matter to Newton-Schulz, and a matrix and its transpose
// give results that are each other's transpose. Python's step transposes tall matrices, and so does
// this one.
//
// A step multiplies in bf16 without a guard, so it decides how a CPU computes these products: see
// Note [Products on CPUs].
struct MuonKernel : StoredKernelBase<MuonOptions, MuonParamState> {
  static constexpr const char* name = "FusedMuon";
  static constexpr int64_t max_batch_elements = int64_t{1} << 25;

  static std::string why_not(const at::Tensor& param) {
    if (shards_of(param)) {
      return " is a shard of ShardedMasterWeights. Muon needs whole matrices: use MasterWeights, "
             "or an optimizer that treats each element independently.";
    }
    if (param.dim() >= 2) return "";
    return " is of shape " + c10::str(param.sizes()) +
           ". Muon steps matrices: give parameters of fewer than two dimensions to "
           "FusedAdamW, as split_for_muon() does.";
  }

  static void step(const Options& o, const StepList& list, const StepScalars& scalars) {
    if (list.params.front().is_cpu()) prepare_cpu_products(at::kBFloat16);
    for (const StepList& batch : batches_of(list)) step_batch(o, batch, scalars);
  }

 private:
  /// The matrices of a list, by shape and layout, without empty matrices.
  static std::vector<StepList> batches_of(const StepList& list) {
    std::vector<StepList> batches;
    const auto as_it_is = [](const at::Tensor& tensor) { return tensor; };
    for (std::size_t i = 0; i < list.params.size(); ++i) {
      const at::Tensor& param = list.params[i];
      if (param.numel() == 0) continue;
      const auto takes = [&](const StepList& batch) {
        const at::Tensor& first = batch.params.front();
        const auto elements = static_cast<int64_t>(batch.params.size() + 1) * param.numel();
        return same_layout(first, param) && elements <= max_batch_elements;
      };
      auto batch = std::find_if(batches.begin(), batches.end(), takes);
      if (batch == batches.end()) batch = batches.insert(batch, list.emptied());
      batch->params.push_back(param);
      batch->add_beside_param(list, i, as_it_is);
    }
    return batches;
  }

  static void step_batch(const Options& o, const StepList& batch, const StepScalars& scalars) {
    FlatStep step(batch, scalars, o.lr());
    step.state[0].lerp_(step.grads, 1. - o.momentum());
    const at::Tensor update =
        o.nesterov() ? step.grads.lerp_(step.state[0], o.momentum()) : step.state[0];
    const at::Tensor& param = batch.params.front();
    // The matrices in the layout of the parameters and of the flat tensor.
    std::vector<int64_t> sizes = param.sizes().vec(), strides = param.strides().vec();
    sizes.insert(sizes.begin(), static_cast<int64_t>(batch.params.size()));
    strides.insert(strides.begin(), param.numel());
    const at::Tensor updates = update.as_strided(sizes, strides, update.storage_offset());
    const at::Tensor directions = at::empty_strided(sizes, strides, update.options());
    directions.copy_(orthogonal(o, updates.flatten(2).to(at::kBFloat16)).view(sizes));
    step.params.mul_(at::rsub(step.rate, 1., o.weight_decay()));
    step.descend(in_memory_order(directions), step.rate.mul(adjustment(o, param)));
  }

  /// The factor of the learning rate for such a matrix.
  static double adjustment(const Options& o, const at::Tensor& param) {
    const auto rows = static_cast<double>(param.size(0));
    const double columns = static_cast<double>(param.numel()) / rows;
    switch (o.adjust_lr()) {
      case Options::AdjustLr::match_rms_adamw:
        return 0.2 * std::sqrt(std::max(rows, columns));
      case Options::AdjustLr::spectral_unclamped:
        return std::sqrt(rows / columns);
      default:
        return std::sqrt(std::max(1., rows / columns));
    }
  }

  /// The matrices of a batch, in bf16, with their singular values moved towards 1.
  static at::Tensor orthogonal(const Options& o, const at::Tensor& matrices) {
    const bool is_tall = matrices.size(1) > matrices.size(2);
    at::Tensor x = is_tall ? matrices.mT() : matrices;
    x = x.div(at::linalg_vector_norm(x, 2., {1, 2}, /*keepdim=*/true).clamp_min_(o.eps()));
    const auto [a, b, c] = o.ns_coefficients();
    for (int64_t i = 0; i < o.ns_steps(); ++i) {
      const at::Tensor gram = at::bmm(x, x.mT());
      x = at::baddbmm(x, at::baddbmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c), x, /*beta=*/a);
    }
    return (is_tall ? x.mT() : x).contiguous();
  }
};

}  // namespace TORCHAMP_NAMESPACE::detail
