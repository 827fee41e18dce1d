// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/detail/extras/graph/iteration.h"

/// While it lives, first() names the first op of the thread that makes the host wait for a device.
using torchamp::detail::HostAccessWatch;
