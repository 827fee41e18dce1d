// SPDX-License-Identifier: BSD-3-Clause
// The umbrella header alone; linked into every test.
#include <torchamp/torchamp.h>
