// SPDX-License-Identifier: BSD-3-Clause
// LibTorch's dtype errors in a ported program: the results of matrix products are in 16 bits,
// other tensors are in fp32. Shows each error under Policy::torch(), a remedy, and whether the
// standard policy avoids the error. A test looks for each in guide/porting.md.
#include <torch/torch.h>
#include <torchamp/custom_function.h>
#include <torchamp/torchamp.h>

#include <functional>
#include <iostream>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "support/check.h"

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A kernel of the program's own, which reads floats: a function that asks for fp32 inputs.
struct Halve : torchamp::AutocastFunction<Halve, torch::kFloat> {
  static Tensor forward(AutogradContext*, const Tensor& x) {
    Tensor y = torch::empty_like(x.contiguous());
    const float* from = x.contiguous().data_ptr<float>();
    for (float* to = y.data_ptr<float>(); to != y.data_ptr<float>() + y.numel();) {
      *to++ = *from++ / 2;
    }
    return y;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0] / 2};
  }
};

struct Case {
  std::string says;
  std::function<Tensor()> wrong, right;
  bool cured = true;  // by Policy::standard()
};

std::string error_of(const std::function<Tensor()>& wrong) {
  try {
    wrong();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

int main() {
  torch::manual_seed(0);
  const Tensor x = torch::rand({4, 4}), mask = torch::eye(4).to(torch::kBool);
  const Tensor rows = torch::arange(4), index = torch::zeros({4, 4}, torch::kLong);
  const auto h = [&] { return x.mm(x); };  // in the region's dtype
  const auto memory = [] { return torch::zeros({4, 4}); };
  torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(4, 2));
  const Tensor sequence = torch::rand({4, 1, 4}), padding = mask.narrow(0, 0, 1);
  const auto nowhere = -std::numeric_limits<double>::infinity();

  const std::string too_large = std::string("value cannot be converted to type ") +
                                (TORCH_VERSION_MINOR >= 9 ? "c10" : "at") +
                                "::Half without overflow";
  const std::vector<Case> cases = {
      {"Index put requires the source and destination dtypes match, got Float for the destination "
       "and Half for the source.",
       [&] { return memory().index_put_({rows}, h()); },
       [&] { return memory().index_put_({rows}, h().to(torch::kFloat)); }},
      {"index_add_(): self (Float) and source (Half) must have the same scalar type",
       [&] { return memory().index_add_(0, rows, h()); },
       [&] { return memory().index_add_(0, rows, h().to(torch::kFloat)); }},
      {"scatter(): Expected self.dtype to be equal to src.dtype",
       [&] { return memory().scatter_add_(0, index, h()); },
       [&] { return memory().scatter_add_(0, index, h().to(torch::kFloat)); }},
      {"index_copy_(): self and source expected to have the same dtype, but got (self) Float and "
       "(source) Half",
       [&] { return memory().index_copy_(0, rows, h()); },
       [&] { return memory().index_copy_(0, rows, h().to(torch::kFloat)); }},
      {"expected dtype float for `end` but got dtype c10::Half",
       [&] { return memory().lerp(h(), 0.5); },
       [&] { return memory().lerp(h().to(torch::kFloat), 0.5); }},
      {"self and mat2 must have the same dtype, but got Float and Half",
       [&] { return memory().addmm_(h(), h()); }, [&] { return memory().add_(h().mm(h())); }},
      {"Expected out tensor to have dtype c10::Half, but got float instead",
       [&] {
         Tensor out = memory();
         return torch::mm_out(out, h(), h());
       },
       [&] { return memory().copy_(h().mm(h())); }},
      {"\"lu_cpu\" not implemented for 'Half'", [&] { return h().det(); },
       [&] { return h().to(torch::kFloat).det(); }},
      {too_large, [&] { return h().masked_fill(mask, -1e9); },
       [&] { return h().masked_fill(mask, nowhere).softmax(1); }},
      {too_large, [&] { return h().masked_fill_(mask, -1e9); },
       [&] { return h().masked_fill_(mask, nowhere).softmax(1); }, false},
      {"expected scalar type Float but found Half",
       [&] {
         const Tensor product = h();
         return torch::tensor(*product.data_ptr<float>());
       },
       [&] { return Halve::apply(h()); }, false},
      {"\"attn_output_weights.masked_fill\" not implemented for 'Half'",
       [&] { return std::get<0>(attention->forward(sequence, sequence, sequence, padding)); },
       [&] {
         torchamp::AutocastGuard fp32_products(
             torch::kCPU, {.policy = torchamp::Policy::standard().fp32("bmm")});
         return std::get<0>(attention->forward(sequence, sequence, sequence, padding));
       },
       false},
  };
  for (const auto& [says, wrong, right, cured] : cases) {
    {
      torchamp::AutocastGuard autocast(
          torch::kCPU, {.dtype = torch::kHalf, .policy = torchamp::Policy::torch()});
      const std::string text = error_of(wrong);
      std::cout << text << "\n";
      support::check(text == says, "LibTorch's error is as the guide quotes it");
    }
    torchamp::AutocastGuard autocast(torch::kCPU, torch::kHalf);
    const std::string text = error_of(wrong);
    support::check(cured == (text == "no error"), cured ? "the standard policy avoids the error"
                                                        : "the standard policy keeps the error");
    support::check(right().isfinite().all().item<bool>(), "the remedy works");
  }
}
