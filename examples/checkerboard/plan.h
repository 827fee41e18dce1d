// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "checkerboard/options.h"
#include "checkerboard/target.h"
#include "checkerboard/train.h"
#include "support/device.h"
#include "support/format.h"
#include "support/trial.h"

/// All that is settled before the two runs.
struct Plan {
  torch::Device device = torch::kCPU;
  Precision fp32{.name = "fp32"};
  Precision amp;
  std::int64_t size = 512;
  std::int64_t steps = 500;
  std::string why;  ///< for the reader of the screen
};

/// Times a few small steps, then takes the largest size that leaves both runs about a minute.
inline void choose_size_for_cpu(Plan& plan, const Options& options, const Target& target) {
  constexpr double budget_seconds = 50.;
  constexpr std::int64_t trial = 32;
  struct Choice {
    std::int64_t size, steps;
  };
  // Below 64 the board's fields are the most alike where size / 4 is odd.
  constexpr Choice choices[] = {{128, 500}, {96, 500}, {64, 500}, {44, 500}, {36, 500},
                                {36, 400},  {28, 400}, {28, 300}, {20, 300}, {20, 200}};
  const auto targets = target.at_size(trial);
  const auto inputs = grid(targets.size(3), targets.size(2));
  const support::StepTimes times = support::try_on_cpu([&] {
    return support::StepTimes{
        train(inputs, targets, 8, plan.fp32, options.seed, false).seconds_per_step,
        train(inputs, targets, 8, plan.amp, options.seed, false).seconds_per_step};
  });
  double seconds = 0.;
  for (const Choice& choice : choices) {
    plan.size = choice.size;
    plan.steps = options.steps.value_or(choice.steps);
    const double larger = static_cast<double>(plan.size) / static_cast<double>(trial);
    seconds = times.both() * larger * larger * static_cast<double>(plan.steps);
    if (seconds <= budget_seconds) break;
  }
  plan.why = support::format(
      "A step at %lld pixels a side takes %s in fp32 and %s in %s: %lld a side and %lld steps\n"
      "should take about %.0f s in all. Choose otherwise with --size and --steps.\n",
      static_cast<long long>(trial), support::format_seconds(times.fp32).c_str(),
      support::format_seconds(times.amp).c_str(), plan.amp.name.c_str(),
      static_cast<long long>(plan.size), static_cast<long long>(plan.steps), seconds);
}

/// Throws support::UsageError for a device that is not there.
inline Plan make_plan(const Options& options, const Target& target) {
  Plan plan;
  plan.device = options.device.chosen_device();
  plan.amp.dtype = options.device.chosen_dtype();
  plan.amp.name = support::short_name(plan.amp.dtype);
  plan.amp.mixed = true;
  if (options.policy == "torch") plan.amp.policy = torchamp::Policy::torch();

  if (plan.device.is_cpu() && !options.size) choose_size_for_cpu(plan, options, target);
  plan.why = support::describe(plan.device, plan.amp.dtype) + plan.why;
  plan.size = options.size.value_or(plan.size);
  plan.steps = options.steps.value_or(plan.steps);
  return plan;
}
