// SPDX-License-Identifier: BSD-3-Clause
// Another source file of the program. What the guard of the first says holds here.
#include "torchamp.h"

#include <ATen/ops/mm.h>

at::Tensor in_another_file(const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b.t());
}
