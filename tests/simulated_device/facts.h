// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/detail/core/base/devices.h>

namespace simulated {

using torchamp::detail::Fp64;  // whether a device computes in it

/// Makes the simulated accelerator another kind of device for torchamp, for as long as it lives.
/// Objects that know the device from before may go on as they were.
class Facts {
 public:
  explicit Facts(const torchamp::detail::DeviceFacts& facts) : facts_(facts) {
    torchamp::detail::facts_of_own_backend = &facts_;
  }
  ~Facts() { torchamp::detail::facts_of_own_backend = nullptr; }
  Facts(const Facts&) = delete;
  Facts& operator=(const Facts&) = delete;

 private:
  torchamp::detail::DeviceFacts facts_;
};

/// Those of the table's row for `type`.
inline torchamp::detail::DeviceFacts facts_like(at::DeviceType type) {
  torchamp::detail::DeviceFacts facts = torchamp::detail::facts_of(type);
  facts.type = at::kPrivateUse1;
  return facts;
}

}  // namespace simulated
