// SPDX-License-Identifier: BSD-3-Clause
// error: ignoring (return value|temporary).*nodiscard
#include <torchamp/autocast.h>

void discarded() {
  torchamp::AutocastGuard{at::kCPU};
}
