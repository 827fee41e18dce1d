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

/// The tag of what all parts of a process share: see Note [Two versions in one process]. It goes up
/// when the layout or the meaning of anything that SharedRuntime or a ThreadPolicy leads to
/// changes, a new rule of Cast included.
#define TORCHAMP_LAYOUT 12

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

namespace TORCHAMP_NAMESPACE {
namespace detail {}
namespace ops {}
}  // namespace TORCHAMP_NAMESPACE
