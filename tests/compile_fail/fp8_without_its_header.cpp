// SPDX-License-Identifier: BSD-3-Clause
// error: include torchamp/fp8.h
#include <torchamp/torchamp.h>

torchamp::Policy policy() {
  return torchamp::Policy::standard().fp8(torchamp::ops::dense);
}
