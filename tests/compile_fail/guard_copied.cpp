// SPDX-License-Identifier: BSD-3-Clause
// error: (use of deleted function|call to deleted constructor of).*AutocastGuard
#include <torchamp/autocast.h>

void copied() {
  const torchamp::AutocastGuard guard(at::kCPU);
  const torchamp::AutocastGuard copy = guard;
}
