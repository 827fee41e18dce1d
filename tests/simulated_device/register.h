// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/library.h>

namespace simulated {

// What device.cpp puts together, once per program.
void register_guard();
void register_hooks();
void register_copies(torch::Library& aten);
void register_checked_kernels(torch::Library& aten);
void register_scaled_mm(torch::Library& aten);
void register_fallback(torch::Library& all, torch::Library& aten);
void register_autocast(torch::Library& aten);

}  // namespace simulated
