// SPDX-License-Identifier: BSD-3-Clause
// What Python's torch.amp does with each case (tests/parity/record_autocast.py wrote it down) is
// what at::autocast and Policy::torch() do here, whether or not torchamp has registered kernels.
#include <ATen/ATen.h>
#include <ATen/Version.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/devices.h"
#include "support/op_call.h"
#include "support/op_case.h"
#include "support/raw_autocast.h"
#include "support/tolerances.h"
#include "support/unboxed_ops.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/cpu_products.h"
#include "torchamp/detail/core/policy/op_lists.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;

// ---- A result against its record ----------------------------------------------------------------

/// `size`: the mean of the results' absolute values; `weight`: how much of an element's error the
/// number can hold.
bool number_agrees(const std::string& recorded, double ours, at::ScalarType dtype, double size,
                   double weight) {
  // The record has the digits of fp32.
  const bool is_double = at::toRealValueType(dtype) == at::kDouble;
  const Tolerance t = tolerance(is_double ? at::kFloat : at::toRealValueType(dtype));
  if (t.relative == 0) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", ours);
    return recorded == text;
  }
  const double theirs = std::strtod(recorded.c_str(), nullptr);
  if (!std::isfinite(theirs)) return std::isnan(theirs) ? std::isnan(ours) : ours == theirs;
  return std::abs(theirs - ours) <= weight * (t.absolute + t.relative * size);
}

/// `recorded`: "float32[2, 3] mean mean-of-absolutes weighted-mean". `rounding`: of the values, if
/// not their dtype's.
bool value_agrees(const std::string& recorded, const c10::IValue& value, bool magnitudes,
                  std::optional<at::ScalarType> rounding) {
  if (value.isNone()) return recorded == "none";
  if (value.isBool()) return recorded == (value.toBool() ? "value True" : "value False");
  if (value.isInt()) return recorded == "value " + std::to_string(value.toInt());
  if (!value.isTensor()) return false;
  const at::ScalarType dtype = value.toTensor().scalar_type();
  if (is_scratch(dtype)) return recorded == python_name(dtype);
  const std::string kind = describe(value);
  if (!recorded.starts_with(kind)) return false;
  const at::Tensor flat = comparable(value.toTensor(), magnitudes).flatten();
  std::istringstream rest(recorded.substr(kind.size()));
  std::string mean, absolute, weighted;
  rest >> mean >> absolute >> weighted;
  if (flat.numel() == 0) return mean.empty();
  const at::Tensor weights = at::arange(flat.numel()).remainder(5) - 2;
  const double size = flat.abs().mean().item<double>();
  const at::ScalarType of = c10::isIntegralType(dtype, true) ? dtype : rounding.value_or(dtype);
  return number_agrees(mean, flat.mean().item<double>(), of, size, 1) &&
         number_agrees(absolute, size, of, size, 1) &&
         number_agrees(weighted, (flat * weights).mean().item<double>(), of, size, 2);
}

bool outcome_agrees(const std::string& recorded, const Outcome& outcome, bool magnitudes,
                    std::optional<at::ScalarType> rounding = std::nullopt) {
  if (!outcome.error.empty()) return recorded == "error " + outcome.error;
  std::size_t at = 0;
  for (const c10::IValue& value : outcome.values) {
    const std::size_t end = std::min(recorded.find(" | ", at), recorded.size());
    if (at > end || !value_agrees(recorded.substr(at, end - at), value, magnitudes, rounding))
      return false;
    at = end + 3;
  }
  return at == recorded.size() + 3;
}

/// The facts that decide which kernels exist, as the script writes them; empty if they are unknown.
std::string machine(at::DeviceType device) {
  if (device != at::kCPU) return {};
  std::string text = at::get_cpu_capability();
  for (const std::string unit : {"bf16", "fp16"}) {
    Stack stack;
    const auto op =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_" + unit + "_supported", ""});
    if (op) op->callBoxed(stack);
    if (op && stack.back().toBool()) text += "+" + unit;
  }
  return text;
}

// ---- The replay ---------------------------------------------------------------------------------

/// A case in one variant, with the op of the running LibTorch.
struct Call {
  const CaseSection& section;
  const OpCase& op_case;
  c10::OperatorHandle op;
  Variant variant;

  std::string text() const { return op_case.text + "\n  " + label(op_case, variant); }
  const std::string& recorded() const { return op_case.results.at(label(op_case, variant)); }
  bool magnitudes() const { return section.attribute("compare") == "magnitudes"; }
  /// Whether this LibTorch version was recorded.
  bool same_version() const { return section.attribute("torch") == TORCH_VERSION; }
};

using MakeCall = Outcome (*)(const Call&);

Outcome boxed(const Call& call) {
  return call_boxed(call.op_case, call.op, call.variant);
}

Outcome unboxed(const Call& call) {
  const c10::KernelFunction& kernel = unboxed_ops().at(call.op_case.op);
  return outcome_of(make_arguments(call.op_case, call.op.schema(), call.variant),
                    [&](Stack& stack) { kernel.callBoxed(call.op, {}, &stack); });
}

Outcome under_autocast(const Call& call, MakeCall make_call) {
  const RawAutocast region(call.variant.device, call.variant.region);
  return make_call(call);
}

Outcome under(const Policy& policy, const Call& call, MakeCall make_call) {
  const AutocastGuard region(call.variant.device, {.dtype = call.variant.region, .policy = policy});
  return make_call(call);
}

std::size_t count_kernels(at::DeviceType device) {
  const std::size_t index = torchamp::detail::device_index(device, "test");
  return torchamp::detail::shared_runtime().kernels[index].size();
}

/// The record of a device, and what its calls give here before torchamp has registered kernels.
class Replay {
 public:
  static std::string file(at::DeviceType device) {
    return TORCHAMP_TEST_PARITY_DIR "/autocast_" + c10::DeviceTypeName(device, true) + ".txt";
  }
  /// What no GPU has shown yet.
  static std::string stand_in_file(at::DeviceType device) {
    return TORCHAMP_TEST_PARITY_DIR "/autocast_" + c10::DeviceTypeName(device, true) +
           "_stand_in.txt";
  }

  /// A device's records. Each section has what its file's first line says: torch and machine.
  static std::vector<CaseSection> records(at::DeviceType device) {
    std::vector<CaseSection> all;
    for (const std::string& path : {file(device), stand_in_file(device)}) {
      if (!std::filesystem::exists(path)) continue;
      std::vector<CaseSection> of_file = read_cases(path);
      const std::map<std::string, std::string> heading = of_file.front().attributes;
      for (CaseSection& section : of_file) {
        section.attributes.insert(heading.begin(), heading.end());
      }
      all.insert(all.end(), of_file.begin(), of_file.end());
    }
    return all;
  }

  explicit Replay(at::DeviceType device) : device_(device), sections_(records(device)) {
    torchamp::set_cpu_products(torchamp::CpuProducts::libtorch);  // fp32 ones round otherwise
    EXPECT_EQ(count_kernels(device), 0u) << "kernels of torchamp were there before the test began";
    const at::DispatchKey key = torchamp::detail::autocast_key(device);
    for (const CaseSection& section : sections_) {
      for (const OpCase& op_case : section.cases) {
        const auto op = find_op(op_case.op);
        if (!op) {
          missing_.insert(op_case.op);
        } else if (op->hasKernelForDispatchKey(key) != op_case.results.contains("kernel")) {
          moved_.insert({op_case.op, section.attribute("torch")});
        } else {
          for (const Variant& variant : variants(op_case, device)) {
            calls_.push_back({section, op_case, *op, variant});
          }
        }
      }
    }
    for (const Call& call : calls_) raw_.push_back(under_autocast(call, boxed));
    for (const Call& call : calls_) torch_.push_back(under(Policy::torch(), call, boxed));
    std::size_t of_writes = 0;
    for (const std::string_view name : torchamp::detail::weight_writing_ops) {
      of_writes += torchamp::detail::find_ops(name, "test", /*missing_ok=*/true).size();
    }
    EXPECT_EQ(count_kernels(device), 2 + of_writes)
        << "Policy::torch() needs none but TorchScript's two, and kernels of ops that write "
           "weights";
  }

  const std::vector<Call>& calls() const { return calls_; }
  const std::vector<Outcome>& raw() const { return raw_; }
  const std::vector<Outcome>& torch() const { return torch_; }

  /// Whether a call was recorded on a machine with the same units.
  bool same_machine(const Call& call) const {
    return machine(device_).empty() || call.section.attribute("machine") == machine(device_);
  }

  void print_what_is_left_out() const {
    for (const std::string& op : missing_) {
      std::cout << "skipped: " << op << ": LibTorch " << TORCH_VERSION << " lacks it\n";
    }
    for (const auto& [op, torch] : moved_) {
      std::cout << "skipped: " << op << ": autocast has a kernel for it in LibTorch " << torch
                << " or " << TORCH_VERSION << ", but not in both\n";
    }
  }

  /// Registers kernels of all ops of the cases that can have one, and the kernels of
  /// Policy::standard().
  void register_kernels() {
    if (installed_) return;
    std::set<std::string> ops;
    for (const Call& call : calls_) {
      if (torchamp::detail::why_not_castable(call.op.schema()).empty()) {
        ops.insert(c10::toString(call.op.operator_name()));
      }
    }
    { const AutocastGuard standard(device_, {.policy = Policy::standard()}); }
    // No rule of LibTorch's agrees with both.
    { const AutocastGuard moved(device_, {.policy = Policy::torch().fp32(ops)}); }
    { const AutocastGuard moved(device_, {.policy = Policy::torch().lower_precision(ops)}); }
    EXPECT_GE(count_kernels(device_), ops.size());
    EXPECT_GT(ops.size(), 300u);
    installed_ = true;
  }

 private:
  at::DeviceType device_;
  std::vector<CaseSection> sections_;
  std::vector<Call> calls_;
  std::set<std::string> missing_;
  std::map<std::string, std::string> moved_;  // op, and the version of its record
  std::vector<Outcome> raw_, torch_;
  bool installed_ = false;
};

class Parity : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
    if (!std::filesystem::exists(Replay::file(GetParam()))) {
      GTEST_SKIP() << "there is no record of torch.amp on " << GetParam()
                   << "; tests/parity/record_autocast.py writes it";
    }
    auto& found = replays_[GetParam()];
    if (!found) found = std::make_unique<Replay>(GetParam());
    replay_ = found.get();
  }
  static void TearDownTestSuite() { replays_.clear(); }

  void TearDown() override {
    EXPECT_THAT(warnings_.text(), ::testing::Not(::testing::HasSubstr("verrid")))
        << "LibTorch told the user of a kernel";
  }

  Replay& replay() { return *replay_; }

  /// Bit for bit, except where LibTorch itself differs from call to call: in LAPACK with where in
  /// memory its arguments lie, on a GPU in the order of sums.
  static Closeness closeness(const Call& call) {
    return {.exact = call.variant.device == at::kCPU && !call.magnitudes(),
            .magnitudes = call.magnitudes()};
  }

  /// Expects from `outcome(call)` what at::autocast gave when torchamp had no kernels.
  template <class MakeOutcome>
  void expect_as_at_first(MakeOutcome outcome, bool only_unboxed = false) {
    for (std::size_t i = 0; i < replay().calls().size(); ++i) {
      const Call& call = replay().calls()[i];
      if (only_unboxed && !unboxed_ops().contains(call.op_case.op)) continue;
      EXPECT_EQ(difference(outcome(call), replay().raw()[i], closeness(call)), "") << call.text();
    }
  }

 private:
  static inline std::map<at::DeviceType, std::unique_ptr<Replay>> replays_;
  Replay* replay_ = nullptr;
  CollectedWarnings warnings_;  // of deprecated ops
};

INSTANTIATE_TEST_SUITE_P(Devices, Parity, all_devices(), device_name);

TEST_P(Parity, AutocastGivesWhatPythonRecorded) {
  replay().print_what_is_left_out();
  for (std::size_t i = 0; i < replay().calls().size(); ++i) {
    const Call& call = replay().calls()[i];
    const Outcome& outcome = replay().raw()[i];
    const bool both_fail = !outcome.error.empty() && call.recorded().starts_with("error");
    const bool one_fails = !outcome.error.empty() != call.recorded().starts_with("error");
    if (one_fails && !(replay().same_machine(call) && call.same_version())) {
      // Which kernels exist for a 16-bit dtype depends on the machine and the version.
      std::cout << "skipped: " << call.text() << ": LibTorch " << call.section.attribute("torch")
                << " on " << call.section.attribute("machine") << ": " << call.recorded()
                << "; here " << describe(outcome) << '\n';
      continue;
    }
    if (both_fail && !call.same_version()) continue;  // the error's class may change
    // tests/cuda_on_host computes it by the CPU's kernel, which rounds a 16-bit sum at each step.
    if (call.op_case.op == "trace" && !call.same_version()) continue;
    // A GPU rounds within ops in other places than tests/cuda_on_host, which is another version.
    std::optional<at::ScalarType> rounding;
    if (GetParam() == at::kCUDA && !call.same_version()) rounding = call.variant.region;
    EXPECT_TRUE(outcome_agrees(call.recorded(), outcome, call.magnitudes(), rounding))
        << call.text() << ": " << call.recorded() << "\n  here: " << describe(outcome);
  }
}

TEST_P(Parity, TheComparisonSeesWhatAnotherPolicyDoes) {
  std::set<std::string> differing;
  for (std::size_t i = 0; i < replay().calls().size(); ++i) {
    const Call& call = replay().calls()[i];
    const Outcome outcome = under(Policy::standard(), call, boxed);
    if (!outcome_agrees(call.recorded(), outcome, call.magnitudes())) {
      differing.insert(call.op_case.op);
    }
  }
  EXPECT_THAT(differing, ::testing::IsSupersetOf({"add.Tensor", "sub.Scalar", "mean", "std.dim"}));
  EXPECT_THAT(differing, ::testing::Not(::testing::Contains(::testing::AnyOf("mm", "relu"))));
}

TEST_P(Parity, TheRecordHasEveryCaseOfTheTable) {
  std::set<std::string> cases, ops;
  for (const CaseSection& section : Replay::records(GetParam())) {
    for (const OpCase& op_case : section.cases) {
      cases.insert(op_case.text);
      ops.insert(op_case.op);
    }
  }
  for (const CaseSection& section : read_cases(TORCHAMP_TEST_PARITY_DIR "/cases.txt")) {
    for (const OpCase& op_case : section.cases) {
      // An op that the record does not have at all was missing from its LibTorch.
      EXPECT_TRUE(cases.contains(op_case.text) || !ops.contains(op_case.op))
          << op_case.text << "\n  Run tests/parity/record_autocast.py.";
    }
  }
}

TEST_P(Parity, PolicyTorchGivesTheSameWithoutTorchampsKernels) {
  for (std::size_t i = 0; i < replay().calls().size(); ++i) {
    const Call& call = replay().calls()[i];
    EXPECT_EQ(difference(replay().torch()[i], replay().raw()[i], closeness(call)), "")
        << call.text();
  }
}

TEST_P(Parity, PolicyTorchGivesTheSameWithTorchampsKernelsOnEveryOp) {
  replay().register_kernels();
  expect_as_at_first([](const Call& call) { return under(Policy::torch(), call, boxed); });
}

TEST_P(Parity, PolicyTorchGivesTheSameInsideARegionOfAnotherPolicy) {
  replay().register_kernels();
  expect_as_at_first([](const Call& call) {
    const AutocastGuard outer(call.variant.device, {.policy = Policy::standard()});
    return under(Policy::torch(), call, boxed);
  });
}

TEST_P(Parity, AutocastWithoutTorchampGivesTheSameWithTorchampsKernelsOnEveryOp) {
  replay().register_kernels();
  expect_as_at_first([](const Call& call) { return under_autocast(call, boxed); });
}

TEST_P(Parity, DirectCallsGiveTheSameWithTorchampsKernelsOnEveryOp) {
  replay().register_kernels();
  const bool only_unboxed = true;
  expect_as_at_first([](const Call& call) { return under_autocast(call, unboxed); }, only_unboxed);
  expect_as_at_first([](const Call& call) { return under(Policy::torch(), call, unboxed); },
                     only_unboxed);
}

TEST_P(Parity, DirectCallsFollowAPolicyAsOthersDo) {
  for (const Call& call : replay().calls()) {
    if (!unboxed_ops().contains(call.op_case.op)) continue;
    EXPECT_EQ(difference(under(Policy::standard(), call, unboxed),
                         under(Policy::standard(), call, boxed), closeness(call)),
              "")
        << call.text();
  }
}

}  // namespace
