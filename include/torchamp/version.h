// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief torchamp's version, for the preprocessor.

#if __cplusplus < 202002L
#error "torchamp needs C++20: compile with -std=c++20 (g++ 12, clang++ 14 or later)."
#endif

// The only place where the version is written; CMake reads it from here.
#define TORCHAMP_VERSION_MAJOR 0  ///< goes up with an incompatible release
#define TORCHAMP_VERSION_MINOR 2  ///< goes up with what is new
#define TORCHAMP_VERSION_PATCH 0  ///< goes up with corrections

/// One integer to compare with: major * 10000 + minor * 100 + patch.
#define TORCHAMP_VERSION \
  (TORCHAMP_VERSION_MAJOR * 10000 + TORCHAMP_VERSION_MINOR * 100 + TORCHAMP_VERSION_PATCH)

/// @cond
#define TORCHAMP_TEXT_OF_(major, minor, patch) #major "." #minor "." #patch
#define TORCHAMP_TEXT_OF(...) TORCHAMP_TEXT_OF_(__VA_ARGS__)
/// "0.2.0".
#define TORCHAMP_VERSION_TEXT \
  TORCHAMP_TEXT_OF(TORCHAMP_VERSION_MAJOR, TORCHAMP_VERSION_MINOR, TORCHAMP_VERSION_PATCH)
/// @endcond

/// The tag of what all parts of a process share: see Note [Two versions in one process]. It goes up
/// when the layout or the meaning of anything that SharedRuntime or a ThreadPolicy leads to
/// changes, a new rule of Cast included.
#define TORCHAMP_LAYOUT 14

// Note [Two versions in one process]
// A program and a plugin may be built against different versions of torchamp. All of torchamp lies
// in an inline namespace that is named for the version, so that each of them runs its own code:
// `torchamp::Policy` is `torchamp::v0_2_0::Policy` to the linker. Two things exist once in a
// process, whoever makes them: the overlays, and the policy of a thread. They are shared by all
// versions with the same TORCHAMP_LAYOUT, and a version with another one fails at its first guard
// with a message that names both: see Note [One runtime per process].
//
// A header opens the namespace as `namespace TORCHAMP_NAMESPACE`, or, since it is declared here,
// as `namespace torchamp::detail`, which then means the one in the inline namespace.
/// @cond
#define TORCHAMP_NAMESPACE_OF_(major, minor, patch) torchamp::inline v##major##_##minor##_##patch
#define TORCHAMP_NAMESPACE_OF(...) TORCHAMP_NAMESPACE_OF_(__VA_ARGS__)
#define TORCHAMP_NAMESPACE \
  TORCHAMP_NAMESPACE_OF(TORCHAMP_VERSION_MAJOR, TORCHAMP_VERSION_MINOR, TORCHAMP_VERSION_PATCH)
/// @endcond

// Note [Compiled once]
// torchamp is header-only: every source file that uses a guard, a scaler or a fused optimizer
// compiles it. A program may define TORCHAMP_COMPILED instead, in all of its source files. Then the
// headers only declare what is large and not a template, and one file, which includes
// torchamp/compiled.h, defines it. CMake's torchamp::library is such a file as a static library;
// linking torchamp::compiled adds the file to each target.
//
// Such functions are defined in headers of their own, which are included if TORCHAMP_BODIES is 1,
// and are TORCHAMP_BODY there: inline, unless TORCHAMP_COMPILED is defined. torchamp/compiled.h
// includes all of them itself. So it may come after other headers of torchamp, as it does after a
// precompiled header and in a unity build.
//
// A virtual function of a class that is no template is inline, or TORCHAMP_BODY, where the class
// declares it, too. Otherwise the class has a key function, and the compiler emits the class and
// all that it calls into each file that includes the header, whether it is used or not.

// Note [Extras]
// torchamp.h brings what a training loop needs; all else is an extra, with a header of its own, and
// no header of the core includes one. Where an extra is reached through a name of the core
// (printing a Policy, say), that name is a template here which calls a class template. The extra's
// header specialises that; without it, a static_assert says which header to include. Where an extra
// is reached at run time, its header registers a function, and the error of the core names it.

/// @cond
#ifdef TORCHAMP_COMPILED
#define TORCHAMP_BODIES 0
#define TORCHAMP_BODY
#else
#define TORCHAMP_BODIES 1
#define TORCHAMP_BODY inline
#endif
/// @endcond

namespace TORCHAMP_NAMESPACE {
namespace detail {}
namespace ops {}
}  // namespace TORCHAMP_NAMESPACE
