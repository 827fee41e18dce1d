// SPDX-License-Identifier: BSD-3-Clause
// The test of this file must fail: the use is valid.
int valid() {
  // error: .
  return 0;
}
