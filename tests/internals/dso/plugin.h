// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

/// What the plugin of the shared-library test exports. Host and plugin are both built with hidden
/// visibility, and both include torchamp.
struct Plugin {
  /// The plugin's own name of torchamp::Policy, as the linker has it.
  const char* policy_type;
  /// Address of the runtime that the plugin uses.
  const void* (*runtime)();
  /// Address of the policy that the plugin sees on this thread.
  const void* (*thread_policy)();
  /// The dtype of relu(x) of an fp16 tensor, computed in the plugin.
  at::ScalarType (*relu_dtype)();
  /// The text of the error of a guard in the plugin; empty if there is none.
  std::string (*error_of_a_guard)();
  /// Calls `inside` under a guard of the plugin's whose policy puts relu in fp32.
  void (*under_its_guard)(void (*inside)(void*), void* argument);
  /// Tells, as after a step, that LibTorch has counted a write to weights.
  void (*note_step)();
};
using GetPlugin = Plugin (*)();
