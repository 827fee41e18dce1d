// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace torchamp::detail {

/// Calls a module holder's (or pointer's) forward, or anything else as it is.
template <class Function, class... Inputs>
decltype(auto) call_forward(Function& function, Inputs&... inputs) {
  if constexpr (requires { function->forward(inputs...); }) {
    return function->forward(inputs...);
  } else {
    return function(inputs...);
  }
}

}  // namespace torchamp::detail
