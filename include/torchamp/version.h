// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The only place where the version is written; CMake reads it from here.
#define TORCHAMP_VERSION_MAJOR 0
#define TORCHAMP_VERSION_MINOR 1
#define TORCHAMP_VERSION_PATCH 0

/// One integer to compare with: major * 10000 + minor * 100 + patch.
#define TORCHAMP_VERSION \
  (TORCHAMP_VERSION_MAJOR * 10000 + TORCHAMP_VERSION_MINOR * 100 + TORCHAMP_VERSION_PATCH)
