// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. torchamp's version, for the preprocessor.

// Without /Zc:__cplusplus, cl.exe defines __cplusplus as for C++98.
#if (defined(_MSVC_LANG) ? _MSVC_LANG : __cplusplus) < 202002L
#error "torchamp needs C++20: compile with -std=c++20 (g++ 12, clang++ 14 or later) or /std:c++20."
#endif

// CMake reads the version from here.
#define TORCHAMP_VERSION_MAJOR 0  ///< incremented by incompatible releases
#define TORCHAMP_VERSION_MINOR 2  ///< incremented by new features
#define TORCHAMP_VERSION_PATCH 0  ///< incremented by corrections

/// One integer to compare with: major * 10000 + minor * 100 + patch.
#define TORCHAMP_VERSION \
  (TORCHAMP_VERSION_MAJOR * 10000 + TORCHAMP_VERSION_MINOR * 100 + TORCHAMP_VERSION_PATCH)

/// @cond
#define TORCHAMP_TEXT_OF_(major, minor, patch) #major "." #minor "." #patch
#define TORCHAMP_TEXT_OF(major, minor, patch) TORCHAMP_TEXT_OF_(major, minor, patch)
#define TORCHAMP_VERSION_TEXT \
  TORCHAMP_TEXT_OF(TORCHAMP_VERSION_MAJOR, TORCHAMP_VERSION_MINOR, TORCHAMP_VERSION_PATCH)
/// @endcond

/// The version of the state that all parts of a process share. Increment it when the layout or the
/// meaning of anything reachable from SharedRuntime or a ThreadPolicy changes, including a new rule
/// of Cast and a new condition of When. The version is at most 62. See .github/CONTRIBUTING.md, Two
/// versions in one process.
#define TORCHAMP_LAYOUT 23

// The inline namespace of the version: see .github/CONTRIBUTING.md, Two versions in one process.
/// @cond
#define TORCHAMP_NAMESPACE_OF_(major, minor, patch) torchamp::inline v##major##_##minor##_##patch
#define TORCHAMP_NAMESPACE_OF(major, minor, patch) TORCHAMP_NAMESPACE_OF_(major, minor, patch)
#define TORCHAMP_NAMESPACE \
  TORCHAMP_NAMESPACE_OF(TORCHAMP_VERSION_MAJOR, TORCHAMP_VERSION_MINOR, TORCHAMP_VERSION_PATCH)
/// @endcond

// Functions that are compiled only once if TORCHAMP_COMPILED is defined: see
// .github/CONTRIBUTING.md, Compiled once.
/// @cond
#ifdef TORCHAMP_COMPILED
#define TORCHAMP_BODIES 0
#define TORCHAMP_BODY
#else
#define TORCHAMP_BODIES 1
#define TORCHAMP_BODY inline
#endif
/// @endcond
