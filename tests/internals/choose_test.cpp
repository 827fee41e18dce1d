// SPDX-License-Identifier: BSD-3-Clause
// What an audit chooses of measurements that are given, why, and what processes agree on.
#include <torchamp/labs/detail/audit/choose.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchamp/labs/precision_audit.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "support/expect_error.h"

using torchamp::AuditRow;

TEST(PrecisionAuditChooser, LowersNothingWhoseCastsCostMoreThanItSaves) {
  using torchamp::detail::Chooser;
  // a -> b -> c -> d: b saves little, but lies between two that save much; d's casts cost more.
  const Chooser chooser({{100., 10., 4.}, {5., 6., 1.}, {100., 10., 2.}, {5., 1., 0.}},
                        {{std::nullopt, 0, 1.}, {0, 1, 3.}, {1, 2, 3.}, {std::nullopt, 3, 6.}});
  const auto choices = chooser.choices();
  EXPECT_EQ(choices.front().lowered, (Chooser::Lowered{true, true, true, false}));
  EXPECT_EQ(choices.back().lowered, (Chooser::Lowered{false, false, false, false}));
  const auto error = [](const Chooser::Lowered& lowered) {
    constexpr double errors[] = {4., 1., 2., 0.};
    double sum = 0.;
    for (std::size_t i = 0; i < lowered.size(); ++i) sum += lowered[i] ? errors[i] : 0.;
    return sum;
  };
  for (std::size_t i = 1; i < choices.size(); ++i) {
    EXPECT_LE(error(choices[i].lowered), error(choices[i - 1].lowered));
    EXPECT_EQ(chooser.us(choices[i].lowered), choices[i].us);
  }
  EXPECT_EQ(chooser.us(choices[0].lowered), 10. + 6. + 10. + 5. + 1.);
}

TEST(PrecisionAuditChooser, RevertsFirstTheOpWithTheLargestErrorPerSavedTime) {
  using torchamp::detail::Chooser;
  // Errors for each microsecond: 0.1, 3, 0.5, and 2 for one that has the largest error.
  const Chooser chooser({{11., 1., 1.}, {2., 1., 3.}, {3., 1., 1.}, {6., 1., 10.}}, {});
  const auto choices = chooser.choices();
  ASSERT_EQ(choices.size(), 5U);
  EXPECT_EQ(choices[0].lowered, (Chooser::Lowered{true, true, true, true}));
  EXPECT_EQ(choices[1].lowered, (Chooser::Lowered{true, false, true, true}));
  EXPECT_EQ(choices[2].lowered, (Chooser::Lowered{true, false, true, false}));
  EXPECT_EQ(choices[3].lowered, (Chooser::Lowered{true, false, false, false}));
  EXPECT_EQ(choices[4].lowered, (Chooser::Lowered{false, false, false, false}));
}

// The row of choices as it is defined: each time all rates and costs anew.
TEST(PrecisionAuditChooser, TakesBackAsALookAtAllEachTimeWould) {
  using torchamp::detail::Chooser;
  torch::manual_seed(0);
  const auto draw = [](int64_t most) { return torch::randint(most, {}).item<int64_t>(); };
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<torchamp::detail::Choosable> all;
    std::vector<torchamp::detail::AuditEdge> edges;
    const auto count = static_cast<std::size_t>(1 + draw(8));
    const auto number = [&] { return static_cast<double>(draw(20)); };
    const auto unit = [&] { return static_cast<std::size_t>(draw(static_cast<int64_t>(count))); };
    for (std::size_t i = 0; i < count; ++i)
      all.push_back({number(), number(), number(), draw(5) > 0});
    for (std::size_t i = 0; i < 2 * count; ++i) {
      edges.push_back({draw(4) > 0 ? std::optional(unit()) : std::nullopt, unit(), number() / 4.});
    }
    const Chooser chooser(all, edges);
    const auto choices = chooser.choices();
    Chooser::Lowered now;
    for (const auto& one : all) now.push_back(one.may_be_lowered);
    const auto saved = [&](std::size_t i) {
      Chooser::Lowered without = now;
      without[i] = false;
      return chooser.us(without) - chooser.us(now);
    };
    const auto take_back_what_costs = [&] {
      for (;;) {
        std::size_t worst = count;
        for (std::size_t i = 0; i < count; ++i) {
          if (now[i] && saved(i) < 0. && (worst == count || saved(i) < saved(worst))) worst = i;
        }
        if (worst == count) return;
        now[worst] = false;
      }
    };
    take_back_what_costs();
    for (std::size_t c = 0;; ++c) {
      ASSERT_LT(c, choices.size());
      ASSERT_EQ(choices[c].lowered, now) << trial << ' ' << c;
      ASSERT_EQ(choices[c].us, chooser.us(now));
      const auto rate = [&](std::size_t i) { return all[i].error / std::max(saved(i), 1e-3); };
      std::size_t worst = count;
      for (std::size_t i = 0; i < count; ++i) {
        if (now[i] && (worst == count || rate(i) > rate(worst))) worst = i;
      }
      if (worst == count) {
        EXPECT_EQ(c + 1, choices.size());
        break;
      }
      now[worst] = false;
      take_back_what_costs();
    }
  }
}

TEST(PrecisionAudit, GivesTheReasonOfARule) {
  const auto reason = [](const std::vector<AuditRow>& rows, bool lowered) {
    torch::nn::Linear model(2, 2);
    torchamp::detail::AuditData data{.audited = {model.get(), at::kCPU, at::kBFloat16}};
    data.rows = rows;
    for (AuditRow& row : data.rows) row.op = "exp";
    const torchamp::detail::ForwardSites sites(*model);
    const torchamp::detail::AuditChoice choice(data, sites, /*gradient_loss_limit=*/0.01);
    return choice.policies({lowered}).decisions.at(0).reason;
  };
  const AuditRow usual{.error = 1., .fp32_us = 10., .low_us = 5., .cast_us = 2.};
  const std::string sums = "error 2, 20 us in fp32, 10 in 16 bits, 4 in casts";
  EXPECT_EQ(reason({usual, usual}, true), sums);
  EXPECT_EQ(reason({usual, usual}, false), sums);
  // Each is in a row that others follow, and gets only the rows that stay in fp32.
  const auto of = [&](double AuditRow::*member, double value, bool lowered) {
    AuditRow row = usual;
    row.*member = value;
    return reason({row, usual}, lowered);
  };
  EXPECT_EQ(of(&AuditRow::overflow, 0.25, false), "25 % of its results overflow");
  EXPECT_EQ(of(&AuditRow::overflow, 0.25, true), sums);
  EXPECT_EQ(of(&AuditRow::error, HUGE_VAL, false), "0 % of its results overflow");
  EXPECT_EQ(of(&AuditRow::gradient_loss, HUGE_VAL, false), "its gradients overflow in 16 bits");
  EXPECT_EQ(of(&AuditRow::gradient_loss, 0.5, false), "16 bits lose 50 % of its gradients");
  EXPECT_EQ(of(&AuditRow::gradient_loss, 0.01, false), sums) << "within the limit";
  for (const double loss : {0.5, HUGE_VAL})
    EXPECT_EQ(of(&AuditRow::gradient_loss, loss, true), sums);
  AuditRow refused = usual;
  refused.problem = "why";
  for (const bool lowered : {false, true}) {
    EXPECT_EQ(reason({usual, refused}, lowered), "cannot run in 16 bits");
  }
}

TEST(PrecisionAudit, AgreesWithOtherProcessesOnRowsAndEdges) {
  const AuditRow fine{.op = "exp", .error = 1.}, refused{.op = "mm", .problem = "why"};
  std::vector<AuditRow> rows{fine, refused};
  std::vector<torchamp::detail::AuditEdge> edges{{0, 1, 8.}};
  torchamp::detail::AuditedModel audited{nullptr, at::kCPU, at::kBFloat16};
  torchamp::detail::agree(audited, rows, edges);
  EXPECT_EQ(rows, (std::vector{fine, refused})) << "there is one process";
  double other = 0.;  // of three, the third is as this one
  audited.average = [&](at::Tensor& numbers) {
    if (numbers.numel() > 1) numbers.mul_(2. / 3.).add_(other);
  };
  torchamp::detail::agree(audited, rows, edges);
  EXPECT_EQ(rows[0].problem, "");
  EXPECT_EQ(rows[1].problem, "why");
  EXPECT_NEAR(rows[0].error, 2. / 3., 1e-6);
  EXPECT_NEAR(edges[0].us, 16. / 3., 1e-5);
  other = 1. / 3.;
  torchamp::detail::agree(audited, rows, edges);
  EXPECT_EQ(rows[0].problem, "it cannot run in 16 bits on another process");
  EXPECT_EQ(rows[1].problem, "why");
  audited.average = [](at::Tensor& numbers) { numbers.add_(1.); };
  EXPECT_ERROR(torchamp::detail::agree(audited, rows, edges), "do not call the same ops");
}
