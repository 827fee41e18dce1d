// SPDX-License-Identifier: BSD-3-Clause
// error: (use of deleted function|call to deleted constructor of).*AutocastGuard
#include <torchamp/autocast.h>

void moved() {
  torchamp::AutocastGuard guard(at::kCPU);
  torchamp::AutocastGuard other = std::move(guard);
}
