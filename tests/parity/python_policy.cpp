// SPDX-License-Identifier: BSD-3-Clause
// Policies for a Python process: operators.py loads this library together with Python's torch,
// which is the same LibTorch.
#include <ATen/ATen.h>
#include <torch/version.h>

#include <exception>
#include <optional>
#include <string>

#include "torchamp/autocast.h"
#include "torchamp/policy_text.h"

#ifdef _WIN32
#define PYTHON_POLICY_EXPORT extern "C" __declspec(dllexport)
#else
#define PYTHON_POLICY_EXPORT extern "C" __attribute__((visibility("default")))
#endif

/// Read by the script in the file, before it loads it.
PYTHON_POLICY_EXPORT const char operators_libtorch[];
const char operators_libtorch[] = "operators.py: LibTorch " TORCH_VERSION;

namespace {
std::optional<torchamp::AutocastGuard> guard;
std::string error;
}  // namespace

/// Begins a region of the CPU under the policy with this text. `half`: in fp16 instead of bf16.
/// Null, or the error.
PYTHON_POLICY_EXPORT const char* begin_policy(const char* text, int half) {
  try {
    guard.emplace(at::kCPU, torchamp::AutocastOptions{.dtype = half ? at::kHalf : at::kBFloat16,
                                                      .policy = torchamp::parse_policy(text)});
    return nullptr;
  } catch (const std::exception& thrown) {
    error = thrown.what();
    return error.c_str();
  }
}

PYTHON_POLICY_EXPORT void end_policy() {
  guard.reset();
}
