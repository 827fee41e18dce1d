// SPDX-License-Identifier: BSD-3-Clause
// error: (use of deleted function|attempt to use a deleted function|call to deleted function).*(operator new)?
#include <torchamp/autocast.h>

torchamp::AutocastGuard* on_the_heap() {
  return new torchamp::AutocastGuard(at::kCPU);
}
