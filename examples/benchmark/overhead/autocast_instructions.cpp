// SPDX-License-Identifier: BSD-3-Clause
// Calls ops without a kernel of torchamp's under raw autocast or under a guard, for callgrind to
// count:
//   autocast_instructions raw|torchamp in_place|allocating
// count_instructions.sh runs them all and compares.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torchamp/autocast.h>

#include <cstdio>
#include <cstring>
#include <optional>

void calls(at::Tensor& x, bool allocating) {
  for (int i = 0; i < 1000; ++i) {
    if (allocating) {
      (void)x.mm(x);  // an autocast kernel of LibTorch's
      (void)x.relu();
    } else {
      x.relu_();
      x.mul_(x);
    }
  }
}

/// The part that is counted.
extern "C" __attribute__((noinline)) void measured_calls(at::Tensor& x, bool allocating) {
  calls(x, allocating);
}

bool is(const char* argument, const char* word) {
  return std::strcmp(argument, word) == 0;
}

int main(int argc, char** argv) {
  if (argc != 3 || !(is(argv[1], "raw") || is(argv[1], "torchamp")) ||
      !(is(argv[2], "in_place") || is(argv[2], "allocating"))) {
    std::fputs("usage: autocast_instructions raw|torchamp in_place|allocating\n", stderr);
    return 2;
  }
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  at::Tensor x = at::ones({4, 4});
  { const torchamp::AutocastGuard registers_kernels(at::kCPU); }
  std::optional<torchamp::AutocastGuard> guard;
  if (is(argv[1], "torchamp")) {
    guard.emplace(at::kCPU);
  } else {
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  calls(x, is(argv[2], "allocating"));  // so that the allocator and the linker have settled
  measured_calls(x, is(argv[2], "allocating"));
  return 0;
}
