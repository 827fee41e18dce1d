// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <utility>

#include "torchamp/version.h"

namespace torchamp::detail {

[[noreturn, gnu::cold]] inline void throw_value_error(const char* function, const char* file,
                                                      uint32_t line, std::string text) {
  throw c10::ValueError({function, file, line}, std::move(text));
}

}  // namespace torchamp::detail

/// TORCH_CHECK_VALUE, which compiles the making of an exception at each place: 4 kB of a program.
#define TORCHAMP_CHECK_VALUE(condition, ...)                                                      \
  if (C10_UNLIKELY_OR_CONST(!(condition))) {                                                      \
    ::torchamp::detail::throw_value_error(__func__, __FILE__, __LINE__, ::c10::str(__VA_ARGS__)); \
  }
