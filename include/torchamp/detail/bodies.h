// SPDX-License-Identifier: BSD-3-Clause
#pragma once

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
