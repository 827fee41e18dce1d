// SPDX-License-Identifier: BSD-3-Clause
// The test of this file must fail: the second use is valid.
struct OnlyOne {
  OnlyOne() = default;
  OnlyOne(const OnlyOne&) = delete;
};

void copied(const OnlyOne& one) {
  // error: (use of deleted function|call to deleted constructor of).*OnlyOne
  const OnlyOne copy = one;
}

void valid(const OnlyOne& one) {
  // error: (use of deleted function|call to deleted constructor of).*OnlyOne
  const OnlyOne& same = one;
}

void copied_again(const OnlyOne& one) {
  // error: (use of deleted function|call to deleted constructor of).*OnlyOne
  const OnlyOne copy = one;
}
