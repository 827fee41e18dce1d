// SPDX-License-Identifier: BSD-3-Clause
// Every row of Policy::standard() on a CPU, in bf16 and fp16: against the documented rule and
// against arguments cast by hand. tests/parity/cases.txt is the table.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "support/devices.h"
#include "support/op_call.h"
#include "support/op_case.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/labs/fp8.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Cast;
using torchamp::Policy;

const std::string parity = TORCHAMP_TEST_PARITY_DIR;

Cast parse_cast(std::string_view text) {
  for (const Cast cast : {Cast::native, Cast::lower_precision, Cast::fp32, Cast::promote,
                          Cast::unchanged, Cast::fp8}) {
    if (to_string(cast) == text) return cast;
  }
  TORCH_CHECK(false, "cases.txt names the rule '", text, "'");
}

bool is_listed(const c10::OperatorHandle& op) {
  return torchamp::detail::listed_cast(op.operator_name()) != Cast::native;
}

/// A section's rule for a device: `fp32`, or `native:fp32` with its effect.
struct Rule {
  Cast lookup;
  Cast effect;

  static std::optional<Rule> of(const CaseSection& section, const char* device,
                                const c10::OperatorHandle& op) {
    const std::string text = section.attribute(device);
    if (text.empty()) return std::nullopt;
    if (section.attribute("when") == "listed" && !is_listed(op)) {
      return Rule{Cast::unchanged, Cast::unchanged};
    }
    const std::size_t colon = text.find(':');
    const Cast lookup = parse_cast(text.substr(0, colon));
    return Rule{lookup, colon == std::string::npos ? lookup : parse_cast(text.substr(colon + 1))};
  }
};

/// Calls `function(section, case, op)` for the cases of cases.txt that this LibTorch has.
template <class Function>
void for_each_case(Function function) {
  static const std::vector<CaseSection> sections = read_cases(parity + "/cases.txt");
  for (const CaseSection& section : sections) {
    for (const OpCase& op_case : section.cases) {
      if (const auto op = find_op(op_case.op)) function(section, op_case, *op);
    }
  }
}

// ---- The slow plain reference: arguments cast one by one, and the op called outside autocast
// ------

bool eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
}

template <class Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
  return list;
}

at::ScalarType widest(const Stack& arguments, at::ScalarType region) {
  at::ScalarType dtype = region;
  for (const c10::IValue& argument : arguments) {
    map_tensors(argument, [&](const at::Tensor& tensor) {
      if (eligible(tensor) && tensor.scalar_type() == at::kFloat) dtype = at::kFloat;
      return tensor;
    });
  }
  return dtype;
}

Stack cast_by_hand(Stack arguments, Cast effect, at::ScalarType region) {
  if (effect == Cast::unchanged) return arguments;
  const at::ScalarType dtype = effect == Cast::fp32      ? at::kFloat
                               : effect == Cast::promote ? widest(arguments, region)
                                                         : region;
  for (c10::IValue& argument : arguments) {
    argument = map_tensors(argument, [&](const at::Tensor& tensor) {
      return eligible(tensor) ? tensor.to(dtype) : tensor;
    });
  }
  return arguments;
}

Outcome by_hand(const OpCase& op_case, const c10::OperatorHandle& op, const Variant& variant,
                Cast effect) {
  Stack arguments = make_arguments(op_case, op.schema(), variant);
  arguments = cast_by_hand(std::move(arguments), effect, variant.region);
  return outcome_of(std::move(arguments), [&](Stack& stack) { op.callBoxed(stack); });
}

Outcome under_standard(const OpCase& op_case, const c10::OperatorHandle& op,
                       const Variant& variant) {
  const AutocastGuard autocast(variant.device,
                               {.dtype = variant.region, .policy = Policy::standard()});
  return call_boxed(op_case, op, variant);
}

// ---- Tests --------------------------------------------------------------------------------------

TEST(Table, EffectGivesTheDocumentedEffectOfEveryRowOnCpuAndCuda) {
  const Policy policy = Policy::standard();
  int native = 0;
  for_each_case(
      [&](const CaseSection& section, const OpCase& op_case, const c10::OperatorHandle& op) {
        const std::string name = c10::toString(op.operator_name());
        for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
          const auto rule = Rule::of(section, device == at::kCPU ? "cpu" : "cuda", op);
          if (!rule) continue;
          // An op without its own rule has the effect of the ops that it calls.
          const Cast effect = rule->lookup == Cast::native ? rule->effect : rule->lookup;
          EXPECT_EQ(policy.effect(name, device), effect) << op_case.text << " on " << device;
          native += rule->lookup == Cast::native ? 1 : 0;
        }
      });
  EXPECT_GT(native, 100);
}

TEST(Table, LookupGivesTheDocumentedRuleOfEveryRowOnCpuAndCuda) {
  const Policy policy = Policy::standard();
  for_each_case(
      [&](const CaseSection& section, const OpCase& op_case, const c10::OperatorHandle& op) {
        const std::string name = c10::toString(op.operator_name());
        for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
          const auto rule = Rule::of(section, device == at::kCPU ? "cpu" : "cuda", op);
          if (!rule) continue;
          EXPECT_EQ(to_string(policy.lookup(name, device)), to_string(rule->lookup))
              << name << " on " << device << ", [" << section.title << "]: " << op_case.text;
        }
      });
}

class TableOn : public ::testing::TestWithParam<at::DeviceType> {};
INSTANTIATE_TEST_SUITE_P(Devices, TableOn, all_devices(), device_name);

TEST_P(TableOn, EveryRowGivesWhatArgumentsCastByHandGive) {
  const at::DeviceType device = GetParam();
  SKIP_WITHOUT(device);
  const CollectedWarnings of_deprecated_ops;
  std::size_t calls = 0;
  std::set<std::string> errors;
  for_each_case(
      [&](const CaseSection& section, const OpCase& op_case, const c10::OperatorHandle& op) {
        const auto rule = Rule::of(section, device == at::kCPU ? "cpu" : "cuda", op);
        if (!rule || rule->effect == Cast::native) return;
        // An op that CUDA leaves alone may call others that it does not.
        if (device != at::kCPU && rule->effect == Cast::unchanged) return;
        for (const Variant& variant : variants(op_case, device)) {
          const Outcome expected = by_hand(op_case, op, variant, rule->effect);
          // Where LibTorch has no kernel for the dtype, both calls end in the same error.
          EXPECT_EQ(difference(under_standard(op_case, op, variant), expected,
                               {.magnitudes = section.attribute("compare") == "magnitudes"}),
                    "")
              << op_case.text << "\n  " << label(op_case, variant) << ", [" << section.title << ']';
          ++calls;
          if (!expected.error.empty()) {
            errors.insert(op_case.op + " in " + python_name(variant.region) + ": " +
                          expected.message.substr(0, 70));
          }
        }
      });
  std::cout << calls << " calls; those that fail by hand and failed in the same way:\n";
  for (const std::string& error : errors) std::cout << "  " << error << '\n';
}

TEST(Table, ARowOfFp32GivesNo16BitResultAndALowerOneNoWiderResult) {
  const CollectedWarnings of_deprecated_ops;
  for_each_case(
      [&](const CaseSection& section, const OpCase& op_case, const c10::OperatorHandle& op) {
        const auto rule = Rule::of(section, "cpu", op);
        if (!rule || op_case.text.find("dtype=") != std::string::npos) return;
        for (const Variant& variant : variants(op_case, at::kCPU)) {
          const Outcome outcome = under_standard(op_case, op, variant);
          for (const c10::IValue& value : outcome.values) {
            if (!value.isTensor() || !eligible(value.toTensor())) continue;
            const at::ScalarType dtype = value.toTensor().scalar_type();
            if (rule->effect == Cast::fp32) {
              EXPECT_EQ(dtype, at::kFloat) << op_case.text << "\n  " << label(op_case, variant);
            }
            // Further results of attention are sums in fp32.
            if (rule->effect == Cast::lower_precision && &value == &outcome.values.front()) {
              EXPECT_EQ(dtype, variant.region) << op_case.text << "\n  " << label(op_case, variant);
            }
          }
        }
      });
}

TEST(Table, PyTorchsOwnCasesForCudaHoldOnACpu) {
  const CollectedWarnings of_deprecated_ops;
  std::size_t calls = 0;
  for (const CaseSection& section : read_cases(parity + "/autocast_cpu.txt")) {
    const std::string expects = section.attribute("expects");
    if (expects.empty()) continue;
    for (const OpCase& op_case : section.cases) {
      const auto op = find_op(op_case.op);
      if (!op || (op_case.op == "rms_norm" && !is_listed(*op))) continue;
      // Cast in scripts alone: see Note [Compiled code].
      if (op_case.op == "convolution" || op_case.op == "_convolution") continue;
      if (op_case.op == "addbmm") continue;  // in fp32: see Note [Sums in 16 bits]
      for (const Variant& variant : variants(op_case, at::kCPU)) {
        const at::ScalarType expected = variant.dtype(expects);
        const Outcome outcome = under_standard(op_case, *op, variant);
        if (!outcome.error.empty()) {
          // A kernel that only a GPU has.
          const Outcome plain = by_hand(op_case, *op, variant, Cast::fp32);
          EXPECT_EQ(outcome.message, plain.message) << op_case.text;
          continue;
        }
        ++calls;
        for (const c10::IValue& value : outcome.values) {
          if (!value.isTensor()) continue;  // the truth value of `equal`
          EXPECT_EQ(value.toTensor().scalar_type(), expected)
              << op_case.text << "\n  " << label(op_case, variant) << ", [" << section.title << ']';
        }
      }
    }
  }
  EXPECT_GT(calls, 200u);
}

class TableIsComplete : public ::testing::Test {
 protected:
  void expect_case(const std::string& name) {
    const auto op = find_op(name.substr(std::string_view("aten::").size()));
    if (!op || torchamp::detail::takes_named_dimensions(op->schema())) return;
    EXPECT_TRUE(cases_.contains(name)) << "cases.txt has no case for " << op->schema();
  }

  void SetUp() override {
    for_each_case([&](const CaseSection& section, const OpCase&, const c10::OperatorHandle& op) {
      if (!section.attribute("cpu").empty()) {
        cases_.insert(c10::toString(op.operator_name()));
      }
    });
  }

  std::set<std::string> cases_;
};

TEST_F(TableIsComplete, ForLibTorchsCudaLists) {
  for (const auto& row : torchamp::detail::cuda_rows) {
    for (const std::string_view name : row.family) {
      const std::string overload(torchamp::detail::overload_in(name).value());
      const std::string op =
          std::string(torchamp::detail::op_in(name)) + (overload.empty() ? "" : '.' + overload);
      EXPECT_TRUE(find_op(op)) << "the lists' macros are misread: " << op;
      expect_case("aten::" + op);
    }
  }
}

TEST_F(TableIsComplete, ForLibTorchsKernelsOfACpu) {
  for (const auto& name :
       c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::AutocastCPU)) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !torchamp::detail::has_native_kernel(*op, at::kCPU)) continue;  // torchamp's
    if (name.name.starts_with("aten::")) expect_case(c10::toString(name));
  }
}

TEST_F(TableIsComplete, ForTheFamiliesThatTheTableAddsToLibTorchs) {
  namespace detail = torchamp::detail;
  // Separate tests cover what the cases cannot express: layers, sparse matrices, random numbers,
  // and complex arguments.
  const std::set<std::string_view> elsewhere{detail::recurrent_layer.name(), detail::sparse.name(),
                                             detail::sampling.name(), detail::noisy.name()};
  for (const auto& row : detail::standard_rows) {
    if (elsewhere.contains(row.family.name())) continue;
    for (const std::string_view op : row.family) {
      if (op == "istft") continue;
      for (const auto& overload : torchamp::detail::find_ops(op, "test", /*missing_ok=*/true)) {
        if (!torchamp::detail::why_not_castable(overload.schema()).empty()) continue;
        expect_case(c10::toString(overload.operator_name()));
      }
    }
  }
}

}  // namespace
