// SPDX-License-Identifier: BSD-3-Clause
// What a program may precompile: torchamp's headers, then words that they use, for something else.
#pragma once

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torchamp/policy_text.h>
#include <torchamp/torchamp.h>

#include <sstream>

#define detail a_macro_of_the_program
