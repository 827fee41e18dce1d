// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Arithmetic with the program's own tensors, which autograd is to see and no autocast region to
/// cast.
class UncastOps {
 private:
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

/// The scaler's own arithmetic neither records gradients nor is cast by an autocast region.
class InternalOps {
 private:
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

}  // namespace torchamp::detail
