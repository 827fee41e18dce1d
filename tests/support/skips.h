// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

/// What the simulated device truly lacks.
#define SKIP_WITHOUT_SPARSE(device) \
  if ((device) == at::kPrivateUse1) GTEST_SKIP() << "the simulated device has no sparse tensors"

#define SKIP_WITHOUT_FUSED_RNN_CELLS(device) \
  if ((device) == at::kPrivateUse1) GTEST_SKIP() << "the simulated device has no fused RNN cells"
