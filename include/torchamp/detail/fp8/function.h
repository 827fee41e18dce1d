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
#include "torchamp/detail/fp8/recipes.h"
#include "torchamp/detail/fp8/weight_forms.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/fp8_options.h"

namespace torchamp::detail {

/// Stands behind the gradients of a product for whoever wants gradients of these.
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

/// The rows of a matrix of all dimensions but the last.
inline int64_t rows_of(at::IntArrayRef sizes) {
  int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  return rows;
}

/// The derivative of an fp8 product x w^T of matrices. Keeps the 8-bit operands.
class Fp8Backward final : public torch::autograd::Node {
 public:
  struct Operands {
    Fp8Matrix x, w;              // of the transposes: [K, M] and [K, N]
    std::vector<int64_t> sizes;  // of the caller's x
    bool w_is_transposed;        // the caller's was [K, N]
    at::ScalarType dtype;
    Fp8Options options;
  };

  void keep(Operands operands) { operands_ = std::move(operands); }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
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

inline torch::autograd::variable_list Fp8Backward::apply(
    torch::autograd::variable_list&& gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!released_,
              "torchamp: backward through an fp8 product a second time, whose operands have been "
              "freed. Pass retain_graph=true to the first backward.");
  torch::autograd::variable_list results(2);
  const at::Tensor& gradient = gradients[0];
  if (!gradient.defined()) return results;
  const Operands& saved = operands_;
  {
    const InternalOps internal;
    const bool for_x = task_should_compute_output(0);
    const bool for_w = task_should_compute_output(1);
    const at::Tensor matrix = gradient.reshape({rows_of(saved.sizes), gradient.size(-1)});
    const Fp8Options& options = saved.options;
    constexpr auto operand = Fp8Operand::gradient;
    Fp8Matrix g;
    if (for_x || is_transposable(options.recipe, operand)) {
      g = quantize_as(options, operand, /*transposed=*/false, matrix);
    }
    if (for_x) {
      results[0] = fp8_product(g, saved.w, saved.dtype, /*fast=*/false).reshape(saved.sizes);
    }
    if (for_w) {
      const Fp8Matrix g_t = quantize_transposed(options, operand, matrix, g);
      results[1] = saved.w_is_transposed ? fp8_product(saved.x, g_t, saved.dtype, /*fast=*/false)
                                         : fp8_product(g_t, saved.x, saved.dtype, /*fast=*/false);
    }
  }
  if (at::GradMode::is_enabled()) {  // create_graph
    for (at::Tensor& result : results) {
      if (!result.defined()) continue;
      NodePtr error = make_node<NoSecondDerivative>();
      torch::autograd::create_gradient_edge(result, std::move(error));
    }
  }
  return results;
}

/// x w^T in fp8, in `dtype`; w is [N, K], or [K, N] if it is transposed. Recorded by autograd.
inline at::Tensor fp8_linear(const Fp8Options& options, const at::Tensor& x, const at::Tensor& w,
                             bool w_is_transposed, at::ScalarType dtype) {
  const bool recorded = at::GradMode::is_enabled();
  const bool for_x = recorded && x.requires_grad();
  const bool for_w = recorded && w.requires_grad();
  Fp8Backward::Operands saved;
  at::Tensor result;
  {
    const InternalOps internal;
    const at::Tensor rows = w_is_transposed ? w.t() : w;
    const at::Tensor matrix = x.reshape({rows_of(x.sizes()), rows.size(1)});
    constexpr auto operand = Fp8Operand::input;
    const auto x_form = quantize_as(options, operand, /*transposed=*/false, matrix);
    const WeightForms forms = weight_forms(options, rows, for_x);
    result = fp8_product(x_form, forms.plain, dtype, /*fast=*/true);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = rows.size(0);
    result = at::_unsafe_view(result, sizes);
    if (for_x) saved.w = forms.transposed;
    if (for_w) saved.x = quantize_transposed(options, operand, matrix, x_form);
  }
  if (!for_x && !for_w) return result;
  saved.sizes = x.sizes().vec();
  saved.w_is_transposed = w_is_transposed;
  saved.dtype = dtype;
  saved.options = options;
  NodePtr node = make_node<Fp8Backward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, w));
  static_cast<Fp8Backward&>(*node).keep(std::move(saved));
  torch::autograd::create_gradient_edge(result, std::move(node));
  return result;
}

}  // namespace torchamp::detail
