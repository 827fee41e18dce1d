// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/autocast.h>

void copied(const torchamp::AutocastGuard& guard) {
  // error: (use of deleted function|call to deleted constructor of).*AutocastGuard
  const torchamp::AutocastGuard copy = guard;
}

void moved(torchamp::AutocastGuard& guard) {
  // error: (use of deleted function|call to deleted constructor of).*AutocastGuard
  const torchamp::AutocastGuard other = std::move(guard);
}

void discarded() {
  // error: ignoring (return value|temporary).*nodiscard
  torchamp::AutocastGuard{at::kCPU};
}

torchamp::AutocastGuard* on_the_heap() {
  // error: (use of deleted function.*operator new|call to deleted function 'operator new')
  return new torchamp::AutocastGuard(at::kCPU);
}
