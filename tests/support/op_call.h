// SPDX-License-Identifier: BSD-3-Clause
// Calls the op of a case and compares what comes out.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/op_case.h"
#include "support/tolerances.h"

using Stack = std::vector<c10::IValue>;

/// Where and in which dtypes a case runs.
struct Variant {
  at::DeviceType device;
  at::ScalarType region;
  at::ScalarType x;

  at::ScalarType dtype(const std::string& name) const {
    if (name == "x") return x;
    if (name == "lower") return region;
    if (name == "float32") return at::kFloat;
    if (name == "float64") return at::kDouble;
    if (name == "int32") return at::kInt;
    if (name == "int64") return at::kLong;
    if (name == "bool") return at::kBool;
    TORCH_CHECK(false, "a case names the dtype '", name, "'");
  }
};

/// "float32", as Python prints it.
inline std::string python_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kByte:
      return "uint8";
    case at::kUInt64:
      return "uint64";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    case at::kComplexHalf:
      return "complex32";
    case at::kComplexFloat:
      return "complex64";
    default:
      return c10::toString(dtype);
  }
}

/// The label of a variant in a record: "bfloat16 float32", or "bfloat16" for a case without x.
inline std::string label(const OpCase& op_case, const Variant& variant) {
  const std::string region = python_name(variant.region);
  return op_case.varies ? region + ' ' + python_name(variant.x) : region;
}

/// bf16 and fp16 regions; x in fp32 and in the region's dtype, if the case has one.
inline std::vector<Variant> variants(const OpCase& op_case, at::DeviceType device) {
  std::vector<Variant> all;
  for (const at::ScalarType region : {at::kBFloat16, at::kHalf}) {
    all.push_back({device, region, at::kFloat});
    if (op_case.varies) all.push_back({device, region, region});
  }
  return all;
}

inline std::optional<c10::OperatorHandle> find_op(const std::string& name) {
  const std::size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema({"aten::" + name.substr(0, dot), overload});
}

// ---- Arguments ----------------------------------------------------------------------------------

/// Element `index` of the tensor at `place` in its case: between 0 and 1, the same in Python.
inline double fraction(std::int64_t index, int place) {
  return (static_cast<double>((index * 7919 + place * 1047 + 1234) % 10007) + 0.5) / 10007;
}

inline at::Tensor make_tensor(const TensorLiteral& literal, const Variant& variant) {
  const at::ScalarType dtype = variant.dtype(literal.dtype);
  const bool floating = c10::isFloatingType(dtype);
  const at::Tensor flat = at::empty({std::accumulate(literal.shape.begin(), literal.shape.end(),
                                                     std::int64_t{1}, std::multiplies<>())},
                                    at::kDouble);
  double* const data = flat.mutable_data_ptr<double>();
  const std::int64_t n = literal.shape.empty() ? 1 : literal.shape.back();
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const std::int64_t row = i / n % n, column = i % n;
    if (literal.values) {
      data[i] = (*literal.values)[static_cast<std::size_t>(i) % literal.values->size()];
    } else if (!floating) {
      data[i] = static_cast<double>(i);
    } else if (literal.fill == "spd") {
      data[i] =
          row == column ? static_cast<double>(row + n) : fraction(row + column, literal.place);
    } else if (literal.fill == "unit") {
      data[i] = 1.8 * fraction(i, literal.place) - 0.9;
    } else if (literal.fill == "positive") {
      data[i] = 0.9 * fraction(i, literal.place) + 0.1;
    } else {
      TORCH_CHECK(literal.fill == "spread", "a case names the fill '", literal.fill, "'");
      data[i] = 2 * fraction(i, literal.place) - 1;
    }
  }
  // First to fp32: a 16-bit input is the fp32 one, rounded.
  const at::ScalarType wide = floating && dtype != at::kDouble ? at::kFloat : dtype;
  return flat.view(literal.shape)
      .to(wide)
      .to(at::TensorOptions(variant.device).dtype(dtype))
      .requires_grad_(literal.grad);
}

inline c10::IValue make_value(const Literal& literal, const c10::Type& type, const Variant& variant,
                              std::optional<std::int32_t> length = std::nullopt) {
  using c10::TypeKind;
  if (type.kind() == TypeKind::OptionalType) {
    if (literal.is<std::monostate>()) return {};
    return make_value(literal, *type.castRaw<c10::OptionalType>()->getElementType(), variant,
                      length);
  }
  if (type.kind() == TypeKind::ListType) {
    const c10::TypePtr& element = type.castRaw<c10::ListType>()->getElementType();
    c10::impl::GenericList list(element);
    if (literal.is<std::vector<Literal>>()) {
      for (const Literal& each : literal.get<std::vector<Literal>>()) {
        list.push_back(make_value(each, *element, variant));
      }
    } else {  // one number for all of `int[2]`
      for (std::int32_t i = 0; i < length.value_or(1); ++i) {
        list.push_back(make_value(literal, *element, variant));
      }
    }
    return list;
  }
  if (literal.is<TensorLiteral>()) return make_tensor(literal.get<TensorLiteral>(), variant);
  if (literal.is<DtypeLiteral>()) {
    return static_cast<std::int64_t>(variant.dtype(literal.get<DtypeLiteral>().name));
  }
  if (literal.is<bool>()) return literal.get<bool>();
  if (literal.is<std::string>()) return literal.get<std::string>();
  if (literal.is<double>()) return literal.get<double>();
  if (literal.is<std::int64_t>()) {
    if (type.kind() == TypeKind::FloatType) return literal.number();
    if (type.kind() == TypeKind::TensorType) return at::scalar_tensor(literal.number());
    return literal.get<std::int64_t>();
  }
  return {};
}

/// A case's arguments on the interpreter's stack, fresh tensors every time.
inline Stack make_arguments(const OpCase& op_case, const c10::FunctionSchema& schema,
                            const Variant& variant) {
  Stack stack;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const Literal* literal = i < op_case.positional.size() ? &op_case.positional[i] : nullptr;
    for (const auto& [name, value] : op_case.keyword) {
      if (name == argument.name()) literal = &value;
    }
    if (literal != nullptr) {
      stack.push_back(make_value(*literal, *argument.type(), variant, argument.N()));
    } else {
      TORCH_CHECK(argument.default_value(), "no value for '", argument.name(),
                  "' in the case: ", op_case.text);
      stack.push_back(*argument.default_value());
    }
  }
  return stack;
}

// ---- Results ------------------------------------------------------------------------------------

/// What a call gave: values, tensors in lists one by one; or an error, by its Python name.
struct Outcome {
  std::vector<c10::IValue> values;
  std::string error;
  std::string message;  // the error's first line
};

inline void flatten(const c10::IValue& value, std::vector<c10::IValue>& flat) {
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) flat.emplace_back(tensor.detach());
  } else if (value.isTensor() && value.toTensor().defined()) {
    flat.emplace_back(value.toTensor().detach());
  } else if (value.isTensor()) {
    flat.emplace_back();
  } else {
    flat.push_back(value);
  }
}

/// Calls the op as code does that has only its name, and keeps what comes of it.
template <class Call>
Outcome outcome_of(Stack stack, Call call) {
  Outcome outcome;
  const auto failed = [&](const char* name, const std::string& message) {
    outcome.error = name;
    outcome.message = message.substr(0, message.find('\n'));
  };
  try {
    call(stack);
    for (const c10::IValue& value : stack) flatten(value, outcome.values);
  } catch (const c10::NotImplementedError& error) {
    failed("NotImplementedError", error.what_without_backtrace());
  } catch (const c10::IndexError& error) {
    failed("IndexError", error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    failed("ValueError", error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    failed("TypeError", error.what_without_backtrace());
  } catch (const c10::LinAlgError& error) {
    failed("LinAlgError", error.what_without_backtrace());
  } catch (const c10::Error& error) {
    failed("RuntimeError", error.what_without_backtrace());
  } catch (const std::exception& error) {  // of oneDNN, say
    failed("RuntimeError", error.what());
  }
  return outcome;
}

inline Outcome call_boxed(const OpCase& op_case, const c10::OperatorHandle& op,
                          const Variant& variant) {
  return outcome_of(make_arguments(op_case, op.schema(), variant),
                    [&](Stack& stack) { op.callBoxed(stack); });
}

inline std::string describe(const c10::IValue& value) {
  std::ostringstream text;
  if (value.isTensor()) {
    text << python_name(value.toTensor().scalar_type()) << value.toTensor().sizes();
  } else {
    text << value.tagKind();
  }
  return text.str();
}

inline std::string describe(const Outcome& outcome) {
  if (!outcome.error.empty()) return outcome.error + ": " + outcome.message;
  std::string text;
  for (const c10::IValue& value : outcome.values) {
    text += (text.empty() ? "" : ", ") + describe(value);
  }
  return text;
}

/// The dtypes of what ops keep for their backward: scratch memory, and states of random generators.
inline bool is_scratch(at::ScalarType dtype) {
  return dtype == at::kByte || dtype == at::kUInt64;
}

/// A tensor's elements in fp64 on the CPU, complex ones as pairs.
inline at::Tensor comparable(const at::Tensor& tensor, bool magnitudes) {
  at::Tensor plain = tensor.to(at::kCPU).resolve_conj();
  if (plain.is_complex()) plain = at::view_as_real(plain);
  plain = plain.to(at::kDouble);
  return magnitudes ? plain.abs() : plain;
}

/// How close values must be. `magnitudes`: their signs are free.
struct Closeness {
  bool exact = false;
  bool magnitudes = false;
};

inline std::string difference(const at::Tensor& actual, const at::Tensor& expected,
                              const Closeness& closeness) {
  if (actual.scalar_type() != expected.scalar_type() || actual.sizes() != expected.sizes()) {
    return describe(c10::IValue(actual)) + " instead of " + describe(c10::IValue(expected));
  }
  if (is_scratch(actual.scalar_type())) return {};
  const at::Tensor a = comparable(actual, closeness.magnitudes);
  const at::Tensor e = comparable(expected, closeness.magnitudes);
  const Tolerance t =
      closeness.exact ? Tolerance{0, 0} : tolerance(at::toRealValueType(actual.scalar_type()));
  if (at::allclose(a, e, t.relative, t.absolute, /*equal_nan=*/true)) return {};
  std::ostringstream text;
  text << "values of " << describe(c10::IValue(actual)) << " that differ by up to "
       << (a - e).abs().max().item<double>();
  return text.str();
}

/// What sets `actual` apart from `expected`; empty if nothing does.
inline std::string difference(const Outcome& actual, const Outcome& expected,
                              const Closeness& closeness) {
  if (actual.error != expected.error || actual.message != expected.message ||
      actual.values.size() != expected.values.size()) {
    return describe(actual) + " instead of " + describe(expected);
  }
  for (std::size_t i = 0; i < actual.values.size(); ++i) {
    const c10::IValue &a = actual.values[i], &e = expected.values[i];
    if (a.isTensor() && e.isTensor()) {
      const std::string found = difference(a.toTensor(), e.toTensor(), closeness);
      if (!found.empty()) return "result " + std::to_string(i) + " is " + found;
    } else if (a != e) {
      return describe(actual) + " instead of " + describe(expected);
    }
  }
  return {};
}
