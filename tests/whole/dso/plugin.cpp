// SPDX-License-Identifier: BSD-3-Clause
#include "whole/dso/plugin.h"

#include <ATen/ops/ones.h>

#include "torchamp/autocast.h"

extern "C" __attribute__((visibility("default"))) Plugin torchamp_test_plugin() {
  return {
      [] { return static_cast<const void*>(&torchamp::detail::shared_runtime()); },
      [] { return static_cast<const void*>(torchamp::detail::thread_policy()); },
      [] { return at::ones({2}, at::kHalf).relu().scalar_type(); },
      [](void (*inside)(void*), void* argument) {
        const torchamp::AutocastGuard guard(
            at::kCPU, {.policy = torchamp::Policy::standard().fp32({"relu"})});
        inside(argument);
      },
  };
}
