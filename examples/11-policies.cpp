// SPDX-License-Identifier: BSD-3-Clause
// A policy is a table that decides which op runs in which dtype: print it, edit it, pass it to a
// guard, store it in a text file, set one for a single module (labs).
#include <torch/torch.h>
#include <torchamp/labs/module_policy.h>
#include <torchamp/policy_text.h>
#include <torchamp/torchamp.h>

#include <fstream>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>

#include "support/check.h"
#include "support/temporary_folder.h"

namespace nn = torch::nn;

// A model, and the same model with a policy for its head. WithPolicy, because the head's forward is
// called directly; the entries of a Sequential do not need it.
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

struct NetImpl : ClassifierImpl<torchamp::WithPolicy<nn::Linear>> {};
TORCH_MODULE(Net);

namespace {

/// Whether `call` throws; prints the error.
bool throws(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    std::cout << error.what_without_backtrace() << '\n';
    return true;
  }
  return false;
}

void edit_a_policy(torch::Device device) {
  const auto lower = device.is_cuda() ? torch::kHalf : torch::kBFloat16;
  const auto x = torch::rand({32, 32}, device);
  const auto dtypes = [&](const torchamp::Policy& policy) {
    torchamp::AutocastGuard autocast(device.type(), {.policy = policy});
    const auto product = torch::matmul(x, x);
    struct {
      torch::Dtype sum, softmax;
    } result{(product + product).scalar_type(), product.softmax(1).scalar_type()};
    return result;
  };
  support::check(dtypes(torchamp::Policy::standard()).sum == torch::kFloat,
                 "in the standard policy, additions run in fp32");
  support::check(dtypes(torchamp::Policy::torch()).sum == lower, "in LibTorch's, they do not");

  // Softmax in fp32; additions in the dtypes of their arguments.
  auto own = torchamp::Policy::standard();
  own.unchanged(torchamp::ops::addition).fp32({"softmax"});
  std::cout << own;
  support::check(dtypes(own).sum == lower, "an edit changes a family of ops");
  support::check(dtypes(own).softmax == torch::kFloat, "or one op by its name");
  support::check(own.lookup("add.Tensor", device.type()) == torchamp::Cast::unchanged,
                 "lookup() returns the edited rule");
  support::check(throws([&] { own.fp32({"sofmax"}); }), "a name that LibTorch lacks is an error");
}

/// A file changes which op runs in which dtype, without compiling.
void read_a_policy_from_a_file() {
  const support::TemporaryFolder folder("torchamp");
  const std::string path = (folder.path() / "mine.policy").string();
  std::ofstream(path) << "policy standard          # or: policy torch\n"
                         "fp32: ops::matmul, cdist # families and ops\n"
                         "unchanged when bfloat16: sum\n";

  const torchamp::Policy policy = torchamp::load_policy(path);
  std::cout << torchamp::to_text(policy);
  support::check(policy.lookup("mm", torch::kCPU) == torchamp::Cast::fp32,
                 "mm belongs to the family");

  const auto x = torch::ones({4, 4}, torch::kBFloat16);
  {
    torchamp::AutocastGuard autocast(torch::kCPU, {.dtype = torch::kBFloat16, .policy = policy});
    support::check(x.mm(x).scalar_type() == torch::kFloat, "products run in fp32");
    support::check(x.sum().scalar_type() == torch::kBFloat16, "sums are unchanged");
  }
  support::check(throws([] { torchamp::parse_policy("policy standard\nfp32: matmull\n"); }),
                 "a mistake is an error that names the line and the nearest op");
}

/// The head's matrix product and one activation run in fp32. The rest of the model follows the
/// guard. Names and checkpoints do not change.
void set_policies_of_modules() {
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
  support::check(embedded.scalar_type() == torch::kBFloat16, "trunk.embed runs in bf16");
  support::check(hidden.scalar_type() == torch::kFloat, "trunk.act runs in fp32");
  support::check(logits.scalar_type() == torch::kFloat, "head runs in fp32");

  Plain plain;
  std::stringstream to_net, to_plain;
  torch::save(plain, to_net);
  torch::load(net, to_net);
  torch::save(net, to_plain);
  torch::load(plain, to_plain);
  support::check(net->named_parameters().keys() == plain->named_parameters().keys(),
                 "both models read each other's checkpoints, with the same names");

  const torchamp::ModulePolicies unknown{{"haed", fp32_products}};
  const torchamp::ModulePolicies twice{{"trunk.*", fp32_gelu}, {"**.norm", fp32_gelu}};
  support::check(throws([&] { unknown.apply_to(*net); }),
                 "a pattern that matches nothing is an error");
  support::check(throws([&] { twice.apply_to(*net); }),
                 "a module that two patterns match is an error");
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  edit_a_policy(device);
  read_a_policy_from_a_file();
  set_policies_of_modules();
}
