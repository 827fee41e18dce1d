// SPDX-License-Identifier: BSD-3-Clause
// Ops of CUDA's own, and those that mean something else on a CPU, by ops that mean the same there.
#include <map>

#include "op.h"

namespace mirror {

using at::Tensor;

namespace {

Tensor convolution(const Arguments& a, const Tensor& bias, bool transposed) {
  const std::vector<int64_t> padding = a.ints("padding");
  const std::vector<int64_t> output_padding =
      transposed ? a.ints("output_padding") : std::vector<int64_t>(padding.size(), 0);
  return at::convolution(a.in_fp32("self"), a.in_fp32("weight"), bias, a.ints("stride"), padding,
                         a.ints("dilation"), transposed, output_padding, a.integer("groups"));
}

/// CUDA's kernel checks fp64 gradients as fp32.
Results unscale(const Arguments& a) {
  const std::vector<Tensor> gradients = a.tensors("self");
  Tensor found_inf = a.tensor("found_inf");
  for (const Tensor& gradient : gradients) {
    if (gradient.scalar_type() != at::kDouble) continue;
    if (gradient.to(at::kFloat).isinf().any().item<bool>()) found_inf.fill_(1.);
  }
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, a.tensor("inv_scale"));
  return {};
}

/// Each channel by itself.
Results depthwise(const Arguments& a) {
  const Tensor input = a.in_fp32("self");
  const std::vector<int64_t> padding = a.ints("padding");
  return {at::convolution(input, a.in_fp32("weight"), a.in_fp32("bias"), a.ints("stride"), padding,
                          a.ints("dilation"), false, std::vector<int64_t>(padding.size(), 0),
                          input.size(1))};
}

/// `input_dtype` may be narrower than the gradient: softmax in fp16 with results in fp32.
Tensor in_dtype(const Tensor& tensor, const Arguments& a, const char* name) {
  return tensor.to(a[name].toScalarType());
}

Tensor sum(const Tensor& a, const Tensor& b, const Arguments& arguments) {
  return at::add(arguments["beta"].toScalar().to<double>() * a, b, arguments["alpha"].toScalar());
}

/// A scale for the whole matrix, for rows, for columns or for blocks, as large as the matrix.
Tensor spread(const Tensor& scale, const Tensor& matrix) {
  Tensor result = scale.to(at::kFloat);
  if (result.numel() == 1) return result.reshape({1, 1});
  if (result.dim() == 1) result = result.unsqueeze(result.size(0) == matrix.size(0) ? 1 : 0);
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t have = result.size(d), want = matrix.size(d);
    if (have != 1 && have != want)
      result = result.repeat_interleave((want + have - 1) / have, d).narrow(d, 0, want);
  }
  return result;
}

Tensor scaled_product(const Arguments& a, const Tensor& scale_a, const Tensor& scale_b) {
  const Tensor left = a.in_fp32("self"), right = a.in_fp32("mat2");
  const Tensor product = at::mm(left * spread(scale_a, left), right * spread(scale_b, right));
  const Tensor bias = a.tensor("bias");
  return bias.defined() ? product + bias : product;
}

}  // namespace

Substitutes convolutions_and_norms() {
  return {
      {"cudnn_convolution", [](const Arguments& a) { return Results{convolution(a, {}, false)}; }},
      {"cudnn_convolution_transpose",
       [](const Arguments& a) { return Results{convolution(a, {}, true)}; }},
      {"cudnn_convolution_relu",
       [](const Arguments& a) { return Results{convolution(a, a.in_fp32("bias"), false).relu()}; }},
      {"_conv_depthwise2d", depthwise},
      {"conv_depthwise3d", depthwise},
      {"cudnn_batch_norm",
       [](const Arguments& a) {
         const auto [output, mean, deviation] = at::native_batch_norm(
             a.tensor("input"), a.tensor("weight"), a.tensor("bias"), a.tensor("running_mean"),
             a.tensor("running_var"), a.flag("training"), a.number("exponential_average_factor"),
             a.number("epsilon"));
         return Results{output, mean, deviation, Tensor()};
       }},
      {"cudnn_batch_norm_backward",
       [](const Arguments& a) {
         const auto [input, weight, bias] = at::native_batch_norm_backward(
             a.tensor("grad_output"), a.tensor("input"), a.tensor("weight"),
             a.tensor("running_mean"), a.tensor("running_var"), a.tensor("save_mean"),
             a.tensor("save_var"), true, a.number("epsilon"), {true, true, true});
         return Results{input, weight, bias};
       }},
      {"_softmax",
       [](const Arguments& a) {
         return Results{at::_softmax(a.in_fp32("self"), a.integer("dim"), false)};
       }},
      {"_log_softmax",
       [](const Arguments& a) {
         return Results{at::_log_softmax(a.in_fp32("self"), a.integer("dim"), false)};
       }},
      {"_softmax_backward_data",
       [](const Arguments& a) {
         const Tensor grad = a.in_fp32("grad_output");
         return Results{in_dtype(at::_softmax_backward_data(grad, a.in_fp32("output"),
                                                            a.integer("dim"), grad.scalar_type()),
                                 a, "input_dtype")};
       }},
      {"_log_softmax_backward_data",
       [](const Arguments& a) {
         const Tensor grad = a.in_fp32("grad_output");
         return Results{
             in_dtype(at::_log_softmax_backward_data(grad, a.in_fp32("output"), a.integer("dim"),
                                                     grad.scalar_type()),
                      a, "input_dtype")};
       }},
  };
}

Substitutes checks() {
  return {{"_amp_foreach_non_finite_check_and_unscale_", unscale}};
}

Substitutes products() {
  return {
      {"mm.dtype",
       [](const Arguments& a) { return Results{at::mm(a.in_fp32("self"), a.in_fp32("mat2"))}; }},
      {"bmm.dtype",
       [](const Arguments& a) { return Results{at::bmm(a.in_fp32("self"), a.in_fp32("mat2"))}; }},
      {"addmm.dtype",
       [](const Arguments& a) {
         return Results{sum(a.in_fp32("self"), at::mm(a.in_fp32("mat1"), a.in_fp32("mat2")), a)};
       }},
      {"baddbmm.dtype",
       [](const Arguments& a) {
         return Results{
             sum(a.in_fp32("self"), at::bmm(a.in_fp32("batch1"), a.in_fp32("batch2")), a)};
       }},
      {"_scaled_mm",
       [](const Arguments& a) {
         const Tensor product = scaled_product(a, a.tensor("scale_a"), a.tensor("scale_b"));
         const Tensor scale = a.tensor("scale_result");
         return Results{scale.defined() ? product * scale : product};
       }},
      {"_scaled_mm_v2",
       [](const Arguments& a) {
         return Results{scaled_product(a, a.tensors("scale_a").at(0), a.tensors("scale_b").at(0))};
       }},
  };
}

const Substitute* substitute_for(const std::string& name) {
  static const auto* const all = [] {
    auto* const result = new std::map<std::string, Substitute>();
    for (const auto& part :
         {convolutions_and_norms(), products(), attention(), recurrent_layers(), checks()})
      result->insert(part.begin(), part.end());
    return result;
  }();
  const auto found = all->find(name);
  return found == all->end() ? nullptr : &found->second;
}

}  // namespace mirror
