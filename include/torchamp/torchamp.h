// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. Guards, policies, the scaler, fused optimizers and clipping, for a training loop.

/// @namespace torchamp
/// Automatic mixed precision for LibTorch. Every other feature has its own header.

#include "torchamp/autocast.h"
#include "torchamp/clip_grad.h"
#include "torchamp/cpu_products.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/optim.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"
