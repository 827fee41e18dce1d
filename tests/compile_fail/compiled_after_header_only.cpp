// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/torchamp.h>
// TORCHAMP_COMPILED is not defined
// error: torchamp/compiled.h comes after another header of torchamp
#include <torchamp/compiled.h>
