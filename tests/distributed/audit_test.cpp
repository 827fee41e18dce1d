// SPDX-License-Identifier: BSD-3-Clause
// A precision audit and an underflow meter in several processes.
#include <gtest/gtest.h>

#if __has_include(<gloo/rendezvous/store.h>)

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

#include "support/expect_error.h"
#include "support/launch.h"
#include "torchamp/autocast.h"
#include "torchamp/distributed/data_parallel.h"
#include "torchamp/labs/precision_audit.h"
#include "torchamp/labs/underflow_meter.h"

namespace {

using at::Tensor;
using torchamp::AutocastGuard;
using torchamp::DistributedDataParallel;

torch::nn::Sequential audited_net() {
  at::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Tanh(),
                               torch::nn::Linear(16, 4), torch::nn::Sigmoid());
}

/// As numbers that a tensor holds, for expect_same_everywhere().
Tensor bytes_of(const std::string& text) {
  Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<std::uint8_t>());
  return bytes;
}

TEST(Distributed, ProcessesWithDifferentTimesChooseAlike) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  auto model = audited_net();
  DistributedDataParallel net(model, group);
  const Tensor x = at::randn({2, 16, 8})[group->getRank()];
  torchamp::PrecisionAudit audit(
      model, {.dtype = at::kBFloat16, .average = torchamp::average_over(group)});
  for (int i = 0; i < 2; ++i) {
    audit.run(
        [&] {
          for (const Tensor& part : x.chunk(2)) net.forward(part).square().mean().backward();
        },
        2);
    const torchamp::AuditedPolicy chosen = audit.policy({.error_budget = i == 0 ? 1. : 1e-7});
    std::ostringstream text;
    text << chosen;
    const auto size = static_cast<std::int64_t>(text.str().size());
    expect_same_everywhere(group, {at::full({1}, size)});
    expect_same_everywhere(group, {bytes_of(text.str())});
  }
  EXPECT_FALSE(model->parameters()[0].grad().defined());
}

TEST(Distributed, AnAuditThatWouldWaitForOthersForGoodSaysSo) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  auto model = audited_net();
  DistributedDataParallel net(model, group);
  torchamp::PrecisionAudit audit(model, {.dtype = at::kBFloat16});
  EXPECT_ERROR(audit.run(
                   [&] {
                     net.forward(at::ones({4, 8})).sum().backward();
                   },
                   1),
               "the step waits for other processes");
  torchamp::PrecisionAudit together(
      model, {.dtype = at::kBFloat16, .average = torchamp::average_over(group)});
  EXPECT_ERROR(together.run(
                   [&] {
                     Tensor y = net.forward(at::ones({4, 8}));
                     if (group->getRank() == 1) y = y.exp();
                     y.sum().backward();
                   },
                   1),
               "do not call the same ops");
  const char* const problem[] = {"the step of another process has failed", "holds a NaN"};
  EXPECT_ERROR(together.run(
                   [&] {
                     const Tensor loss = model->forward(at::ones({4, 8})).sum();
                     constexpr double nan = std::numeric_limits<double>::quiet_NaN();
                     (loss * (group->getRank() == 1 ? nan : 1.)).backward();
                   },
                   1),
               problem[group->getRank()]);
}

TEST(Distributed, AMeterCountsTheGradientsOfItsOwnProcess) {
  if (ran_in_processes(2)) return;
  const auto group = make_group();
  auto model = audited_net();
  DistributedDataParallel net(model, group);
  torchamp::UnderflowMeter meter(*model);
  const double size = group->getRank() == 0 ? 1. : 1e-9;
  {
    const auto metered = meter.step();
    Tensor y;
    {
      const AutocastGuard autocast(at::kCPU, at::kHalf);
      y = net.forward(at::ones({4, 8}));
    }
    (y.to(at::kFloat) * size).sum().backward();
  }
  const auto total = meter.report().total();
  EXPECT_GT(total.elements, 0);
  EXPECT_EQ(total.lost > 0, group->getRank() == 1) << meter.report();
  expect_same_everywhere(group, {model->parameters()[0].grad()});
}

}  // namespace

#endif
