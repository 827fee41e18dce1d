// SPDX-License-Identifier: BSD-3-Clause
#include "internals/dso/plugin.h"

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <string>
#include <typeinfo>

#include "torchamp/autocast.h"
#include "torchamp/detail/core/gradients/written_weights.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/core/runtime/runtime.h"

extern "C" __attribute__((visibility("default"))) Plugin torchamp_test_plugin() {
  return {
      typeid(torchamp::Policy).name(),
      [] { return static_cast<const void*>(&torchamp::detail::shared_runtime()); },
      [] { return static_cast<const void*>(torchamp::detail::thread_policy()); },
      [] { return at::ones({2}, at::kHalf).relu().scalar_type(); },
      [] {
        try {
          const torchamp::AutocastGuard guard(at::kCPU);
          return std::string();
        } catch (const c10::Error& error) {
          return std::string(error.what_without_backtrace());
        }
      },
      [](void (*inside)(void*), void* argument) {
        const torchamp::AutocastGuard guard(
            at::kCPU, {.policy = torchamp::Policy::standard().fp32({"relu"})});
        inside(argument);
      },
      [] { const torchamp::detail::DropWeightCasts drop_weight_casts; },
  };
}
