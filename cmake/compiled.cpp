// SPDX-License-Identifier: BSD-3-Clause
// What CMake's target torchamp::compiled compiles into each target that links it.
#include <torchamp/compiled.h>
