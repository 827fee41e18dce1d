// SPDX-License-Identifier: BSD-3-Clause
// error: (use of deleted function.*operator new|call to deleted function 'operator new')
#include <torchamp/autocast.h>

torchamp::AutocastGuard* on_the_heap() {
  return new torchamp::AutocastGuard(at::kCPU);
}
