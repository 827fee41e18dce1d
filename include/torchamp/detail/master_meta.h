// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <utility>

#include "torchamp/detail/gradients/weight_meta.h"
#include "torchamp/detail/shards.h"
#include "torchamp/version.h"

namespace torchamp::detail {

/// What a master carries, so that whoever has only the optimizer finds the model's weight.
struct MasterMeta final : WeightMeta {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> narrow{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

/// Not for a master that carries data of its device's own.
inline void note_narrow(const at::Tensor& master, const at::Tensor& narrow) {
  if (master.unsafeGetTensorImpl()->get_backend_meta()) return;
  auto meta = c10::make_intrusive<MasterMeta>();
  meta->narrow = narrow.getIntrusivePtr();
  master.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
}

/// Drops the gradients that the model still holds of the weights whose masters `optimizer` has:
/// those that were not taken, and those that were not sent. The optimizer's own are gone.
inline void drop_model_gradients(const torch::optim::Optimizer& optimizer) {
  if (const auto unsent = unsent_of(optimizer)) unsent->drop();
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& master : group.params()) {
      if (!master.defined()) continue;
      note_gradient_dropped(master);
      const auto* const meta =
          dynamic_cast<MasterMeta*>(master.unsafeGetTensorImpl()->get_backend_meta());
      if (!meta) continue;
      if (auto narrow = meta->narrow.lock()) at::Tensor(std::move(narrow)).mutable_grad().reset();
    }
  }
}

}  // namespace torchamp::detail
