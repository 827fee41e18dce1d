// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief StepResult, which stands in torchamp/grad_scaler.h.

#include "torchamp/grad_scaler.h"  // IWYU pragma: export
