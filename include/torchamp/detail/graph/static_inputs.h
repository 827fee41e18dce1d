// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

/// Tensors at fixed addresses that take a batch after another. The first batch says what fits.
class StaticInputs {
 public:
  explicit StaticInputs(c10::Device device) : device_(device) {}

  /// Copies `batch` in. A batch that does not fit is an error and leaves the contents as they were.
  void fill(const std::vector<at::Tensor>& batch) {
    check(batch);
    if (!allocated_) {
      std::vector<at::Tensor> fresh;
      for (const at::Tensor& input : batch) {
        fresh.push_back(at::empty_like(input, input.options().device(device_)));
      }
      tensors_ = std::move(fresh);
      allocated_ = true;
    }
    for (std::size_t i = 0; i < batch.size(); ++i) {
      tensors_[i].copy_(batch[i], /*non_blocking=*/true);
    }
  }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  /// Forgets what fits.
  void reset() {
    tensors_.clear();
    allocated_ = false;
  }

 private:
  void check(const std::vector<at::Tensor>& batch) const {
    TORCH_CHECK_VALUE(!allocated_ || batch.size() == tensors_.size(), "CudaGraph: ", batch.size(),
                      " inputs were given, but the first call had ", tensors_.size(),
                      ". Give the same ones each time, or call reset() first.");
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const at::Tensor& input = batch[i];
      TORCH_CHECK_VALUE(input.defined(), "CudaGraph: input ", i, " is undefined.");
      TORCH_CHECK_VALUE(!input.requires_grad(), "CudaGraph: input ", i,
                        " requires grad, but no gradient reaches it, for the iteration works on a "
                        "copy. Give input.detach().");
      TORCH_CHECK_VALUE(input.is_cpu() || input.device() == device_, "CudaGraph: input ", i,
                        " is on ", input.device(), ", but the optimizers' parameters are on ",
                        device_, ". Move it there, or leave it on the CPU.");
      if (!allocated_) continue;
      const at::Tensor& fixed = tensors_[i];
      TORCH_CHECK_VALUE(
          input.sizes() == fixed.sizes() && input.scalar_type() == fixed.scalar_type(),
          "CudaGraph: input ", i, " is ", input.scalar_type(), input.sizes(),
          ", but in the first call it was ", fixed.scalar_type(), fixed.sizes(),
          ". A graph holds one shape: pad or drop such a batch, or call reset() first.");
    }
  }

  c10::Device device_;
  std::vector<at::Tensor> tensors_;
  bool allocated_ = false;
};

}  // namespace torchamp::detail
