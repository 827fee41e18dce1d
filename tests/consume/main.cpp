// SPDX-License-Identifier: BSD-3-Clause
// The program that every kind of user builds; see CMakeLists.txt in this folder.
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torchamp/torchamp.h>

#ifdef TORCHAMP_COMPILED
#include <torchamp/policy_text.h>

#include <sstream>

// Whatever is only declared here must be defined in the library's own file.
bool trains() {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  torchamp::FusedSGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  torchamp::FusedAdamW other({at::ones({2})}, torch::optim::AdamWOptions());
  torchamp::GradScaler scaler;
  const auto policy = torchamp::Policy::standard().fp32("mm");
  {
    const torchamp::AutocastGuard autocast(at::kCPU, {.policy = policy});
    scaler.scale(at::mm(weight, weight).sum()).backward();
  }
  torchamp::clip_grad_norm_(scaler, optimizer, 1.);
  const bool stepped = scaler.step(optimizer).stepped();
  scaler.update();
  std::ostringstream text;
  text << policy;
  return stepped && weight[0][0].item<float>() == 0.75 && !text.str().empty();
}
#else
bool trains() {
  return true;
}
#endif

int main() {
  const torchamp::AutocastGuard autocast(at::kCPU, at::kBFloat16);
  const at::Tensor ones = at::ones({2, 2});
  return at::mm(ones, ones).scalar_type() == at::kBFloat16 && trains() ? 0 : 1;
}
