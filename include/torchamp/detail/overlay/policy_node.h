// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "torchamp/version.h"

namespace torchamp::detail {

struct ThreadPolicy;

/// A policy to put into a thread's slot, and the node of LibTorch's list of slots that has it
/// already; null if there is none yet.
struct PolicyNode {
  std::shared_ptr<const ThreadPolicy> policy{};
  std::shared_ptr<c10::ThreadLocalDebugInfo> node{};
};

}  // namespace torchamp::detail
