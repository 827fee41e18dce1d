// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief torchamp's version, for the preprocessor.

#if __cplusplus < 202002L
#error "torchamp needs C++20: compile with -std=c++20 (g++ 12, clang++ 14 or later)."
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
#define TORCHAMP_TEXT_OF(...) TORCHAMP_TEXT_OF_(__VA_ARGS__)
#define TORCHAMP_VERSION_TEXT \
  TORCHAMP_TEXT_OF(TORCHAMP_VERSION_MAJOR, TORCHAMP_VERSION_MINOR, TORCHAMP_VERSION_PATCH)
/// @endcond

/// The version of the state that all parts of a process share: see Note [Two versions in one
/// process]. Increment it when the layout or the meaning of anything reachable from SharedRuntime
/// or a ThreadPolicy changes, including a new rule of Cast.
#define TORCHAMP_LAYOUT 16

// Note [Two versions in one process]
// A program and a plugin may be built against different versions of torchamp. All of torchamp is in
// an inline namespace named after the version, so each runs its own code: `torchamp::Policy` is
// `torchamp::v0_2_0::Policy` to the linker. The overlays and the policy of a thread exist once per
// process. All versions with the same TORCHAMP_LAYOUT share them; a version with another one fails
// at its first guard: see Note [One runtime per process]. A header opens the namespace as
// `namespace TORCHAMP_NAMESPACE` or `namespace torchamp::detail`, which is declared below.
/// @cond
#define TORCHAMP_NAMESPACE_OF_(major, minor, patch) torchamp::inline v##major##_##minor##_##patch
#define TORCHAMP_NAMESPACE_OF(...) TORCHAMP_NAMESPACE_OF_(__VA_ARGS__)
#define TORCHAMP_NAMESPACE \
  TORCHAMP_NAMESPACE_OF(TORCHAMP_VERSION_MAJOR, TORCHAMP_VERSION_MINOR, TORCHAMP_VERSION_PATCH)
/// @endcond

// Note [Compiled once]
// torchamp is header-only: each source file that uses a guard, a scaler or a fused optimizer
// compiles it. A program may instead define TORCHAMP_COMPILED in all of its source files. Then the
// headers only declare what is large and not a template, and one file, which includes
// torchamp/compiled.h, defines it. CMake's torchamp::library is such a file as a static library;
// torchamp::compiled adds the file to each target that links it.
//
// Such functions are defined in separate headers, which are included if TORCHAMP_BODIES is 1, as
// TORCHAMP_BODY: inline, unless TORCHAMP_COMPILED is defined. torchamp/compiled.h includes all of
// them, also after other headers of torchamp (a precompiled header, a unity build). Such a header
// does not repeat the includes of the header that it completes. Code that runs rarely, as at the
// first guard, is TORCHAMP_COLD: compiled for size, not speed.
//
// A virtual function of a class that is not a template is inline, or TORCHAMP_BODY, also where the
// class declares it. Otherwise the class has a key function, and the compiler emits the class and
// all that it calls into each file that includes the header, used or not.

// Note [Extras]
// torchamp.h includes what a training loop needs; all else is an extra with its own header, and no
// header of the core includes one. If an extra is reached through a name of the core (printing a
// Policy, say), that name is a template which calls a class template. The extra's header
// specialises it; without that header, a static_assert names it. If an extra is reached at run
// time, its header registers a function, and the core's error names the header.

/// @cond
#ifdef TORCHAMP_COMPILED
#define TORCHAMP_BODIES 0
#define TORCHAMP_BODY
#else
#define TORCHAMP_BODIES 1
#define TORCHAMP_BODY inline
#endif
#define TORCHAMP_COLD [[gnu::cold]] TORCHAMP_BODY
/// @endcond

namespace TORCHAMP_NAMESPACE {
namespace detail {}
namespace ops {}
}  // namespace TORCHAMP_NAMESPACE
