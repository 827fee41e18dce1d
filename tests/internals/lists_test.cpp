// SPDX-License-Identifier: BSD-3-Clause
// What LibTorch's own autocast kernels do on a CPU, against the list that torchamp keeps of them.
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/schema.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "support/warnings.h"
#include "torchamp/detail/core/autocast/autocast_kernel.h"
#include "torchamp/detail/extras/observe/observer.h"

namespace {

using torchamp::Cast;

using Stack = std::vector<c10::IValue>;

/// Some value of an op's argument, with tensors that `next` gives; nothing if none can be made up.
template <class Next>
std::optional<c10::IValue> some_value(const c10::Argument& argument, const c10::Type& type,
                                      const Next& next) {
  using c10::TypeKind;
  if (type.kind() == TypeKind::TensorType) return c10::IValue(next());
  if (type.kind() == TypeKind::OptionalType) {
    const auto& element = type.castRaw<c10::OptionalType>()->getElementType();
    if (torchamp::detail::holds_tensors(*element)) return some_value(argument, *element, next);
  }
  if (argument.default_value()) return argument.default_value();
  switch (type.kind()) {
    case TypeKind::OptionalType:
      return c10::IValue();
    case TypeKind::ListType: {
      const c10::TypePtr& element = type.castRaw<c10::ListType>()->getElementType();
      if (element->kind() == TypeKind::IntType || element->kind() == TypeKind::SymIntType) {
        return c10::IValue(
            std::vector<std::int64_t>(static_cast<std::size_t>(argument.N().value_or(2)), 1));
      }
      c10::impl::GenericList list(element);
      for (int i = 0; i < 2; ++i) {
        const auto value = some_value(argument, *element, next);
        if (!value) return std::nullopt;
        list.push_back(*value);
      }
      return c10::IValue(list);
    }
    case TypeKind::IntType:
    case TypeKind::SymIntType:
    case TypeKind::NumberType:
      return c10::IValue(1);
    case TypeKind::FloatType:
      return c10::IValue(1.);
    case TypeKind::BoolType:
      return c10::IValue(false);
    case TypeKind::StringType:
      return c10::IValue("none");
    default:
      return std::nullopt;
  }
}

/// The casts that a kernel makes of its arguments before it calls anything else.
struct Casts {
  std::set<const c10::TensorImpl*> arguments;
  std::vector<at::ScalarType> to;
  bool is_called = false;
  bool over = false;
};
Casts* watching = nullptr;

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call) {
  if (watching == nullptr || watching->over) return nullptr;
  if (!watching->is_called) {
    watching->is_called = true;  // the op itself
    return nullptr;
  }
  const auto name = call.operator_name();
  const auto inputs = torchamp::detail::inputs_of(call);
  if (name && name->name == "aten::_to_copy") return nullptr;  // what `to` calls
  if (!name || name->name != "aten::to") {
    watching->over = true;
  } else if (watching->arguments.contains(inputs[0].toTensor().unsafeGetTensorImpl())) {
    const auto dtype = std::find_if(inputs.begin(), inputs.end(),
                                    [](const c10::IValue& value) { return value.isInt(); });
    if (dtype != inputs.end()) watching->to.push_back(static_cast<at::ScalarType>(dtype->toInt()));
  }
  return nullptr;
}

void on_end(const at::RecordFunction&, at::ObserverContext*) {}

/// The dtypes to which a CPU's kernel casts arguments in a bf16 region, whose dtypes alternate
/// between `even` and `odd`; nothing if no arguments can be made up.
std::optional<std::vector<at::ScalarType>> casts_of(const c10::OperatorHandle& op,
                                                    at::ScalarType even, at::ScalarType odd) {
  std::vector<at::Tensor> tensors;
  const auto next = [&] {
    return tensors.emplace_back(at::ones({2, 2}, tensors.size() % 2 == 0 ? even : odd));
  };
  Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    auto value = some_value(argument, *argument.type(), next);
    if (!value) return std::nullopt;
    stack.push_back(*std::move(value));
  }
  Casts casts;
  for (const at::Tensor& tensor : tensors) casts.arguments.insert(tensor.unsafeGetTensorImpl());
  watching = &casts;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {  // after its casts: the arguments are made up
  }
  at::autocast::set_autocast_enabled(at::kCPU, false);
  watching = nullptr;
  return casts.to;
}

/// What an op's kernel is seen to do; nothing if it is seen to do nothing.
std::optional<Cast> seen_rule(const c10::OperatorHandle& op) {
  const auto has = [](const auto& casts, at::ScalarType dtype) {
    return casts && std::find(casts->begin(), casts->end(), dtype) != casts->end();
  };
  if (has(casts_of(op, at::kFloat, at::kFloat), at::kBFloat16)) return Cast::lower_precision;
  if (has(casts_of(op, at::kBFloat16, at::kBFloat16), at::kFloat)) return Cast::fp32;
  if (has(casts_of(op, at::kBFloat16, at::kFloat), at::kFloat)) return Cast::promote;
  return std::nullopt;
}

TEST(LibTorchLists, SayWhatEachKernelOfACpuDoes) {
  const CollectedWarnings warnings;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_start, &on_end)
                                                     .needsInputs(true)
                                                     .scopes({at::RecordScope::FUNCTION}));
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& name :
       dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::AutocastCPU)) {
    const auto op = dispatcher.findSchema(name);
    if (!op || op->isKernelFallthroughKernel(c10::DispatchKey::AutocastCPU)) continue;
    const std::string full_name = c10::toString(name);
    if (torchamp::detail::takes_named_dimensions(op->schema())) continue;
    const std::optional<Cast> seen = seen_rule(*op);
    ++count;
    EXPECT_TRUE(seen.has_value()) << "no cast was seen of " << full_name;
    EXPECT_EQ(torchamp::detail::effect_of_native(name, at::kCPU), seen.value_or(Cast::native))
        << full_name;
  }
  at::removeCallback(handle);
  EXPECT_GT(count, 100);
}

TEST(LibTorchLists, AreSilentAboutOtherOps) {
  for (const char* name : {"aten::relu", "mylib::mm", "aten::mmm", "aten::m", "aten::", ""}) {
    EXPECT_EQ(torchamp::detail::effect_of_native({name, ""}, at::kCPU), Cast::native) << name;
  }
  EXPECT_EQ(torchamp::detail::effect_of_native({"aten::linear", ""}, at::kCUDA),
            Cast::lower_precision);
  EXPECT_EQ(torchamp::detail::effect_of_native({"aten::softmax", "int"}, at::kCUDA), Cast::fp32);
}

}  // namespace
