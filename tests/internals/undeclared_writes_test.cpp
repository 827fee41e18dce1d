// SPDX-License-Identifier: BSD-3-Clause
// Ops that write to arguments which their schemas do not mark: they are looked for in every schema
// of the running LibTorch and by calls, and none of them may lose what it writes to a cast.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/op_call.h"
#include "support/op_case.h"
#include "support/warnings.h"
#include "torchamp/autocast.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/ops.h"

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;
using torchamp::detail::holds_tensors;
using torchamp::detail::is_running_statistic;
using torchamp::detail::why_not_castable;
namespace ops = torchamp::ops;

bool writes_as_declared(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Calls `function(op)` for every op of LibTorch that a policy may cast.
template <class Function>
void for_each_castable_op(Function function) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (op && why_not_castable(op->schema()).empty()) function(*op);
  }
}

// ---- By the arguments' names --------------------------------------------------------------------

/// Whether the name speaks of something that an op may keep up to date.
bool sounds_like_state(const std::string& name) {
  for (const char* const word : {"running", "moving", "stat", "dst", "noise", "cache", "buf",
                                 "exp_avg", "momentum", "accum", "observer", "found_inf"}) {
    if (name.find(word) != std::string::npos) return true;
  }
  return false;
}

/// Those that only read such an argument, by their documentation or code.
bool is_known_to_read(const std::string& op, const std::string& argument) {
  static const std::set<std::string> readers{
      "_cudnn_rnn(dropout_state)",      "_cudnn_rnn(weight_buf)",
      "miopen_rnn(dropout_state)",      "miopen_rnn(weight_buf)",
      "_sobol_engine_draw(sobolstate)", "one_shot_all_reduce_copy(symm_buffer)"};
  if (op.find("backward") != std::string::npos) return true;
  if (op.ends_with("_functional") || readers.contains(op + '(' + argument + ')')) return true;
  // The forms of an optimizer's and of the scaler's ops that return new tensors.
  return op.starts_with("_fused_") || op.starts_with("_amp_") || op.starts_with("_foreach_");
}

TEST(UndeclaredWrites, NoOpHasAStateLikeArgumentThatNobodyHasLookedAt) {
  std::set<std::string> statistics;
  for_each_castable_op([&](const c10::OperatorHandle& op) {
    const std::string name = op.operator_name().name.substr(op.operator_name().name.find("::") + 2);
    for (const auto& argument : op.schema().arguments()) {
      if (!holds_tensors(*argument.type())) continue;
      if (is_running_statistic(argument)) {
        statistics.insert(name);
      } else if (sounds_like_state(argument.name())) {
        EXPECT_TRUE(is_known_to_read(name, argument.name()))
            << "does it write to '" << argument.name() << "'? " << op.schema();
      }
    }
  });
  EXPECT_THAT(statistics,
              ::testing::IsSupersetOf({"batch_norm", "native_batch_norm", "instance_norm",
                                       "cudnn_batch_norm", "batch_norm_update_stats"}));
}

TEST(UndeclaredWrites, NothingInPlaceAndNothingWithoutAResultCanBeCast) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::size_t in_place = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    const bool by_name = name.name.ends_with('_') && !name.name.ends_with("__");
    if (!by_name && !op->schema().returns().empty()) continue;
    in_place += by_name ? 1 : 0;
    EXPECT_NE(why_not_castable(op->schema()), "") << op->schema();
  }
  EXPECT_GT(in_place, 300u);
}

// ---- By calls -----------------------------------------------------------------------------------

/// The bytes of the tensors that an argument holds.
std::vector<std::string> bytes_of(const c10::IValue& value) {
  std::vector<std::string> all;
  torchamp::detail::for_each_tensor_of(value, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != at::kStrided) return;
    const at::Tensor flat = tensor.detach().contiguous();
    all.emplace_back(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  });
  return all;
}

/// The arguments that a call outside of autocast writes to, of those that its schema does not mark.
/// Empty, too, if LibTorch cannot make the call.
std::set<std::string> undeclared_writes(const c10::OperatorHandle& op, const Stack& arguments) {
  std::vector<std::vector<std::string>> before;
  for (const c10::IValue& value : arguments) before.push_back(bytes_of(value));
  Stack stack = arguments;
  try {
    op.callBoxed(stack);
  } catch (const std::exception&) {
    return {};
  }
  std::set<std::string> written;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = op.schema().arguments()[i];
    if (!writes_as_declared(argument) && bytes_of(arguments[i]) != before[i]) {
      written.insert(argument.name());
    }
  }
  return written;
}

TEST(UndeclaredWrites, NoCaseOfTheTableWritesToMoreThanItsRunningStatistics) {
  const CollectedWarnings of_deprecated_ops;
  std::size_t calls = 0;
  for (const CaseSection& section : read_cases(TORCHAMP_TEST_PARITY_DIR "/cases.txt")) {
    for (const OpCase& op_case : section.cases) {
      const auto op = find_op(op_case.op);
      if (!op || !why_not_castable(op->schema()).empty()) continue;
      for (const Variant& variant : variants(op_case, at::kCPU)) {
        const Stack arguments = make_arguments(op_case, op->schema(), variant);
        EXPECT_THAT(undeclared_writes(*op, arguments), ::testing::IsEmpty()) << op_case.text;
        ++calls;
      }
    }
  }
  EXPECT_GT(calls, 1000u);
}

/// Arguments by name and type for the ops with running statistics, with 3 channels.
std::optional<Stack> arguments_of_a_norm(const c10::FunctionSchema& schema) {
  Stack stack;
  for (const auto& argument : schema.arguments()) {
    const std::string& name = argument.name();
    if (holds_tensors(*argument.type())) {
      if (argument.real_type()->kind() == c10::TypeKind::ListType) return std::nullopt;
      const bool is_input = name == "input" || name == "self";
      const std::vector<std::int64_t> shape =
          is_input ? std::vector<std::int64_t>{4, 3, 5} : std::vector<std::int64_t>{3};
      stack.emplace_back(name == "counts" ? at::ones({1}) : at::rand(shape) + 1);
    } else if (argument.real_type()->kind() == c10::TypeKind::BoolType) {
      stack.emplace_back(name == "training" || name == "use_input_stats");
    } else if (argument.real_type()->kind() == c10::TypeKind::FloatType) {
      stack.emplace_back(0.1);
    } else if (argument.real_type()->kind() == c10::TypeKind::IntType) {
      stack.emplace_back(20);
    } else {
      return std::nullopt;
    }
  }
  return stack;
}

TEST(UndeclaredWrites, OpsWithRunningStatisticsWriteOnlyTheStatistics) {
  const CollectedWarnings of_deprecated_ops;
  const c10::InferenceMode without_autograd;
  std::set<std::string> writers;
  for_each_castable_op([&](const c10::OperatorHandle& op) {
    bool has_statistics = false;
    for (const auto& argument : op.schema().arguments()) {
      has_statistics = has_statistics || is_running_statistic(argument);
    }
    if (!has_statistics) return;
    const auto arguments = arguments_of_a_norm(op.schema());
    if (!arguments) return;
    const auto written = undeclared_writes(op, *arguments);
    for (const std::string& argument : written) {
      EXPECT_TRUE(argument.starts_with("running_")) << argument << ": " << op.schema();
    }
    if (!written.empty()) writers.insert(c10::toString(op.operator_name()));
  });
  EXPECT_THAT(writers,
              ::testing::IsSupersetOf({"aten::batch_norm", "aten::native_batch_norm",
                                       "aten::instance_norm", "aten::batch_norm_update_stats"}));
}

// ---- Under a policy -----------------------------------------------------------------------------

/// The statistics of a norm after a call in training, and its result in evaluation.
struct NormRun {
  at::Tensor mean, var, trained, evaluated;
  std::int64_t writes_in_evaluation = 0;  // to the mean; some before LibTorch 2.11, of what it is
};

// LibTorch's instance_norm narrows the statistics of a 16-bit input itself if it has no weight.
TEST(UndeclaredWrites, StatisticsOfALoweredInstanceNormGoThroughNo16Bits) {
  for (const bool affine : {false, true}) {
    const auto weight = affine ? at::ones({3}) : at::Tensor();
    const auto bias = affine ? at::zeros({3}) : at::Tensor();
    const auto mean = at::zeros({3}), var = at::ones({3});
    const auto exact_mean = at::zeros({3}), exact_var = at::ones({3});
    const auto x = (at::arange(240, at::kFloat).sin() * 2 + 3).view({4, 3, 20}).to(at::kBFloat16);
    for (int i = 0; i < 200; ++i) {
      at::instance_norm(x.to(at::kFloat), weight, bias, exact_mean, exact_var, true, 0.01, 1e-5,
                        false);
      const AutocastGuard guard(at::kCPU,
                                {.dtype = at::kBFloat16,
                                 .policy = Policy::standard().lower_precision({"instance_norm"})});
      const auto y =
          at::instance_norm(x.to(at::kFloat), weight, bias, mean, var, true, 0.01, 1e-5, false);
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    }
    EXPECT_TRUE(at::allclose(mean, exact_mean, 1e-5)) << mean << exact_mean << affine;
    EXPECT_TRUE(at::allclose(var, exact_var, 1e-5)) << var << exact_var << affine;
  }
}

enum class Norm { batch, instance };

NormRun run(Norm norm, at::ScalarType model, const std::optional<Policy>& policy) {
  const auto x = (at::arange(60, at::kFloat).sin() * 2 + 3).view({4, 3, 5}).to(model);
  const auto weight = at::full({3}, 1.5).to(model), bias = at::full({3}, 0.25).to(model);
  NormRun result{at::zeros({3}).to(model), at::ones({3}).to(model), {}, {}, 0};
  std::optional<AutocastGuard> guard;
  if (policy) guard.emplace(at::kCPU, torchamp::AutocastOptions{.policy = policy});
  const auto call = [&](bool training) {
    return norm == Norm::batch ? at::batch_norm(x, weight, bias, result.mean, result.var, training,
                                                0.1, 1e-5, false)
                               : at::instance_norm(x, weight, bias, result.mean, result.var,
                                                   training, 0.1, 1e-5, false);
  };
  result.trained = call(true);
  call(true);
  const at::Tensor mean = result.mean.clone(), var = result.var.clone();
  const auto version = result.mean._version();
  result.evaluated = call(false);
  EXPECT_TRUE(at::equal(result.mean, mean) && at::equal(result.var, var)) << "in evaluation";
  result.writes_in_evaluation = result.mean._version() - version;
  return result;
}

TEST(UndeclaredWrites, RunningStatisticsAreUpdatedUnderEveryRule) {
  const Policy lower = Policy::standard().lower_precision(ops::norm);
  const Policy fp32 = Policy::standard().fp32(ops::norm);
  const Policy promote = Policy::standard().promote(ops::norm);
  const Policy by_name = Policy::torch().lower_precision({"instance_norm", "native_batch_norm"});
  for (const Norm norm : {Norm::batch, Norm::instance}) {
    for (const auto& [title, model, policy, trained] :
         {std::tuple{"lower", at::kFloat, lower, at::kBFloat16},
          std::tuple{"fp32", at::kBFloat16, fp32, at::kFloat},
          std::tuple{"fp32 of fp32", at::kFloat, fp32, at::kFloat},
          std::tuple{"lower of bf16", at::kBFloat16, lower, at::kBFloat16},
          std::tuple{"lower of fp16", at::kHalf, lower, at::kBFloat16},
          std::tuple{"promote", at::kBFloat16, promote, at::kBFloat16},
          std::tuple{"by name", at::kFloat, by_name, at::kBFloat16}}) {
      SCOPED_TRACE(std::string(title) + (norm == Norm::batch ? ", batch" : ", instance"));
      const NormRun expected = run(norm, at::kFloat, std::nullopt);
      const NormRun ours = run(norm, model, policy);
      EXPECT_EQ(ours.trained.scalar_type(), trained);
      EXPECT_EQ(ours.mean.scalar_type(), model) << "the model's tensor itself";
      EXPECT_LE(ours.writes_in_evaluation, expected.writes_in_evaluation);
      if (TORCH_VERSION_MINOR >= 11) {
        EXPECT_EQ(expected.writes_in_evaluation, 0);
      }
      const double tolerance = 0.02;
      for (const auto& [got, wanted] :
           {std::pair{ours.mean, expected.mean}, std::pair{ours.var, expected.var},
            std::pair{ours.trained, expected.trained},
            std::pair{ours.evaluated, expected.evaluated}}) {
        EXPECT_TRUE(at::allclose(got.to(at::kFloat), wanted, tolerance, tolerance))
            << got << "\nand not\n"
            << wanted;
      }
    }
  }
}

TEST(UndeclaredWrites, StatisticsInFp32AreNeverRounded) {
  // Of bf16 statistics, an update of 0.1 % of the value would be lost.
  at::Tensor mean = at::full({3}, 1.001f), var = at::full({3}, 1.001f);
  const at::Tensor x = at::ones({4, 3, 5}) + at::arange(4, at::kFloat).view({4, 1, 1}) * 0.25;
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().lower_precision(ops::norm)});
  for (int i = 0; i < 10; ++i) at::batch_norm(x, {}, {}, mean, var, true, 1e-3, 1e-5, false);
  const double kept = std::pow(1 - 1e-3, 10);
  EXPECT_TRUE(at::allclose(mean, at::full({3}, 1.001 * kept + 1.375 * (1 - kept)), 1e-6, 0))
      << mean;
}

TEST(UndeclaredWrites, ANormWithoutStatisticsFollowsItsWeightAsWell) {
  const at::Tensor x = at::rand({4, 3, 5}), weight = at::ones({3});
  const auto dtype_of = [&](const Policy& policy, at::ScalarType input) {
    const AutocastGuard guard(at::kCPU, {.policy = policy});
    return at::batch_norm(x.to(input), weight, {}, {}, {}, true, 0.1, 1e-5, false).scalar_type();
  };
  EXPECT_EQ(dtype_of(Policy::standard().promote(ops::norm), at::kBFloat16), at::kFloat);
  EXPECT_EQ(dtype_of(Policy::standard().lower_precision(ops::norm), at::kFloat), at::kBFloat16);
}

TEST(UndeclaredWrites, AFailedCallLeavesTheStatisticsUnchanged) {
  const at::Tensor mean = at::zeros({3}, at::kBFloat16), var = at::ones({3}, at::kBFloat16);
  const AutocastGuard guard(at::kCPU, {.policy = Policy::standard().fp32(ops::norm)});
  const std::pair versions{mean._version(), var._version()};
  const at::Tensor wrong = at::ones({4, 5, 5}, at::kBFloat16);
  EXPECT_ANY_THROW(at::batch_norm(wrong, {}, {}, mean, var, true, 0.1, 1e-5, false));
  EXPECT_EQ(mean._version(), versions.first);
  EXPECT_EQ(var._version(), versions.second);
}

TEST(UndeclaredWrites, GradientsFlowThroughANormWhoseStatisticsAreCopiedBack) {
  const at::Tensor x = (at::arange(60, at::kFloat).sin()).view({4, 3, 5});
  const auto gradient = [&](at::ScalarType model, const std::optional<Policy>& policy) {
    const at::Tensor input = x.clone().to(model).detach().requires_grad_();
    const at::Tensor weight = at::full({3}, 1.5).to(model).detach().requires_grad_();
    at::Tensor mean = at::zeros({3}).to(model), var = at::ones({3}).to(model);
    at::Tensor loss;
    {
      std::optional<AutocastGuard> guard;
      if (policy) guard.emplace(at::kCPU, torchamp::AutocastOptions{.policy = policy});
      for (int i = 0; i < 2; ++i) {
        const at::Tensor y = at::batch_norm(input, weight, {}, mean, var, true, 0.1, 1e-5, false);
        loss = loss.defined() ? loss + (y * x).sum() : (y * x).sum();
      }
    }
    loss.backward();
    return at::cat({input.grad().flatten().to(at::kFloat), weight.grad().to(at::kFloat)});
  };
  const at::Tensor expected = gradient(at::kFloat, std::nullopt);
  EXPECT_TRUE(at::allclose(gradient(at::kBFloat16, Policy::standard().fp32(ops::norm)), expected,
                           0.02, 0.05));
  EXPECT_TRUE(at::allclose(gradient(at::kFloat, Policy::standard().lower_precision(ops::norm)),
                           expected, 0.03, 0.2));
}

}  // namespace
