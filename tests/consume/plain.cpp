// SPDX-License-Identifier: BSD-3-Clause
// A program of the same project that uses LibTorch and not torchamp.
#include <ATen/ops/ones.h>

#ifdef TORCHAMP_COMPILED
#error this program does not link torchamp
#endif

int main() {
  return at::ones({2}).scalar_type() == at::kFloat ? 0 : 1;
}
