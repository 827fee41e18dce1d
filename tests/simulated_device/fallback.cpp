// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/ops/ones_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "simulated_device/generator.h"
#include "simulated_device/kernel.h"
#include "simulated_device/register.h"

namespace simulated {

namespace {

void any(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_kernel(op, stack);
}

// LibTorch sends a device that it does not know to these two.

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_kernel(op, stack, [](torch::jit::Stack* s) {
    static const auto same =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
    same.callBoxed(s);
  });
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_kernel(op, stack, [](torch::jit::Stack* s) {
    static const auto same =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    // The same arguments, and the bias's sizes behind the weight.
    const auto begin = s->end() - 10;
    const at::Tensor weight = begin[2].toTensor();
    const bool transposed = begin[6].toBool();
    const int64_t channels = transposed ? weight.size(1) * begin[8].toInt() : weight.size(0);
    s->insert(begin + 3, c10::IValue(std::vector<int64_t>{channels}));
    same.callBoxed(s);
  });
}

/// The CPU's would draw from the CPU's generator, as it takes none.
void dropout(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_kernel(op, stack, [](torch::jit::Stack* s) {
    const bool train = s->back().isNone() || s->back().toBool();
    const double p = (*s)[s->size() - 2].toDouble();
    const at::Tensor input = (*s)[s->size() - 3].toTensor();
    const c10::DeviceIndex device =
        c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getDevice().index();
    at::Tensor mask = at::ones_like(input, input.options().dtype(at::kBool));
    if (train) mask.bernoulli_(1. - p, drawing(default_generator(device)));
    const at::Tensor output = train ? input.mul(mask).div_(1. - p) : input.clone();
    torch::jit::drop(*s, 3);
    torch::jit::push(*s, output, mask);
  });
}

/// A mask is turned into indices first, by an op that the host waits for, as on CUDA.
void index(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::List<std::optional<at::Tensor>> indices;
  for (const std::optional<at::Tensor>& t : stack->back().toOptionalTensorList()) {
    const bool is_mask = t && t->defined() && t->scalar_type() == at::kBool && is_on_device(*t);
    if (!is_mask) {
      indices.push_back(t);
      continue;
    }
    for (const at::Tensor& column : t->nonzero().unbind(1)) indices.push_back(column);
  }
  stack->back() = std::move(indices);
  run_kernel(op, stack);
}

}  // namespace

void register_fallback(torch::Library& all, torch::Library& aten) {
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&any>());
  aten.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  aten.impl("convolution_backward_overrideable",
            torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  aten.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&index>());
  aten.impl("native_dropout", torch::CppFunction::makeFromBoxedFunction<&dropout>());
  // `_foreach_` ops would be split for a device without its own kernels.
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    aten.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&any>());
  }
}

}  // namespace simulated
