// SPDX-License-Identifier: BSD-3-Clause
#include <torch/version.h>
#undef TORCH_VERSION_MINOR
#define TORCH_VERSION_MINOR 5
// error: torchamp needs LibTorch 2.6 or later
#include <torchamp/detail/core/base/devices.h>
