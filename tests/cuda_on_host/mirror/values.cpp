// SPDX-License-Identifier: BSD-3-Clause
#include "values.h"

#include "cuda_on_host/stand_in.h"

namespace mirror {

using at::Tensor;
using c10::IValue;

namespace {

c10::DispatchKeySet included(bool grad) {
  const c10::DispatchKeySet autograd = c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return grad ? c10::default_included_set : c10::default_included_set - autograd;
}
c10::DispatchKeySet excluded(bool grad) {
  const c10::DispatchKeySet autograd = c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return grad ? c10::default_excluded_set : c10::default_excluded_set | autograd;
}

}  // namespace

PlainCalls::PlainCalls(bool grad) : keys_(included(grad), excluded(grad)), grad_(grad) {}

bool is_on_cuda(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda();
}

bool is_narrow(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || c10::isFloat8Type(dtype);
}

Tensor on_host(const Tensor& tensor) {
  if (!is_on_cuda(tensor)) return tensor;
  if (tensor.layout() == at::kSparse) {
    return at::_sparse_coo_tensor_unsafe(on_host(tensor._indices()), on_host(tensor._values()),
                                         tensor.sizes(), tensor.options().device(at::kCPU),
                                         tensor.is_coalesced());
  }
  TORCH_CHECK(tensor.layout() == at::kStrided, "the mirror takes strided and sparse COO tensors");
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  Tensor result = at::from_blob(stand_in_alias(tensor.const_data_ptr()), tensor.sizes(),
                                tensor.strides(), options);
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

std::size_t bytes_spanned(const Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t elements = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) elements += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<std::size_t>(elements) * tensor.element_size();
}

IValue map_tensors(const IValue& value, const TensorMap& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> result;
    for (const Tensor& tensor : value.toTensorVector()) result.push_back(map(tensor));
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> result;
    for (const auto& tensor : value.toOptionalTensorVector())
      result.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    return result;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(at::kCPU);
  return value;
}

void for_each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  for (const Tensor& tensor : tensors_of(value)) {
    if (tensor.defined()) visit(tensor);
  }
}

std::vector<Tensor> tensors_of(const IValue& value) {
  std::vector<Tensor> result;
  if (value.isTensor()) {
    result.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    result = value.toTensorVector();
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      result.push_back(tensor.value_or(Tensor()));
  }
  return result;
}

void store(const Tensor& to, const Tensor& from) {
  Tensor target = to, source = from;
  for (int64_t d = 0; d < to.dim(); ++d) {
    if (to.stride(d) != 0 || to.size(d) < 2) continue;
    target = target.narrow(d, 0, 1);  // several places, one element
    source = source.narrow(d, 0, 1);
  }
  const bool is_there = target.const_data_ptr() == source.const_data_ptr() &&
                        target.scalar_type() == source.scalar_type() &&
                        target.strides() == source.strides();
  if (!is_there) target.copy_(source);
}

}  // namespace mirror
