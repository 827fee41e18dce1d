// SPDX-License-Identifier: BSD-3-Clause
#include "support/simulated/kernel.h"
#include "support/simulated/register.h"

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

}  // namespace

void register_fallback(torch::Library& all, torch::Library& aten) {
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&any>());
  aten.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  aten.impl("convolution_backward_overrideable",
            torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // `_foreach_` ops would be taken apart for a device without kernels of its own.
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    aten.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&any>());
  }
}

}  // namespace simulated
