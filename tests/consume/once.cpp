// SPDX-License-Identifier: BSD-3-Clause
// The one file of a program that defines TORCHAMP_COMPILED without CMake's help.
#include <torchamp/torchamp.h>
// After another header of torchamp, as behind a precompiled header and in a unity build.
#include <torchamp/compiled.h>
