// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/grad_scaler.h>

namespace torchamp::detail {

/// Puts a scaler, once its scale exists, where a fused optimizer's step on a GPU puts it: the host
/// no longer knows the scale, and the rule runs as kernels, here on a CPU. See Note [Where the
/// scale is known].
struct GradScalerPeer {
  static void move_to_device(GradScaler& scaler) { scaler.state_.leave_host(); }
  static bool host_knows(const GradScaler& scaler) { return scaler.state_.host() != nullptr; }
};

}  // namespace torchamp::detail

inline void move_to_device(torchamp::GradScaler& scaler) {
  torchamp::detail::GradScalerPeer::move_to_device(scaler);
}
inline bool host_knows(const torchamp::GradScaler& scaler) {
  return torchamp::detail::GradScalerPeer::host_knows(scaler);
}
