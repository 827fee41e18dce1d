// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief SafeAccumulation, which stands in torchamp/accumulate.h.

#include "torchamp/accumulate.h"  // IWYU pragma: export
