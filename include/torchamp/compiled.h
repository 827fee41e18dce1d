// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief For one source file of a program that compiles torchamp only once.

/// @file
/// Defines what the other headers only declare where TORCHAMP_COMPILED is defined. A program that
/// defines it, in all of its source files, includes this header, first of all, in one of them.
/// CMake's target torchamp::compiled, linked instead of torchamp::torchamp, does both. Source files
/// that use torchamp then compile almost as fast as without it; what they do stays the same.

#ifndef TORCHAMP_COMPILED
#define TORCHAMP_COMPILED
#endif
#define TORCHAMP_DEFINES_BODIES

#include "torchamp/autocast.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"
#include "torchamp/policy.h"
#include "torchamp/policy_text.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

template class FusedOptimizerOf<detail::AdamKernel>;
template class FusedOptimizerOf<detail::AdamWKernel>;
template class FusedOptimizerOf<detail::SgdKernel>;
template class FusedOptimizerOf<detail::AdagradKernel>;

}  // namespace TORCHAMP_NAMESPACE
