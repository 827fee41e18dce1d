// SPDX-License-Identifier: BSD-3-Clause
// Policies for single modules: the head's matrix product and one activation run in fp32, while
// the rest of the model follows the guard. Names and checkpoints do not change.
#include <torch/torch.h>
#include <torchamp/labs/module_policy.h>
#include <torchamp/torchamp.h>

#include <iostream>
#include <sstream>

namespace nn = torch::nn;

// The model without policies, to compare names and checkpoints with.
template <class Head>
struct ClassifierImpl : nn::Module {
  nn::Sequential trunk{nullptr};
  Head head{nullptr};

  ClassifierImpl() {
    trunk = this->register_module(
        "trunk", nn::Sequential({{"embed", nn::Linear(16, 32)},
                                 {"norm", nn::LayerNorm(nn::LayerNormOptions({32}))},
                                 {"act", nn::GELU()}}));
    head = this->register_module("head", Head(32, 4));
  }

  torch::Tensor forward(const torch::Tensor& x) { return head->forward(trunk->forward(x)); }
};

struct PlainImpl : ClassifierImpl<nn::Linear> {};
TORCH_MODULE(Plain);

// WithPolicy, because its forward is called directly. Entries of a Sequential do not need it.
struct NetImpl : ClassifierImpl<torchamp::WithPolicy<nn::Linear>> {};
TORCH_MODULE(Net);

int main() {
  torch::manual_seed(0);
  Net net;
  const torch::Tensor x = torch::randn({8, 16});

  const auto fp32_products = torchamp::Policy::standard().fp32(torchamp::ops::matmul);
  const auto fp32_gelu = torchamp::Policy::standard().fp32({"gelu"});
  const torchamp::ModulePolicies policies{{"head", fp32_products}, {"trunk.a*", fp32_gelu}};
  for (const auto& name : policies.apply_to(*net)) std::cout << "a policy for " << name << '\n';

  torch::Tensor embedded, hidden, logits;
  {
    torchamp::AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
    embedded = net->trunk[0]->as<nn::Linear>()->forward(x);
    hidden = net->trunk->forward(x);
    logits = net->forward(x);
  }
  logits.sum().backward();
  std::cout << "trunk.embed gives " << embedded.dtype() << ", trunk.act " << hidden.dtype()
            << ", head " << logits.dtype() << '\n';

  // A checkpoint of the plain model loads, and one of ours loads into the plain model.
  Plain plain;
  std::stringstream to_net, to_plain;
  torch::save(plain, to_net);
  torch::load(net, to_net);
  torch::save(net, to_plain);
  torch::load(plain, to_plain);
  const bool same_names = net->named_parameters().keys() == plain->named_parameters().keys();
  std::cout << "names " << (same_names ? "unchanged: " : "CHANGED: ")
            << c10::Join(", ", net->named_parameters().keys()) << '\n';

  // A pattern that matches nothing, and a module that two patterns match, are errors.
  int refused = 0;
  for (const auto& wrong :
       {torchamp::ModulePolicies{{"haed", fp32_products}},
        torchamp::ModulePolicies{{"trunk.*", fp32_gelu}, {"**.norm", fp32_gelu}}}) {
    try {
      wrong.apply_to(*net);
    } catch (const c10::Error& error) {
      std::cout << error.what_without_backtrace() << '\n';
      ++refused;
    }
  }

  const bool as_expected = embedded.scalar_type() == torch::kBFloat16 &&
                           hidden.scalar_type() == torch::kFloat &&
                           logits.scalar_type() == torch::kFloat && same_names && refused == 2;
  std::cout << (as_expected ? "as expected\n" : "NOT as expected\n");
  return as_expected ? 0 : 1;
}
