// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Accumulation, which stands in torchamp/accumulate.h.

#include "torchamp/accumulate.h"  // IWYU pragma: export
