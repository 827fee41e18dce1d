// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Accumulation and SafeAccumulation: several micro-batches make one step.

#include "torchamp/accumulation.h"
#include "torchamp/safe_accumulation.h"
#include "torchamp/version.h"
