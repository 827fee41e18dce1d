// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "torchamp/detail/core/base/system.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/products/cpu_products.h"
#include "torchamp/detail/core/products/measure.h"
#include "torchamp/detail/core/products/product_kernel.h"

namespace TORCHAMP_NAMESPACE::detail {

/// An op that torchamp has a kernel of on CPUs.
struct ProductOp {
  ProductFamily family;
  const char* name;
  const char* overload = "";
};
/// Ops that others are made of. Convolutions pass through three, forward and backward. LibTorch is
/// not slow in mv, in dot and in the forward pass of attention.
inline constexpr ProductOp product_ops[] = {
    {ProductFamily::matrices, "aten::mm"},
    {ProductFamily::matrices, "aten::mm", "out"},
    {ProductFamily::matrices, "aten::addmm"},
    {ProductFamily::matrices, "aten::addmm", "out"},
    {ProductFamily::matrices, "aten::addmm_"},
    {ProductFamily::matrices, "aten::_addmm_activation"},
    {ProductFamily::matrices, "aten::_addmm_activation", "out"},
    {ProductFamily::matrices, "aten::bmm"},
    {ProductFamily::matrices, "aten::bmm", "out"},
    {ProductFamily::matrices, "aten::baddbmm"},
    {ProductFamily::matrices, "aten::baddbmm", "out"},
    {ProductFamily::matrices, "aten::baddbmm_"},
    {ProductFamily::matrices, "aten::addbmm"},
    {ProductFamily::matrices, "aten::addbmm", "out"},
    {ProductFamily::matrices, "aten::addbmm_"},
    {ProductFamily::matrices, "aten::_scaled_dot_product_flash_attention_for_cpu_backward"},
    {ProductFamily::convolutions, "aten::convolution"},
    {ProductFamily::convolutions, "aten::_convolution"},
    {ProductFamily::convolutions, "aten::convolution_backward"},
    {ProductFamily::layers, "aten::mkldnn_rnn_layer"},
    {ProductFamily::layers, "aten::mkldnn_rnn_layer_backward"},
};

/// Whether a kernel of the op's for CPUs comes from another library than LibTorch.
inline bool has_foreign_kernel(const c10::OperatorHandle& op) {
  constexpr std::string_view line = "\nCPU: registered at ";
  const std::string state = op.dumpState();
  const auto begin = state.find(line);
  if (begin == state.npos) return false;
  const auto file =
      state.substr(begin + line.size(), state.find('\n', begin + 1) - begin - line.size());
  return file.find("RegisterCPU") == file.npos;
}

/// Registers torchamp's kernels of a family, once per process; the runtime's mutex is held.
inline void register_product_kernels(CpuProductsState& state, ProductFamily family) {
  const auto index = static_cast<std::size_t>(family);
  if (std::exchange(state.are_registered[index], true)) return;
  const NoWarning of_any_text("");  // LibTorch warns of kernels that replace others
  for (const ProductOp& row : product_ops) {
    const auto op = c10::Dispatcher::singleton().findSchema({row.name, row.overload});
    if (row.family != family || !op) continue;
    // An op that LibTorch differentiates through its parts would lose its gradients.
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (has_foreign_kernel(*op)) continue;
    auto kernel =
        std::make_unique<ProductKernel>(op->schema(), kernel_of(*op, c10::DispatchKey::CPU),
                                        state.fp16[index].kernels, state.bf16[index].kernels);
    auto registration =
        std::make_unique<c10::RegistrationHandleRAII>(c10::Dispatcher::singleton().registerImpl(
            op->operator_name(), c10::DispatchKey::CPU,
            c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)), std::nullopt, nullptr,
            "torchamp kernel"));
    (void)registration.release();  // never destroyed: its end would take the kernel away
  }
}

/// What TORCHAMP_CPU_PRODUCTS says.
inline ProductKernels products_of_environment() {
  const char* const value = environment_variable("TORCHAMP_CPU_PRODUCTS");
  const std::string text = value == nullptr ? "" : value;
  if (text.empty()) return ProductKernels::undecided;
  if (text == "fp32") return ProductKernels::fp32;
  TORCHAMP_CHECK(text == "libtorch", "TORCHAMP_CPU_PRODUCTS is '", text,
                 "'. Set it to fp32 or libtorch, or unset it.");
  return ProductKernels::libtorch;
}

/// The kernels for a family of products; the runtime's mutex is held. Measures at most once. A CPU
/// that is slow in matrices is slow in all.
inline ProductKernels choose_products(CpuProductsState& state, at::ScalarType dtype,
                                      ProductFamily family) {
  if (!state.choice) state.choice = products_of_environment();
  if (*state.choice != ProductKernels::undecided) return *state.choice;
  if (family != ProductFamily::matrices &&
      choose_products(state, dtype, ProductFamily::matrices) == ProductKernels::fp32) {
    return ProductKernels::fp32;
  }
  std::optional<bool>& is_slow = state.of(dtype)[static_cast<std::size_t>(family)].is_slow;
  if (!is_slow) is_slow = is_slow_in(family, dtype);
  return *is_slow ? ProductKernels::fp32 : ProductKernels::libtorch;
}

TORCHAMP_BODY void decide_cpu_products(at::ScalarType dtype) {
  SharedRuntime& runtime = shared_runtime();
  CpuProductsState& state = runtime.cpu_products;
  const std::scoped_lock lock(runtime.mutex);
  // The first, matrices, is what guards look at, so it is the last to be stored.
  for (std::size_t i = product_families; i-- > 0;) {
    const auto family = static_cast<ProductFamily>(i);
    const ProductKernels kernels = choose_products(state, dtype, family);
    if (kernels == ProductKernels::fp32) register_product_kernels(state, family);
    state.of(dtype)[i].kernels.store(kernels, std::memory_order_release);
  }
}

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY void set_cpu_products(CpuProducts products) {
  using detail::ProductKernels;
  detail::SharedRuntime& runtime = detail::shared_runtime();
  detail::CpuProductsState& state = runtime.cpu_products;
  const std::scoped_lock lock(runtime.mutex);
  state.choice = products == CpuProducts::fastest ? ProductKernels::undecided
                 : products == CpuProducts::fp32  ? ProductKernels::fp32
                                                  : ProductKernels::libtorch;
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    for (auto& family : state.of(dtype)) {
      family.kernels.store(ProductKernels::undecided, std::memory_order_release);
    }
  }
}

TORCHAMP_BODY CpuProducts cpu_products(at::ScalarType dtype) {
  TORCHAMP_CHECK_VALUE(detail::is_16_bit(dtype), "cpu_products: the dtype ", c10::toString(dtype),
                       " has no choice of products. Pass torch::kHalf or torch::kBFloat16.");
  detail::SharedRuntime& runtime = detail::shared_runtime();
  const std::scoped_lock lock(runtime.mutex);
  const detail::ProductKernels matrices =
      detail::choose_products(runtime.cpu_products, dtype, detail::ProductFamily::matrices);
  return matrices == detail::ProductKernels::fp32 ? CpuProducts::fp32 : CpuProducts::libtorch;
}

}  // namespace TORCHAMP_NAMESPACE
