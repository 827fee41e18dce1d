// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/DeviceType.h>
#include <gtest/gtest.h>

#include "torchamp/detail/extras/graph/make_recorder.h"

/// First line of a test body that captures on the simulated device, after SKIP_WITHOUT: a program
/// finds its graphs in a registry that some LibTorchs do not have.
#define SKIP_WITHOUT_GRAPH_REGISTRY()                             \
  if (!torchamp::detail::has_registered_graphs(at::kPrivateUse1)) \
  GTEST_SKIP() << "this LibTorch has no registry of graphs"
