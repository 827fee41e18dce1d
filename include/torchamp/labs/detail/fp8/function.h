// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/autograd_node.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/extras/weights/derived.h"
#include "torchamp/labs/detail/fp8/formats.h"
#include "torchamp/labs/detail/fp8/quantize.h"
#include "torchamp/labs/fp8_options.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [The rehearsal of fp8 on a CPU]
// Every code of both formats is exact in bf16, and a bf16 product sums in fp32. So a bf16 product
// of the decoded values, multiplied by the scales (powers of two), equals the result of a GPU's fp8
// units, except for their order and precision of sums. Where the result is
// fp16, whose range the unscaled sums could exceed, the product is computed in fp32 and rounded
// once.
//
// A GPU of compute capability 9.0 aligns 32 products, and the previous sum, to the largest of them,
// and adds the 14 highest bits of each. (use_fast_accum concerns sums of such sums only.) So each
// of K products loses less than 2^-13 of the largest product. If an element nearly cancels out, it
// may differ from the rehearsal by far more than a rounding of bf16. Small integers, whose sums
// need no more bits, agree exactly.

/// The decoded matrix without its inverse_scale, in bf16 or fp32. Exact: a block's scale is a power
/// of two, or has 4 bits, and an element has 2 bits.
inline at::Tensor decoded(const Fp8Matrix& matrix, at::ScalarType dtype) {
  if (!matrix.block_scales.defined()) return decode(matrix.codes, dtype);
  return dtype == at::kFloat ? decoded_blocks<float>(matrix)
                             : decoded_blocks<c10::BFloat16>(matrix);
}

/// See Note [The rehearsal of fp8 on a CPU].
inline at::Tensor rehearsed_product(const Fp8Matrix& a, const Fp8Matrix& b, at::ScalarType dtype) {
  const at::ScalarType values = dtype == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
  at::Tensor product = at::mm(decoded(a, values), decoded(b, values).t());
  if (a.inverse_scale.defined()) product.mul_(a.inverse_scale.mul(b.inverse_scale));
  return product.to(dtype);
}

/// Row-major, rows and columns zero-padded to multiples of 16. As bytes, because not every kernel
/// here supports the 8-bit formats; in both formats the zero is 0.
inline at::Tensor padded_to_16(const at::Tensor& codes, bool pad_rows) {
  const auto missing = [](int64_t size) { return (16 - size % 16) % 16; };
  const int64_t rows = pad_rows ? missing(codes.size(0)) : 0;
  const int64_t columns = missing(codes.size(1));
  at::Tensor bytes = codes.view(at::kByte);
  if (rows != 0 || columns != 0) bytes = at::constant_pad_nd(bytes, {0, columns, 0, rows});
  return bytes.contiguous().view(codes.scalar_type());
}

/// `a` [M, K] times the transpose of `b` [N, K], in `dtype`. `fast`: a GPU may keep fewer bits of
/// the sums.
inline at::Tensor fp8_product(const Fp8Matrix& a, const Fp8Matrix& b, at::ScalarType dtype,
                              bool fast) {
  if (a.rows == 0 || b.rows == 0 || a.columns == 0) {
    return at::zeros({a.rows, b.rows}, a.codes.options().dtype(dtype));
  }
  if (a.codes.is_cpu()) return rehearsed_product(a, b, dtype);
  const at::Tensor columns = padded_to_16(b.codes, /*pad_rows=*/true);
  at::Tensor scale_a = a.inverse_scale, scale_b = b.inverse_scale;
  if (a.block_scales.defined()) {  // one a row
    scale_a = a.block_scales.contiguous();
    scale_b = b.block_scales.t();
    const int64_t padding = columns.size(0) - b.rows;
    if (padding != 0) scale_b = at::constant_pad_nd(scale_b, {0, padding});
    scale_b = scale_b.contiguous();
  }
  const at::Tensor product =
      at::_scaled_mm(padded_to_16(a.codes, /*pad_rows=*/false), columns.t(), scale_a, scale_b,
                     /*bias=*/{}, /*scale_result=*/{}, dtype, fast);
  return product.narrow(1, 0, b.rows).contiguous();
}

/// Why fp8_product() fails on the current device of a type, by a trial of 16 x 16; empty if it
/// works.
inline std::string why_no_fp8_product(const Fp8Options& options, at::DeviceType device) {
  if (device == at::kCPU) return {};
  if (options.recipe != Fp8Recipe::tensorwise && options.recipe != Fp8Recipe::rowwise) {
    return "products of this recipe are made on a CPU only";
  }
  try {
    const at::Tensor zeros = at::zeros({16, 16}, at::TensorOptions(device).dtype(at::kBFloat16));
    const auto matrix = quantize_as(options, Fp8Operand::input, /*transposed=*/false, zeros);
    (void)fp8_product(matrix, matrix, at::kBFloat16, /*fast=*/true);
    return {};
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  }
}

/// The forms of a weight and of its transpose: see Note [Two forms of an operand].
struct WeightForms {
  Fp8Matrix plain, transposed;
};

/// The forms of a weight [N, K], transposed if required. Forms of parameters are cached like casts
/// of weights: see Note [What is derived from weights].
inline WeightForms weight_forms(const Fp8Options& options, const at::Tensor& w, bool transposed) {
  constexpr auto operand = Fp8Operand::weight;
  // A GPU needs contiguous rows; a CPU takes any.
  const bool is_view = w.is_cpu() && is_transposable(options.recipe, operand);
  const auto make = [&](const Tensors&) {
    const c10::InferenceMode no_inference(false);
    const InternalOps internal;
    const auto plain = quantize_as(options, operand, /*transposed=*/false, w);
    Tensors tensors{plain.codes, plain.inverse_scale, plain.block_scales};
    if (transposed && !is_view) {
      const auto form = quantize_transposed(options, operand, w, plain);
      const at::Tensor codes = w.is_cpu() ? form.codes : form.codes.contiguous();
      tensors.insert(tensors.end(), {codes, form.inverse_scale, form.block_scales});
    }
    return tensors;
  };
  const at::Tensor owner = w.is_view() ? at::Tensor(w._base()) : w;
  const bool is_parameter = owner.is_leaf() && owner.requires_grad();
  if (w.numel() == 0) {
    const auto empty = quantize(w, at::kFloat8_e4m3fn);
    return {empty, empty.t()};
  }
  const auto variant = static_cast<std::uint32_t>(options.recipe) + (transposed ? 256U : 0U);
  const WeightKeep keep = is_parameter ? keep_of_this_thread() : WeightKeep();
  const Tensors made = derived_weights().get(w, {WeightForm::Kind::fp8, variant}, keep, make);
  const Fp8Block block = block_of(options.recipe, operand);
  const Fp8Matrix plain{w.size(0), w.size(1), made[0], made[1], made[2], block};
  if (!transposed) return {plain, {}};
  if (is_view) return {plain, plain.t()};
  return {plain, {w.size(1), w.size(0), made[3], made[4], made[5], block}};
}

/// The backward node of a product's gradients, for second derivatives.
class NoSecondDerivative final : public torch::autograd::Node {
 public:
  std::string name() const override { return "torchamp::NoSecondDerivative"; }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    TORCH_CHECK(
        false,
        "torchamp: fp8 products have no second derivative. If a part of the model needs one, run "
        "that part under a policy without the fp8 rule, by a guard or a module policy.");
  }
};

/// The matrix of all dimensions but the last as rows.
inline int64_t rows_of(at::IntArrayRef sizes) {
  return c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
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
  std::optional<Operands> operands{};  ///< until they are released

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    operands.reset();
  }

  std::string name() const override { return "torchamp::Fp8Backward"; }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
};

inline torch::autograd::variable_list Fp8Backward::apply(
    torch::autograd::variable_list&& gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(operands,
              "torchamp: a second backward pass through an fp8 product, whose operands have been "
              "freed. Pass retain_graph=true to the first backward.");
  torch::autograd::variable_list results(2);
  const at::Tensor& gradient = gradients[0];
  if (!gradient.defined()) return results;
  const Operands& saved = *operands;
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
  static_cast<Fp8Backward&>(*node).operands = std::move(saved);
  torch::autograd::create_gradient_edge(result, std::move(node));
  return result;
}

}  // namespace TORCHAMP_NAMESPACE::detail
