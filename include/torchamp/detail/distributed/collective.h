// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <exception>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Returns f(), which waits for other processes. What it throws becomes a c10::Error that begins
/// with `call`: Gloo's own exceptions are none.
template <class F>
decltype(auto) collective(const char* call, const F& f) {
  const auto fail = [call](const char* reason) {
    TORCH_CHECK_WITH(DistBackendError, false, call, ": ", reason,
                     " (Has another process failed or stalled, or has it another model?)");
  };
  try {
    return f();
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
    throw;  // not reached
  } catch (const std::exception& error) {
    fail(error.what());
    throw;  // not reached
  }
}

}  // namespace torchamp::detail
