// SPDX-License-Identifier: BSD-3-Clause
// A policy in a file: changes which op runs in which dtype without compiling.
#include <torch/torch.h>
#include <torchamp/policy_text.h>
#include <torchamp/torchamp.h>

#include <fstream>
#include <iostream>
#include <string>

#include "support/check.h"
#include "support/temporary_folder.h"

int main() {
  const support::TemporaryFolder folder("torchamp");
  const std::string path = (folder.path() / "mine.policy").string();
  std::ofstream(path) << "policy standard          # or: policy torch\n"
                         "fp32: ops::matmul, cdist # families and ops\n"
                         "unchanged when bfloat16: sum\n";

  const torchamp::Policy policy = torchamp::load_policy(path);
  std::cout << torchamp::to_text(policy);
  support::check(policy.lookup("mm", torch::kCPU) == torchamp::Cast::fp32, "mm is in a family");

  const auto x = torch::ones({4, 4}, torch::kBFloat16);
  {
    torchamp::AutocastGuard autocast(torch::kCPU, {.dtype = torch::kBFloat16, .policy = policy});
    support::check(x.mm(x).scalar_type() == torch::kFloat, "products are in fp32");
    support::check(x.sum().scalar_type() == torch::kBFloat16, "sums are left alone");
  }

  bool refused = false;
  try {
    torchamp::parse_policy("policy standard\nfp32: matmull\n");
  } catch (const c10::Error& error) {
    refused = true;
    std::cout << error.what_without_backtrace() << '\n';
  }
  support::check(refused, "a mistake is an error that names the line and the nearest op");
}
