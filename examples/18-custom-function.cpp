// SPDX-License-Identifier: BSD-3-Clause
// Two custom autograd functions under autocast: one whose backward runs under the state of its
// forward, and one that gets its inputs in fp32 whatever the region's dtype is.
#include <torch/torch.h>
#include <torchamp/custom_function.h>
#include <torchamp/torchamp.h>

#include <iostream>

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x w, with a custom backward. Only the base class differs from a function without autocast:
// without it, backward would get gradients in bf16 and a weight in fp32.
struct Product : torchamp::AutocastFunction<Product> {
  static torch::Tensor forward(AutogradContext* ctx, const torch::Tensor& x,
                               const torch::Tensor& weight) {
    ctx->save_for_backward({x, weight});
    return x.mm(weight);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    const torch::Tensor& x = saved[0];
    const torch::Tensor& weight = saved[1];
    return {gradients[0].mm(weight.t()), x.t().mm(gradients[0])};
  }
};

// The mean of the squares, which fp16 cannot represent for activations above 255. Its inputs are
// cast to fp32.
struct Power : torchamp::AutocastFunction<Power, torch::kFloat> {
  static torch::Tensor forward(AutogradContext* ctx, const torch::Tensor& x) {
    ctx->save_for_backward({x});
    return (x * x).mean();
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const torch::Tensor x = ctx->get_saved_variables()[0];
    return {gradients[0] * 2 * x / x.numel()};
  }
};

int main() {
  torch::manual_seed(0);
  const torch::Tensor x = torch::randn({4, 8});
  const torch::Tensor weight = torch::randn({8, 8}).requires_grad_();

  torch::Tensor y;
  torch::Tensor loss;
  {
    torchamp::AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
    y = Product::apply(x, weight);
    loss = y.pow(2).mean();
  }
  loss.backward();
  std::cout << "product: forward " << y.dtype() << ", weight's gradient " << weight.grad().dtype()
            << '\n';

  // The same without autocast.
  const torch::Tensor reference = weight.detach().clone().requires_grad_();
  x.mm(reference).pow(2).mean().backward();
  const double error = (weight.grad() - reference.grad()).norm().item<double>() /
                       reference.grad().norm().item<double>();
  std::cout << "  off from fp32 by " << 100 * error << " %\n";

  const torch::Tensor loud = torch::full({16}, 300., torch::kHalf).requires_grad_();
  torch::Tensor power;
  {
    torchamp::AutocastGuard autocast(torch::kCPU, torch::kHalf);
    std::cout << "mean of squares: " << (loud * loud).mean().item<double>() << " in fp16, ";
    power = Power::apply(loud);
    std::cout << power.item<double>() << " as a function of fp32 inputs\n";
  }
  power.backward();
  std::cout << "  its gradient: " << loud.grad()[0].item<double>() << ", " << loud.grad().dtype()
            << '\n';

  const bool as_expected =
      y.scalar_type() == torch::kBFloat16 && weight.grad().scalar_type() == torch::kFloat &&
      error < 0.02 && power.item<double>() == 90000. && loud.grad().scalar_type() == torch::kHalf;
  std::cout << (as_expected ? "as expected\n" : "NOT as expected\n");
  return as_expected ? 0 : 1;
}
