// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/detail/core/optim/adagrad_kernel.h"  // IWYU pragma: export
#include "torchamp/detail/core/optim/adam_kernels.h"    // IWYU pragma: export
#include "torchamp/detail/core/optim/kernel.h"          // IWYU pragma: export
#include "torchamp/detail/core/optim/muon_kernel.h"     // IWYU pragma: export
#include "torchamp/detail/core/optim/sgd_kernel.h"      // IWYU pragma: export
