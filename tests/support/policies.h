// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/policy.h>

inline torchamp::Policy relu_in_fp32() {
  return torchamp::Policy::standard().fp32({"relu"});
}
