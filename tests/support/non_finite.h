// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <limits>

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
