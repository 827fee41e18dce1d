// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <optional>
#include <vector>

#include "torchamp/detail/tensors.h"
#include "torchamp/version.h"

namespace torchamp::detail {

inline void check_reduce_dtype(const char* owner, const std::optional<at::ScalarType>& dtype) {
  TORCH_CHECK_VALUE(!dtype || *dtype == at::kFloat || is_16_bit(*dtype), owner,
                    ": gradients cannot be sent as ", dtype.value_or(at::kFloat),
                    ". Pass torch::kFloat, torch::kBFloat16 or torch::kHalf as reduce_dtype.");
}

/// Has c10d's Reducer send its buckets in a dtype of choice, and take the averages back into their
/// own. The division comes first where the sum could leave the dtype's range.
class ReduceInDtype final
    : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  ReduceInDtype(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::ScalarType dtype)
      : CppCommHookInterface(group), dtype_(dtype) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const InternalOps internal;
    const at::Tensor buffer = bucket.getBufferRef();
    const auto processes = static_cast<double>(state_->getSize());
    const bool divides_first = dtype_ == at::kHalf;
    std::vector<at::Tensor> sent{buffer.to(dtype_, /*non_blocking=*/false, /*copy=*/true)};
    if (divides_first) sent[0].div_(processes);
    return state_->allreduce(sent)->getFuture()->then(
        [buffer, divides_first, processes](c10::ivalue::Future& done) {
          const InternalOps on_its_thread;
          at::Tensor reduced = done.value().toTensorVector().at(0);
          if (!divides_first) reduced.div_(processes);
          buffer.copy_(reduced);
          return c10::IValue(buffer);
        },
        c10::TensorType::get());
  }

 private:
  at::ScalarType dtype_;
};

}  // namespace torchamp::detail
