// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/labs/cast_recorder.h>
#include <torchamp/labs/precision_audit.h>
#include <torchamp/labs/underflow_meter.h>
#include <torchamp/non_finite_op.h>
#include <torchamp/overflow_report.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "diagnose/log.h"
#include "diagnose/programs.h"

/// How programs are looked at.
struct Setting {
  torch::Device device = torch::kCPU;
  at::ScalarType dtype = at::kHalf;
  std::int64_t steps = 100;
  double init_scale = 0x1p24;
};

/// A step that was skipped.
struct Skip {
  std::int64_t step = 0;
  double scale = 1.;
  torchamp::OverflowReport overflow{};
  std::string op{};  ///< the first that made an inf or a NaN; of the first skip only
};

/// All that was found out about a program.
struct Diagnosis {
  Program program;
  std::vector<torchamp::AuditRow> rows{};
  torchamp::AuditRow total{};
  torchamp::AuditedPolicy chosen{};
  std::vector<torchamp::CastReport::Row> casts{};
  torchamp::UnderflowReport underflow{};
  std::vector<LoggedStep> steps{};
  std::vector<Skip> skips{};
};

/// Audits the program before it is trained, then looks at its training.
inline Diagnosis diagnose(Program program, const Setting& setting) {
  Diagnosis found{.program = std::move(program)};
  torch::nn::Module& model = *found.program.model;
  const auto& loss_of_batch = found.program.loss;
  found.program.next_batch();

  torchamp::PrecisionAudit audit(model, {.dtype = setting.dtype});
  const auto scale = torch::full({}, 0x1p15, setting.device);  // like in training
  audit.run([&] { loss_of_batch().backward(scale); }, 3);
  found.rows = audit.rows();
  found.total = audit.total();
  found.chosen = audit.policy();

  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-3));
  torchamp::GradScaler scaler({.init_scale = setting.init_scale, .growth_interval = 20});
  torchamp::UnderflowMeter meter(model, {.every = std::max<std::int64_t>(1, setting.steps / 20)});
  torch::Tensor loss;
  const auto forward_and_backward = [&] {
    {
      const torchamp::AutocastGuard autocast(setting.device.type(), setting.dtype);
      loss = loss_of_batch();
    }
    scaler.scale(loss).backward();
  };
  for (std::int64_t step = 0; step < setting.steps; ++step) {
    const auto metered = meter.step(scaler);
    std::optional<torchamp::CastRecorder> recorder;
    if (step + 1 == setting.steps) recorder.emplace(model);
    found.program.next_batch();
    optimizer.zero_grad();
    forward_and_backward();
    LoggedStep& logged = found.steps.emplace_back(LoggedStep{.step = static_cast<double>(step),
                                                             .loss = loss.item<double>(),
                                                             .scale = scaler.get_scale()});
    logged.skipped = !scaler.step(optimizer);
    if (logged.skipped) {
      Skip& skip = found.skips.emplace_back(Skip{.step = step, .scale = logged.scale});
      skip.overflow = torchamp::overflow_report(model);
      if (found.skips.size() == 1) {
        std::ostringstream op;
        if (const auto first = torchamp::first_non_finite_op(forward_and_backward, model)) {
          op << *first;
        }
        skip.op = op.str();
      }
    }
    scaler.update();
    if (recorder) found.casts = recorder->report().rows();
  }
  found.underflow = meter.report();
  return found;
}
