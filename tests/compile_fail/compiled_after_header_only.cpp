// SPDX-License-Identifier: BSD-3-Clause
// error: torchamp/compiled.h comes after another header of torchamp
#include <torchamp/torchamp.h>
// TORCHAMP_COMPILED is not defined
#include <torchamp/compiled.h>
