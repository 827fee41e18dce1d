// SPDX-License-Identifier: BSD-3-Clause
// A custom op: TORCH_LIBRARY declares it, one kernel computes it, another one differentiates it,
// and a rule of the policy casts its arguments.
#include <torch/library.h>
#include <torch/torch.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_step.h>

#include <iostream>

#include "support/check.h"

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// x weight, times the sigmoid of the gate. Like most kernels, it takes one dtype.
Tensor gated_product_kernel(const Tensor& x, const Tensor& weight, const Tensor& gate) {
  TORCH_CHECK(x.scalar_type() == weight.scalar_type() && x.scalar_type() == gate.scalar_type(),
              "gated_product: x is ", x.scalar_type(), ", weight ", weight.scalar_type(), ", gate ",
              gate.scalar_type());
  return x.mm(weight) * gate.sigmoid();
}

/// Calls the op by its name, so through autocast and autograd.
Tensor gated_product(const Tensor& x, const Tensor& weight, const Tensor& gate) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("example::gated_product", "")
                             .typed<Tensor(const Tensor&, const Tensor&, const Tensor&)>();
  return op.call(x, weight, gate);
}

// Its gradients. A rule casts before autograd, so all tensors here have the dtype of the rule, and
// the gradients of the casts lead back to the weights in fp32.
struct GatedProduct : torch::autograd::Function<GatedProduct> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Tensor& gate) {
    ctx->save_for_backward({x, weight, gate});
    const at::AutoDispatchBelowADInplaceOrView to_the_kernel;
    return gated_product(x, weight, gate);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const Tensor open = saved[2].sigmoid(), through = gradients[0] * open;
    return {through.mm(weight.t()), x.t().mm(through),
            gradients[0] * x.mm(weight) * open * (1 - open)};
  }
};

Tensor gated_product_autograd(const Tensor& x, const Tensor& weight, const Tensor& gate) {
  return GatedProduct::apply(x, weight, gate);
}

}  // namespace

TORCH_LIBRARY(example, library) {
  library.def("gated_product(Tensor x, Tensor weight, Tensor gate) -> Tensor");
}
TORCH_LIBRARY_IMPL(example, CPU, library) {
  library.impl("gated_product", &gated_product_kernel);
}
TORCH_LIBRARY_IMPL(example, CUDA, library) {
  library.impl("gated_product", &gated_product_kernel);
}
TORCH_LIBRARY_IMPL(example, Autograd, library) {
  library.impl("gated_product", &gated_product_autograd);
}

namespace {

struct NetImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return gated_product(first(x), weight, gate(x)); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 16));
  torch::nn::Linear gate = register_module("gate", torch::nn::Linear(8, 4));
  Tensor weight = register_parameter("weight", 0.3 * torch::randn({16, 4}));
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  Net net;
  net->to(device);
  const Tensor x = torch::randn({32, 8}, device), y = x.narrow(1, 0, 4).tanh();

  bool refused = false;
  try {
    const torchamp::AutocastGuard autocast(device, torch::kBFloat16);
    net->forward(x);
  } catch (const c10::Error& error) {
    refused = true;
    std::cout << error.what_without_backtrace() << '\n';
  }
  support::check(refused, "without a rule, the op gets products in bf16 and a weight in fp32");

  const Tensor expected = net->forward(x).detach();
  for (const bool narrow : {true, false}) {
    auto policy = torchamp::Policy::standard();
    policy.set(narrow ? torchamp::Cast::lower_precision : torchamp::Cast::fp32,
               {"example::gated_product"});
    Tensor output;
    {
      const torchamp::AutocastGuard autocast(device, {.dtype = torch::kBFloat16, .policy = policy});
      output = net->forward(x);
    }
    net->zero_grad();
    output.sum().backward();
    support::check(output.scalar_type() == (narrow ? torch::kBFloat16 : torch::kFloat) &&
                       net->weight.grad().scalar_type() == torch::kFloat,
                   narrow ? "lower_precision: the op runs in bf16, and its weight learns in fp32"
                          : "fp32: the op runs in fp32");
    support::check(torch::allclose(output.to(torch::kFloat), expected, 0.05, 0.05),
                   "its values differ from fp32 by a rounding");
  }

  torchamp::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  torchamp::TrainingStep train(
      net, optimizer,
      {.policy = torchamp::Policy::standard().lower_precision({"example::gated_product"})});
  double first = 0., last = 0.;
  for (int step = 0; step < 60; ++step) {
    last = train([&] { return torch::mse_loss(net->forward(x), y); }).loss();
    if (step == 0) first = last;
  }
  std::cout << "loss " << first << " -> " << last << '\n';
  support::check(last < 0.3 * first, "a model with the op learns");
}
