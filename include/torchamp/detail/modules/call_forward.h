// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <utility>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Calls a module holder's (or pointer's) forward, or anything else as it is.
template <class Function, class... Inputs>
decltype(auto) call_forward(Function& function, Inputs&&... inputs) {
  if constexpr (requires { function->forward(std::forward<Inputs>(inputs)...); }) {
    return function->forward(std::forward<Inputs>(inputs)...);
  } else {
    return function(std::forward<Inputs>(inputs)...);
  }
}

}  // namespace torchamp::detail
