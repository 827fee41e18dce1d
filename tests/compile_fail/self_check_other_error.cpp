// SPDX-License-Identifier: BSD-3-Clause
// The test of this file must fail: the second use has another error than it says.
struct OnlyOne {
  OnlyOne() = default;
  OnlyOne(const OnlyOne&) = delete;
};

void copied(const OnlyOne& one) {
  // error: (use of deleted function|call to deleted constructor of).*OnlyOne
  const OnlyOne copy = one;
}

void of_an_unknown_name() {
  // error: (use of deleted function|call to deleted constructor of).*OnlyOne
  const OnlyOne copy = nonsense;
}
