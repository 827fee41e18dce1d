// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief torchamp's version, for the preprocessor.

// The only place where the version is written; CMake reads it from here.
#define TORCHAMP_VERSION_MAJOR 0  ///< goes up with an incompatible release
#define TORCHAMP_VERSION_MINOR 2  ///< goes up with what is new
#define TORCHAMP_VERSION_PATCH 0  ///< goes up with corrections

/// One integer to compare with: major * 10000 + minor * 100 + patch.
#define TORCHAMP_VERSION \
  (TORCHAMP_VERSION_MAJOR * 10000 + TORCHAMP_VERSION_MINOR * 100 + TORCHAMP_VERSION_PATCH)
