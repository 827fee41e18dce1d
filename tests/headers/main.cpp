// SPDX-License-Identifier: BSD-3-Clause
// Linked with a file per header: what two of them define, the linker complains about.
#include <torchamp/torchamp.h>

int main() {}
