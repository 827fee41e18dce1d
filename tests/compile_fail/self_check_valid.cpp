// SPDX-License-Identifier: BSD-3-Clause
// error: .
// The harness must complain: this is a valid use.
#include <torchamp/autocast.h>

void valid() {
  const torchamp::AutocastGuard guard(at::kCPU);
}
