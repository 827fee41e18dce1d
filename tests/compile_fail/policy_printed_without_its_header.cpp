// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/policy_text.h
#include <torchamp/torchamp.h>

#include <iostream>

void print(const torchamp::Policy& policy) {
  std::cout << policy;
}
