// SPDX-License-Identifier: BSD-3-Clause
// A product in a region is in its dtype.
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torchamp/torchamp.h>

int main() {
  const torchamp::AutocastGuard autocast(at::kCPU, at::kBFloat16);
  const at::Tensor ones = at::ones({2, 2});
  return at::mm(ones, ones).scalar_type() == at::kBFloat16 ? 0 : 1;
}
