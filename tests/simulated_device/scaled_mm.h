// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace simulated {

/// The device is an older one while this lives: `_scaled_mm` says that it has no fp8 units.
class NoFp8Units {
 public:
  NoFp8Units();
  ~NoFp8Units();
  NoFp8Units(const NoFp8Units&) = delete;
  NoFp8Units& operator=(const NoFp8Units&) = delete;
};

}  // namespace simulated
