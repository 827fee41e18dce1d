// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/autograd_node.h"
#include "torchamp/detail/fp8/product.h"
#include "torchamp/detail/fp8/quantize.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Stands behind the gradients of a product for whoever wants gradients of these.
template <class Tensor>
class NoSecondDerivative final : public torch::autograd::Node {
 public:
  std::string name() const override { return "torchamp::NoSecondDerivative"; }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    TORCH_CHECK(false,
                "torchamp: fp8 products have no second derivative. Run the part of the model that "
                "needs one under a policy without the fp8 rule, by a guard or a module policy.");
  }
};

/// The derivative of an fp8 product x w^T of matrices. Keeps the 8-bit operands.
template <class Tensor>
class Fp8Backward final : public torch::autograd::Node {
 public:
  struct Operands {
    Fp8Matrix<Tensor> x, w;      // [M, K] and [N, K]
    std::vector<int64_t> sizes;  // of the caller's x
    bool w_is_transposed;        // the caller's was [K, N]
    at::ScalarType dtype;
  };

  void keep(Operands operands) { operands_ = std::move(operands); }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    operands_ = {};
    released_ = true;
  }

  std::string name() const override { return "torchamp::Fp8Backward"; }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  Operands operands_{};
  bool released_ = false;
};

template <class Tensor>
torch::autograd::variable_list Fp8Backward<Tensor>::apply(
    torch::autograd::variable_list&& gradients) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!released_,
              "torchamp: backward through an fp8 product a second time, whose operands have been "
              "freed. Pass retain_graph=true to the first backward.");
  torch::autograd::variable_list results(2);
  const Tensor& gradient = gradients[0];
  if (!gradient.defined()) return results;
  {
    const InternalOps internal;
    const auto& [x, w, sizes, w_is_transposed, dtype] = operands_;
    const Tensor matrix = gradient.reshape({x.codes.size(0), w.codes.size(0)});
    const Fp8Matrix<Tensor> g = quantize(matrix, at::kFloat8_e5m2);
    if (task_should_compute_output(0)) {
      results[0] = fp8_product(g, w.t(), dtype, /*fast=*/false).reshape(sizes);
    }
    if (task_should_compute_output(1)) {
      results[1] = w_is_transposed ? fp8_product(x.t(), g.t(), dtype, /*fast=*/false)
                                   : fp8_product(g.t(), x.t(), dtype, /*fast=*/false);
    }
  }
  if (at::GradMode::is_enabled()) {  // create_graph
    for (Tensor& result : results) {
      if (!result.defined()) continue;
      auto error = make_node<NoSecondDerivative<Tensor>>();
      torch::autograd::create_gradient_edge(result, std::move(error));
    }
  }
  return results;
}

/// x w^T in fp8, in `dtype`; w is [N, K], or [K, N] if it is transposed. Recorded by autograd.
template <class Tensor>
Tensor fp8_linear(const Tensor& x, const Tensor& w, bool w_is_transposed, at::ScalarType dtype) {
  typename Fp8Backward<Tensor>::Operands operands;
  Tensor result;
  {
    const InternalOps internal;
    const Tensor rows = w_is_transposed ? w.t() : w;
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = rows.size(0);
    int64_t count = 1;
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) count *= sizes[i];
    operands.x = quantize(x.reshape({count, rows.size(1)}), at::kFloat8_e4m3fn);
    operands.w = quantize(rows, at::kFloat8_e4m3fn);
    result = at::_unsafe_view(fp8_product(operands.x, operands.w, dtype, /*fast=*/true), sizes);
  }
  if (at::GradMode::is_enabled() && (x.requires_grad() || w.requires_grad())) {
    operands.sizes = x.sizes().vec();
    operands.w_is_transposed = w_is_transposed;
    operands.dtype = dtype;
    auto node = make_node<Fp8Backward<Tensor>>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, w));
    node->keep(std::move(operands));
    torch::autograd::create_gradient_edge(result, std::move(node));
  }
  return result;
}

}  // namespace torchamp::detail
