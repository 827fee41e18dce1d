// SPDX-License-Identifier: BSD-3-Clause
// Which ops an audit finds harmful, what it chooses, and that it changes nothing.
#include <torchamp/labs/precision_audit.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/recompute.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <locale>
#include <sstream>
#include <string>
#include <vector>

#include "support/audited_net.h"
#include "support/devices.h"
#include "support/expect_error.h"
#include "support/locales.h"
#include "support/temporary_folder.h"

using ::testing::HasSubstr;
using ::testing::Not;
using torchamp::AuditedPolicy;
using torchamp::AuditRow;
using torchamp::AutocastGuard;
using torchamp::Policy;
using torchamp::PrecisionAudit;

namespace {

namespace nn = torch::nn;

/// Times that make lowering worth it everywhere, and casts nothing.
void write_times(const PrecisionAudit& audit, const std::string& path) {
  std::istringstream lines(audit.to_csv());
  std::ofstream out(path);
  std::string line;
  std::getline(lines, line);
  out << line << '\n';
  for (const AuditRow& row : audit.rows()) {
    out << row.module << ',' << row.op << ",0,0,0,0,0,0,0,0,0,10,5,0.01,\n";
  }
}

/// Gives `audit` such times.
void take_times(PrecisionAudit& audit) {
  const TemporaryFolder folder;
  write_times(audit, folder / "times.csv");
  audit.read_times(folder / "times.csv");
}

const AuditRow* row_of(const PrecisionAudit& audit, const std::string& op,
                       const std::string& module) {
  for (const AuditRow& row : audit.rows()) {
    if (row.op == op && row.module == module) return &row;
  }
  return nullptr;
}

bool is_lowered(const AuditedPolicy& audited, const std::string& op) {
  for (const auto& decision : audited.decisions) {
    if (decision.op == op && decision.lowered) return true;
  }
  return false;
}

/// Angles as rotary embeddings compute them, from positions up to 2000.
at::Tensor angles(const at::Tensor& like) {
  const at::Tensor positions = at::arange(like.size(0), like.options()) * 64;
  const at::Tensor frequencies = at::linspace(0.1, 1, like.size(1), like.options());
  return at::mm(positions.unsqueeze(1), frequencies.unsqueeze(0));
}

}  // namespace

class PrecisionAuditOn : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override { SKIP_WITHOUT(GetParam()); }
};

TEST_P(PrecisionAuditOn, HasARowForEachOpAndModule) {
  Net model = net(nullptr, GetParam());
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step_of(model), 2);
  const AuditRow* const first = row_of(audit, "addmm", "first");
  const AuditRow* const last = row_of(audit, "addmm", "last");
  ASSERT_NE(first, nullptr);
  ASSERT_NE(last, nullptr);
  EXPECT_EQ(first->calls, 1);
  EXPECT_EQ(first->elements, 32 * 16);
  EXPECT_GT(first->error, 0.);
  EXPECT_GT(first->fp32_us, 0.);
  EXPECT_GT(first->low_us, 0.);
  EXPECT_GT(first->cast_us, 0.);
  EXPECT_LT(first->gradient_loss, 1e-4);
  EXPECT_NE(row_of(audit, "tanh", ""), nullptr);
  double error = 0.;
  for (const AuditRow& row : audit.rows()) error += row.error;
  EXPECT_DOUBLE_EQ(audit.total().error, error);
}

// They depend on no parameter, so they have no gradient in the step.
TEST_P(PrecisionAuditOn, MeasuresByTheLossWhatDependsOnNoParameter) {
  at::Tensor kept;
  Net model = net(
      [&](const at::Tensor& y) {
        kept = angles(y.detach());
        return y * kept.cos();
      },
      GetParam());
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step_of(model), 1);
  const AuditRow* const row = row_of(audit, "mm", "");
  ASSERT_NE(row, nullptr);
  EXPECT_EQ(row, &audit.rows().front()) << audit;
  EXPECT_GT(row->error, 100 * row_of(audit, "addmm", "last")->error) << audit;
  EXPECT_FALSE(kept.requires_grad()) << "the program's tensor is as it was";
  take_times(audit);
  const AuditedPolicy chosen = audit.policy();
  EXPECT_GT(chosen.torch_error, torchamp::AuditBudget::most_by_default) << chosen;
  EXPECT_EQ(chosen.budget, torchamp::AuditBudget::most_by_default);
  EXPECT_FALSE(is_lowered(chosen, "mm")) << chosen;
  EXPECT_TRUE(is_lowered(chosen, "addmm")) << chosen;
}

TEST(PrecisionAudit, RunsIfAnOpHasNoDerivativeForAResultWithoutParameters) {
  Net model = net();
  const at::Tensor x = torch::randn({8, 8}), classes = torch::randint(0, 4, {8}, torch::kLong);
  const at::Tensor square = torch::full({4, 4}, 0.5);
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(
      [&] {
        const at::Tensor weights = at::mm(square, square)[0];
        at::nll_loss(at::log_softmax(model(x), 1), classes, weights).backward();
      },
      1);
  EXPECT_EQ(row_of(audit, "mm", "")->error, 0.);
}

// Policy::torch(), with which the audit compares, throws if a CPU has no LSTM in bf16.
TEST(PrecisionAudit, ChoosesForAnLstmOnEveryCpu) {
  torch::manual_seed(0);
  nn::LSTM model(4, 3);
  const auto x = torch::randn({3, 2, 4});
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run([&] { std::get<0>(model(x)).sum().backward(); }, 1);
  ASSERT_NE(row_of(audit, "lstm.input", ""), nullptr);
  const AuditedPolicy audited = audit.policy({.error_budget = 1.});
  EXPECT_TRUE(std::isfinite(audited.error));
  EXPECT_TRUE(std::isfinite(audited.us));
  const bool lacking = Policy::standard().effect("lstm", at::kCPU) == torchamp::Cast::fp32;
  EXPECT_EQ(std::isinf(audited.torch_error), lacking);
  EXPECT_EQ(std::isinf(audited.torch_us), lacking);
}

TEST(PrecisionAudit, PrintsWhatItsColumnsMeanAndThatNothingHasRun) {
  Net model = net();
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  const auto printed = [&] {
    std::ostringstream out;
    out << audit;
    return out.str();
  };
  EXPECT_EQ(printed(), "PrecisionAudit: nothing has been measured. Call run(step) first.\n");
  audit.run(step_of(model), 1);
  const std::string table = printed(), head = table.substr(0, table.find('\n'));
  const std::string row = table.substr(head.size() + 1, table.find('\n', head.size() + 1));
  EXPECT_EQ(head.find("  op in module"), row.find("  " + audit.rows()[0].op)) << table;
  for (const char* const column : {"error", "grad lost", "underflow", "overflow", "vanished",
                                   "smallest", "largest", "us fp32", "us 16 bit", "us casts"}) {
    const std::size_t at = head.find(column);
    ASSERT_NE(at, std::string::npos) << column;
    EXPECT_NE(table.find(column, table.find("total of")), std::string::npos) << column;
    // A number ends at the end of its column's name.
    const std::size_t end = at + std::string(column).size();
    EXPECT_NE(row[end - 1], ' ') << column << "\n" << table;
    EXPECT_EQ(row[end], ' ') << column << "\n" << table;
  }
}

TEST_P(PrecisionAuditOn, ChangesNothing) {
  Net model = net(nullptr, GetParam());
  torchamp::ModulePolicies{{"last", Policy::standard()}}.apply_to(*model);
  const auto step = step_of(model);
  step();
  const auto gradient = model->first->weight.grad();
  const auto state = state_of(*model);
  const auto values = gradient.clone();
  torch::manual_seed(7);
  const at::Tensor expected = torch::rand({3});
  torch::manual_seed(7);
  const AutocastGuard autocast(GetParam(), {.dtype = at::kBFloat16});
  PrecisionAudit audit(model);
  audit.run(step, 1);
  (void)audit.policy();
  EXPECT_TRUE(at::equal(torch::rand({3}), expected));
  expect_same(state_of(*model), state);
  EXPECT_TRUE(model->first->weight.grad().is_same(gradient));
  EXPECT_TRUE(at::equal(gradient, values));
  ASSERT_NE(model->last->module_policy(), nullptr);
  EXPECT_NE(model->last->module_policy()->policy, nullptr);
  EXPECT_TRUE(at::autocast::is_autocast_enabled(GetParam()));
}

TEST_P(PrecisionAuditOn, WeighsErrorsByTheGradientsThatArrive) {
  Net model = net(nullptr, GetParam());
  model->eval();
  const at::Tensor x = torch::randn({32, 8}).to(GetParam());
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run([&] { (model(x) * 3.).sum().backward(); }, 1);
  at::Tensor y = torch::dropout(model->norm(model->first(x)).tanh(), 0.25, false).detach();
  const at::Tensor weight = model->last->weight.detach(), bias = model->last->bias.detach();
  const at::Tensor exact = torch::addmm(bias, y, weight.t());
  const auto narrow = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
  const at::Tensor rounded =
      torch::addmm(narrow(bias), narrow(y), narrow(weight).t()).to(at::kFloat);
  const double error = ((exact - rounded).square() * 9.).sum().item<double>();
  ASSERT_NE(row_of(audit, "addmm", "last"), nullptr);
  EXPECT_NEAR(row_of(audit, "addmm", "last")->error, error, 1e-5 * error);
}

INSTANTIATE_TEST_SUITE_P(Devices, PrecisionAuditOn, all_devices(), device_name);

TEST(PrecisionAudit, PutsAPlantedWeaknessFirstAndLeavesItInFp32) {
  struct Case {
    std::string op;
    at::ScalarType dtype;
    NetImpl::Weakness weakness;
  };
  const Case cases[] = {
      {"sub.Tensor", at::kBFloat16,
       [](const at::Tensor& y) {
         const at::Tensor offset = torch::full(y.sizes(), 4096.);
         return torch::sub(y.detach().to(at::kFloat).mul(0.).add_(4096.).add_(y), offset);
       }},
      {"exp", at::kHalf, [](const at::Tensor& y) { return y.mul(0.).add_(11.5).exp() * 1e-5 + y; }},
      {"softmax.int", at::kBFloat16,
       // In bf16 all of them are 40, so that the probabilities are equal and the sum is 0.
       [logits = torch::linspace(39.9, 40.1, 100000).requires_grad_()](const at::Tensor& y) {
         const at::Tensor values = torch::linspace(-1e3, 1e3, 100000);
         return y + torch::dot(torch::softmax(logits, 0), values);
       }},
      {"mul.Scalar", at::kHalf,
       [](const at::Tensor& y) { return y + torch::mul(y.tanh(), c10::Scalar(1e-12)); }},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.op);
    Net model = net(one.weakness);
    PrecisionAudit audit(model, {.dtype = one.dtype});
    audit.run(step_of(model), 1);
    std::stringstream table;
    table << audit;
    const std::string worst = audit.rows().front().op;
    const bool tiny = one.op == "mul.Scalar";  // whose argument's gradients are lost
    EXPECT_EQ(worst, tiny ? "tanh" : one.op) << table.str();
    take_times(audit);
    const AuditedPolicy chosen = audit.policy();
    EXPECT_LE(chosen.error, chosen.budget);
    EXPECT_FALSE(is_lowered(chosen, worst)) << chosen;
  }
}

TEST(PrecisionAudit, SumsItsRowsUp) {
  Net model = net([](const at::Tensor& y) {
    const at::Tensor large = torch::mm(y * 1e6, torch::eye(16)) * 1e-6;
    const at::Tensor tiny = torch::sigmoid(y.narrow(1, 0, 2) - 20.);
    return large + torch::relu(-1. - y.abs()) + tiny.sum();
  });
  const at::Tensor x = torch::randn({32, 8});
  PrecisionAudit audit(model, {.dtype = at::kHalf});
  EXPECT_EQ(audit.total(), AuditRow()) << "of none";
  audit.run(
      [&] {
        at::Tensor loss;
        {
          const AutocastGuard autocast(at::kCPU, at::kHalf);
          loss = model(x).to(at::kFloat).square().mean();
        }
        loss.backward();
      },
      1);
  AuditRow sum;
  sum.smallest = HUGE_VAL;
  for (const AuditRow& row : audit.rows()) {
    sum.calls += row.calls;
    sum.elements += row.elements;
    sum.error += row.error;
    sum.fp32_us += row.fp32_us;
    sum.low_us += row.low_us;
    sum.cast_us += row.cast_us;
    sum.gradient_loss = std::max(sum.gradient_loss, row.gradient_loss);
    sum.largest = std::max(sum.largest, row.largest);
    if (row.smallest != 0.) sum.smallest = std::min(sum.smallest, row.smallest);
  }
  const auto share = [&](double AuditRow::*member) {
    double count = 0.;
    for (const AuditRow& row : audit.rows())
      count += row.*member * static_cast<double>(row.elements);
    return count / static_cast<double>(sum.elements);
  };
  const AuditRow total = audit.total();
  EXPECT_EQ(total.calls, sum.calls);
  EXPECT_EQ(total.elements, sum.elements);
  EXPECT_EQ(total.error, sum.error);
  EXPECT_EQ(total.gradient_loss, sum.gradient_loss);
  EXPECT_EQ(total.largest, sum.largest);
  EXPECT_EQ(total.smallest, sum.smallest);
  EXPECT_DOUBLE_EQ(total.fp32_us, sum.fp32_us);
  EXPECT_DOUBLE_EQ(total.low_us, sum.low_us);
  EXPECT_DOUBLE_EQ(total.cast_us, sum.cast_us);
  for (const auto member : {&AuditRow::underflow, &AuditRow::overflow, &AuditRow::vanished}) {
    EXPECT_GT(total.*member, 0.);
    EXPECT_DOUBLE_EQ(total.*member, share(member));
  }
}

TEST(PrecisionAudit, LowersEverythingIfNothingMatters) {
  Net model = net();
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step_of(model), 1);
  take_times(audit);
  const AuditedPolicy chosen = audit.policy({.error_budget = 1.});
  EXPECT_FALSE(chosen.decisions.empty());
  for (const auto& decision : chosen.decisions) EXPECT_TRUE(decision.lowered) << decision.op;
  EXPECT_LE(chosen.error, 1.);
  EXPECT_GT(chosen.error, 0.);
}

TEST(PrecisionAudit, LowersNothingForABudgetOfNothing) {
  Net model = net();
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step_of(model), 1);
  take_times(audit);
  const AuditedPolicy chosen = audit.policy({.error_budget = 0.});
  EXPECT_EQ(chosen.error, 0.);
  for (const auto& decision : chosen.decisions) {
    EXPECT_FALSE(decision.lowered) << decision.op;
  }
}

TEST(PrecisionAudit, LowersTheOpsThatSaveMostIfTheBudgetIsTooSmallForAll) {
  const TemporaryFolder folder;
  Net model = net();
  model->eval();
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step_of(model), 1);
  const auto choose = [&](double products_us, double norm_us, double budget) {
    std::ofstream out(folder / "times.csv");
    out << audit.to_csv().substr(0, audit.to_csv().find('\n') + 1);
    for (const AuditRow& row : audit.rows()) {
      const double us = row.op == "addmm" ? products_us : row.op == "batch_norm" ? norm_us : 0.;
      out << row.module << ',' << row.op << ",0,0,0,0,0,0,0,0,0," << us << ",1,0,\n";
    }
    out.close();
    audit.read_times(folder / "times.csv");
    return audit.policy({.error_budget = budget});
  };
  // Per microsecond, the norm has less error than the products, so they are given up first.
  const double products = choose(1e3, 0., 1.).error, norm = choose(0., 1e3, 1.).error;
  ASSERT_GT(norm, 0.);
  const double both = choose(1e3, 1e3, 1.).error;
  ASSERT_LT(std::max(products, norm), both);
  const AuditedPolicy chosen = choose(1e3, 999., (std::max(products, norm) + both) / 2.);
  EXPECT_TRUE(is_lowered(chosen, "addmm")) << chosen;
  EXPECT_FALSE(is_lowered(chosen, "batch_norm")) << chosen;
  EXPECT_LE(chosen.error, chosen.budget);
}

TEST(PrecisionAudit, GivesTheSameErrorsToTheBitAndTheSameChoiceFromTheSameTimes) {
  const TemporaryFolder folder;
  Net model = net();
  const auto step = step_of(model);
  PrecisionAudit one(model, {.dtype = at::kBFloat16}), other(model, {.dtype = at::kBFloat16});
  one.run(step, 1);
  other.run(step, 2);
  one.write_csv(folder / "one.csv");
  one.read_times(folder / "one.csv");
  other.read_times(folder / "one.csv");
  EXPECT_EQ(one.rows(), other.rows());
  const AuditedPolicy a = one.policy({.error_budget = 1e-6});
  const AuditedPolicy b = other.policy({.error_budget = 1e-6});
  ASSERT_EQ(a.decisions.size(), b.decisions.size());
  for (std::size_t i = 0; i < a.decisions.size(); ++i) {
    EXPECT_EQ(a.decisions[i].op, b.decisions[i].op);
    EXPECT_EQ(a.decisions[i].lowered, b.decisions[i].lowered);
  }
  EXPECT_EQ(a.error, b.error);
}

TEST(PrecisionAudit, MeasuresAStepWithoutAGuardWithItsForwardInOneAndItsBackwardInNone) {
  Net model = net();
  const at::Tensor x = torch::randn({32, 8});
  int in_forward = 0, in_backward = 0, backwards = 0;
  const auto is_on = [] { return at::autocast::is_autocast_enabled(at::kCPU) ? 1 : 0; };
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(
      [&] {
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
          const at::Tensor y = model(x);
          in_forward += is_on();
          y.register_hook([&](const at::Tensor& gradient) {
            ++backwards;
            in_backward += is_on();
            return gradient;
          });
          y.square().mean().backward();
        }
      },
      1);
  EXPECT_EQ(in_forward, 0) << "an audit runs with guards off";
  EXPECT_EQ(row_of(audit, "addmm", "last")->calls, 2);
  backwards = 0;
  (void)audit.policy();
  EXPECT_GT(in_forward, 0);
  EXPECT_GT(backwards, 0);
  EXPECT_EQ(in_backward, 0);
}

TEST(PrecisionAudit, MeasuresInTheDtypeOfTheStepsGuardUnlessItIsGivenOne) {
  Net model = net([](const at::Tensor& y) { return torch::mm(y * 1e6, torch::eye(16)) * 1e-6; });
  const at::Tensor x = torch::randn({32, 8});
  at::ScalarType asked = at::kHalf;
  const auto step = [&] {
    at::Tensor loss;
    {
      const AutocastGuard autocast(at::kCPU, asked);
      loss = model(x).to(at::kFloat).square().mean();
    }
    loss.backward();
  };
  const auto overflows = [](const PrecisionAudit& audit) { return audit.total().overflow > 0.; };
  PrecisionAudit audit(model);
  audit.run(step, 1);
  EXPECT_TRUE(overflows(audit)) << "in fp16";
  EXPECT_FALSE(std::isfinite(audit.policy().torch_error));
  asked = at::kBFloat16;
  audit.run(step, 1);
  EXPECT_FALSE(overflows(audit));
  EXPECT_TRUE(std::isfinite(audit.policy().torch_error));
  asked = at::kHalf;
  PrecisionAudit of_bfloat16(model, {.dtype = at::kBFloat16});
  of_bfloat16.run(step, 1);
  EXPECT_FALSE(overflows(of_bfloat16));
  EXPECT_TRUE(std::isfinite(of_bfloat16.policy().torch_error)) << "the guard is in bf16 then";
}

TEST(PrecisionAudit, TakesNoDtypeFromAGuardThatIsDisabledAndGivesItNone) {
  Net model = net([](const at::Tensor& y) { return torch::mm(y * 1e6, torch::eye(16)) * 1e-6; });
  const at::Tensor x = torch::randn({32, 8});
  bool stays_half = true;
  PrecisionAudit audit(model);
  audit.run(
      [&] {
        at::Tensor loss;
        {
          const AutocastGuard off(at::kCPU, {.dtype = at::kHalf, .enabled = false});
          stays_half = stays_half && at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf;
          const AutocastGuard autocast(at::kCPU, at::kBFloat16);
          loss = model(x).to(at::kFloat).square().mean();
        }
        loss.backward();
      },
      1);
  EXPECT_EQ(audit.total().overflow, 0.) << "measured in fp16";
  EXPECT_TRUE(std::isfinite(audit.policy().torch_error));
  EXPECT_TRUE(stays_half);
}

TEST(PrecisionAudit, PrintsWhatAChoiceEdits) {
  AuditedPolicy chosen;
  EXPECT_THAT(::testing::PrintToString(chosen), HasSubstr("\nPolicy::torch(), as it is\n"));
  chosen.decisions.push_back({.op = "relu", .reason = "why"});
  EXPECT_THAT(::testing::PrintToString(chosen),
              HasSubstr("\nPolicy::torch(), and on top of it\n  fp32: relu  # why\n"));
}

TEST(PrecisionAudit, ReportsAGuardThatSavesNoTime) {
  const auto printed = [](const AuditedPolicy& audited) {
    std::ostringstream out;
    out << audited;
    return out.str();
  };
  const std::string hint = "fp32 takes less time here: train without a guard\n";
  EXPECT_THAT(printed({.us = 4., .fp32_us = 2., .spread_us = 1.}), HasSubstr(hint));
  EXPECT_THAT(printed({.us = 4., .fp32_us = 2., .spread_us = 3.}), Not(HasSubstr(hint)));
  EXPECT_THAT(printed({}), Not(HasSubstr(hint)));
}

TEST(PrecisionAudit, WeighsErrorsOfActivationsThatBackwardComputesAgain) {
  Net model = net();
  model->eval();
  const at::Tensor x = torch::randn({32, 8}).requires_grad_();
  const auto forward = [&](const at::Tensor& input) { return model(input); };
  PrecisionAudit plain(model, {.dtype = at::kBFloat16}), again(model, {.dtype = at::kBFloat16});
  plain.run([&] { forward(x).square().mean().backward(); }, 1);
  again.run([&] { torchamp::checkpoint(forward, x).square().mean().backward(); }, 1);
  for (const char* const module : {"first", "last"}) {
    const AuditRow* const one = row_of(plain, "addmm", module);
    const AuditRow* const other = row_of(again, "addmm", module);
    ASSERT_NE(other, nullptr);
    EXPECT_EQ(other->calls, 2) << "forward, and in backward";
    EXPECT_GT(one->error, 0.);
    EXPECT_DOUBLE_EQ(other->error, one->error);
  }
}

TEST(PrecisionAudit, SavesWhatItChoseForAnotherRun) {
  const TemporaryFolder folder;
  Net model = net();
  AuditedPolicy chosen;
  chosen.policy.lower_precision("addmm").fp32("tanh");
  chosen.decisions = {{"", "addmm", true, "fast"},
                      {"", "tanh", false, "slow"},
                      {"last", "addmm", false, "the last layer matters"}};
  torchamp::save_policy(chosen, folder / "policy");
  const auto loaded = torchamp::load_policies(folder / "policy");
  EXPECT_EQ(loaded.policy.lookup("addmm", at::kCPU), torchamp::Cast::lower_precision);
  EXPECT_EQ(loaded.policy.lookup("tanh", at::kCPU), torchamp::Cast::fp32);
  EXPECT_EQ(loaded.apply_to(*model), (std::vector<std::string>{"last"}));
  const AutocastGuard autocast(at::kCPU, {.dtype = at::kBFloat16, .policy = loaded.policy});
  EXPECT_EQ(model(torch::randn({4, 8})).scalar_type(), at::kFloat) << "of the last layer";
  EXPECT_EQ(model->first(torch::randn({4, 8})).scalar_type(), at::kBFloat16);
  std::ifstream file(folder / "policy");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(text, HasSubstr("fp32: addmm  # the last layer matters"));

  nn::Sequential another(nn::Linear(2, 2));
  EXPECT_ERROR(loaded.apply_to(*another), "no module of the model fits 'last'");
}

TEST(PrecisionAudit, LeavesNoHookOnAParameterThatAnOpGivesBack) {
  Net model = net();
  const at::Tensor weight = model->first->weight;
  at::Tensor kept;
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  const auto step = step_of(model);
  audit.run(
      [&] {
        kept = torch::tanh(weight);
        (torch::dropout(weight, 0.5, false).sum() + kept.sum()).backward();
        step();
      },
      1);
  ASSERT_NE(row_of(audit, "dropout", "first"), nullptr);
  EXPECT_GT(row_of(audit, "dropout", "first")->error, 0.);
  EXPECT_TRUE(torch::autograd::impl::hooks(weight).empty());
  EXPECT_EQ(torch::autograd::impl::get_autograd_meta(weight)->cpp_hooks_list_, nullptr);
}

TEST(PrecisionAudit, LeavesTheProgramsHooksOnALeafUnchanged) {
  Net model = net();
  int calls = 0;
  const auto count = [&](const at::Tensor& gradient) {
    ++calls;
    return gradient;
  };
  const at::Tensor input = torch::ones({4, 8}, at::requires_grad());
  const at::Tensor weight = model->first->weight;
  const auto removed = weight.register_hook(count);
  weight.register_hook(count);
  weight.remove_hook(removed);
  const auto run = [&] {
    PrecisionAudit audit(model, {.dtype = at::kBFloat16});
    audit.run(
        [&] {
          (torch::alpha_dropout(weight, 0.5, false).sum() + torch::dropout(input, 0.5, false).sum())
              .backward();
          step_of(model)();
        },
        1);
  };
  run();
  run();
  const auto& list = *torch::autograd::impl::get_autograd_meta(weight)->cpp_hooks_list_;
  EXPECT_EQ(list.size(), 2) << "of the program";
  EXPECT_TRUE(torch::autograd::impl::hooks(input).empty());
  calls = 0;
  (weight.sum() + input.sum()).backward();
  EXPECT_EQ(calls, 1);
  input.register_hook(count);
  calls = 0;
  input.sum().backward();
  EXPECT_EQ(calls, 1) << "a later hook is called";
}

TEST(PrecisionAudit, ACopyHasItsOwnRows) {
  Net model = net();
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step_of(model), 1);
  const auto rows = audit.rows();
  PrecisionAudit copy(audit), assigned(model, {.dtype = at::kBFloat16});
  assigned = audit;
  EXPECT_EQ(copy.rows(), rows);
  EXPECT_EQ(assigned.rows(), rows);
  take_times(copy);
  EXPECT_EQ(audit.rows(), rows);
  EXPECT_EQ(assigned.rows(), rows);
  EXPECT_NE(copy.rows(), rows);
  EXPECT_FALSE(copy.policy().decisions.empty());
}

TEST(PrecisionAudit, WritesAndReadsTheSameFilesWhateverTheLocale) {
  const TemporaryFolder folder;
  Net model = net();
  PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  audit.run(step_of(model), 1);
  const auto rows = audit.rows();
  const std::string csv = audit.to_csv();
  const auto printed = [&] {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out << audit;
    return out.str();
  };
  const std::string table = printed();
  AuditedPolicy chosen;
  chosen.error = 1.5e-8;
  chosen.policy.lower_precision("addmm");
  const auto saved = [&] {
    torchamp::save_policy(chosen, folder / "policy");
    return content_of(folder / "policy");
  };
  const std::string policy = saved();
  EXPECT_THAT(policy, HasSubstr("1.5e-08"));
  const auto check = [&] {
    EXPECT_EQ(audit.to_csv(), csv);
    EXPECT_EQ(printed(), table);
    EXPECT_EQ(saved(), policy);
    audit.write_csv(folder / "csv");
    audit.read_times(folder / "csv");
    EXPECT_EQ(audit.rows(), rows);
  };
  {
    const GroupingStreams grouping;
    check();
  }
  const CommaOfC comma;
  check();
  if (!comma.is_there()) GTEST_SKIP() << "no locale of C's with a decimal comma, and no localedef";
}
