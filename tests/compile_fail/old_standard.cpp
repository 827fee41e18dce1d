// SPDX-License-Identifier: BSD-3-Clause
#undef __cplusplus
#define __cplusplus 201703L
// error: torchamp needs C\+\+20: compile with -std=c\+\+20
#include <torchamp/version.h>
