// SPDX-License-Identifier: BSD-3-Clause
// CUDA tensors as the CPU's kernels may take them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <optional>

namespace mirror {

/// Calls reach the CPU's kernels and nothing before them: no autograd, autocast or observers of the
/// program. With `grad`, autograd does record.
class PlainCalls {
 public:
  explicit PlainCalls(bool grad = false);

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  at::AutoGradMode grad_;
  at::DisableRecordFunctionGuard quiet_;
};

bool is_on_cuda(const at::Tensor& tensor);
/// fp16, bf16 and fp8.
bool is_narrow(at::ScalarType dtype);

/// A CPU tensor over a CUDA tensor's memory, or a sparse one over that of its indices and values;
/// other tensors as they are. Holds no reference.
at::Tensor on_host(const at::Tensor& tensor);

/// The bytes from a strided tensor's first element to its last.
std::size_t bytes_spanned(const at::Tensor& tensor);

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;
/// With each tensor replaced, those in lists as well, and CUDA devices by the CPU.
c10::IValue map_tensors(const c10::IValue& value, const TensorMap& map);
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);
std::vector<at::Tensor> tensors_of(const c10::IValue& value);

/// Writes values into `to`, which may be expanded or of another dtype.
void store(const at::Tensor& to, const at::Tensor& from);

}  // namespace mirror
