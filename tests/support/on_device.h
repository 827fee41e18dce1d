// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torchamp/grad_scaler.h>

/// Puts a scaler, once its scale exists, where a fused optimizer's step on a GPU puts it: the host
/// no longer knows the scale, and the rule runs as kernels, here on a CPU. See
/// Note [Where the scale is known].
inline void move_to_device(torchamp::GradScaler& scaler) {
  torchamp::detail::ScalerParts::scale(scaler).leave_host();
}
inline bool host_knows(const torchamp::GradScaler& scaler) {
  return torchamp::detail::ScalerParts::scale(scaler).host() != nullptr;
}
