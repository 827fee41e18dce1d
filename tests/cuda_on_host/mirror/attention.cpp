// SPDX-License-Identifier: BSD-3-Clause
// The fused attention kernels, by plain products in fp32. Without dropout.
#include <cmath>
#include <limits>

#include "op.h"

namespace mirror {

using at::Tensor;

namespace {

struct Attention {
  Tensor query, key, value, bias;  // heads of keys and values as many as the query's
  int64_t key_heads;
  bool is_causal;
  double scale;

  Attention(const Arguments& a, const char* bias_name)
      : query(a.in_fp32("query")),
        key_heads(a.tensor("key").size(-3)),
        is_causal(a.flag("is_causal")),
        scale(a["scale"].isDouble() ? a.number("scale")
                                    : 1 / std::sqrt(static_cast<double>(query.size(-1)))) {
    TORCH_CHECK(a.number("dropout_p") == 0, "attention with dropout is not mirrored");
    const int64_t shared = query.size(-3) / key_heads;
    key = a.in_fp32("key").repeat_interleave(shared, -3);
    value = a.in_fp32("value").repeat_interleave(shared, -3);
    if (bias_name) bias = a.in_fp32(bias_name);
  }

  Tensor scores() const {
    Tensor result = at::matmul(query, key.transpose(-2, -1)) * scale;
    if (bias.defined()) result = result + bias;
    if (!is_causal) return result;
    const Tensor seen = at::ones({query.size(-2), key.size(-2)}, at::kBool).tril();
    return result.masked_fill(seen.logical_not(), -std::numeric_limits<float>::infinity());
  }

  /// A gradient of keys or values whose heads were repeated.
  Tensor of_key_heads(const Tensor& grad) const {
    if (grad.size(-3) == key_heads) return grad;
    std::vector<int64_t> sizes = grad.sizes().vec();
    sizes[sizes.size() - 3] = key_heads;
    sizes.insert(sizes.end() - 2, grad.size(-3) / key_heads);
    return grad.reshape(sizes).sum(-3);
  }
};

Results forward(const Attention& a, std::size_t outputs) {
  const Tensor scores = a.scores();
  Results results(outputs, Tensor());
  results[0] = at::matmul(at::softmax(scores, -1), a.value);
  results[1] = at::logsumexp(scores, -1);
  return results;
}

Results backward(const Attention& a, const Tensor& grad, std::size_t outputs) {
  const Tensor weights = at::softmax(a.scores(), -1);
  const Tensor of_weights = at::matmul(grad, a.value.transpose(-2, -1));
  const Tensor of_scores = weights * (of_weights - (of_weights * weights).sum(-1, true));
  Results results(outputs, Tensor());
  results[0] = at::matmul(of_scores, a.key) * a.scale;
  results[1] = a.of_key_heads(at::matmul(of_scores.transpose(-2, -1), a.query) * a.scale);
  results[2] = a.of_key_heads(at::matmul(weights.transpose(-2, -1), grad));
  if (outputs > 3 && a.bias.defined()) results[3] = at::sum_to(of_scores, a.bias.sizes());
  return results;
}

}  // namespace

Substitutes attention() {
  return {
      {"_scaled_dot_product_flash_attention",
       [](const Arguments& a) { return forward(Attention(a, nullptr), 9); }},
      {"_scaled_dot_product_flash_attention_backward",
       [](const Arguments& a) {
         return backward(Attention(a, nullptr), a.in_fp32("grad_out"), 3);
       }},
      {"_scaled_dot_product_efficient_attention",
       [](const Arguments& a) {
         Results results = forward(Attention(a, "attn_bias"), 4);
         if (!a.flag("compute_log_sumexp")) {
           results[1] = Tensor();
         } else {  // its rows are padded to a multiple of 32
           const Tensor rows = results[1].toTensor();
           const int64_t rest = (32 - rows.size(-1) % 32) % 32;
           results[1] =
               at::constant_pad_nd(rows, {0, rest}, std::numeric_limits<float>::infinity());
         }
         return results;
       }},
      {"_scaled_dot_product_efficient_attention_backward",
       [](const Arguments& a) {
         return backward(Attention(a, "attn_bias"), a.in_fp32("grad_out_"), 4);
       }},
  };
}

}  // namespace mirror
