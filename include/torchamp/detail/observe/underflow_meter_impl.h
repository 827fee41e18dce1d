// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/observe/print_report.h"
#include "torchamp/detail/observe/underflow_recording.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/underflow_meter.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {

/// The numbers of all metered steps. What only devices know stays there until it is asked for.
struct UnderflowHistory {
  struct Counts {
    std::size_t step = 0;             // index in `steps`
    std::vector<std::size_t> rows{};  // indices in `rows`
    at::Tensor lost{};                // for each of these
  };
  int64_t steps_in_all = 0;  // those that have begun
  bool in_step = false;
  std::vector<UnderflowRow> rows;
  std::map<std::pair<std::string, bool>, std::size_t> row_index;
  std::vector<UnderflowStep> steps;
  std::vector<at::Tensor> scales;  // of the steps; undefined where the host knows
  std::vector<Counts> counts;

  void add(UnderflowStep step, const at::Tensor& scale, const UnderflowRecording& seen) {
    std::unordered_map<at::Device, std::map<std::size_t, std::vector<at::Tensor>>> lost;
    for (const auto& gradient : seen.gradients()) {
      const auto [found, is_new] =
          row_index.try_emplace({gradient->module, gradient->of_weights}, rows.size());
      if (is_new) rows.push_back({.module = gradient->module, .of_weights = gradient->of_weights});
      if (gradient->lost.defined()) {
        lost[gradient->lost.device()][found->second].push_back(gradient->lost);
      }
    }
    std::vector<Counts> added;
    for (const auto& [device, lost_of] : lost) {
      Counts& one = added.emplace_back(Counts{.step = steps.size()});
      std::vector<at::Tensor> sums;
      for (const auto& [row, numbers] : lost_of) {
        one.rows.push_back(row);
        sums.push_back(numbers.size() == 1 ? numbers.front() : at::stack(numbers).sum());
      }
      one.lost = at::stack(sums);
    }
    // Nothing fails from here on.
    for (const auto& gradient : seen.gradients()) {
      UnderflowRow& row = rows[row_index.at({gradient->module, gradient->of_weights})];
      (gradient->lost.defined() ? row.elements : row.not_looked_at) += gradient->elements;
      if (gradient->lost.defined()) step.elements += gradient->elements;
    }
    for (Counts& one : added) counts.push_back(std::move(one));
    steps.push_back(step);
    scales.push_back(scale);
  }

  UnderflowReport read() const {
    UnderflowReport report{.rows = rows, .steps = steps};
    std::unordered_map<at::Device, std::vector<at::Tensor>> lost_on, scales_on;
    for (const Counts& one : counts) lost_on[one.lost.device()].push_back(one.lost);
    for (const at::Tensor& scale : scales) {
      if (scale.defined()) scales_on[scale.device()].push_back(scale);
    }
    for (const auto& [device, tensors] : lost_on) {
      const at::Tensor all = at::cat(tensors).cpu();
      const auto* number = all.const_data_ptr<int64_t>();
      for (const Counts& one : counts) {
        if (one.lost.device() != device) continue;
        for (const std::size_t row : one.rows) {
          report.rows[row].lost += *number;
          report.steps[one.step].lost += *number++;
        }
      }
    }
    for (const auto& [device, tensors] : scales_on) {
      const at::Tensor all = at::stack(tensors).cpu();
      const auto* number = all.const_data_ptr<float>();
      for (std::size_t i = 0; i < scales.size(); ++i) {
        if (scales[i].defined() && scales[i].device() == device) report.steps[i].scale = *number++;
      }
    }
    std::erase_if(report.rows, [](const UnderflowRow& row) {
      return row.elements + row.not_looked_at == 0;  // of a step that was not kept
    });
    std::stable_sort(report.rows.begin(), report.rows.end(),
                     [](const auto& a, const auto& b) { return a.share() > b.share(); });
    return report;
  }
};

}  // namespace detail

inline UnderflowMeter::UnderflowMeter(detail::NamedParameters parameters,
                                      const UnderflowMeterOptions& options)
    : parameters_(std::move(parameters)),
      every_(options.every),
      history_(std::make_shared<detail::UnderflowHistory>()) {
  TORCH_CHECK_VALUE(every_ >= 1, "UnderflowMeter: every is ", every_, ". It is 1 or more.");
}

inline UnderflowMeter::~UnderflowMeter() = default;

inline UnderflowReport UnderflowMeter::report() const {
  const detail::InternalOps internal;
  UnderflowReport report = history_->read();
  report.steps_in_all = history_->steps_in_all - (history_->in_step ? 1 : 0);
  return report;
}

inline UnderflowMeter::Step::Step(const UnderflowMeter& meter, const GradScaler* scaler)
    : history_(meter.history_) {
  TORCH_CHECK(!history_->in_step,
              "UnderflowMeter::step: the last step has not ended. It ends with the object that "
              "step() returned: let that go first.");
  if (history_->steps_in_all % meter.every_ == 0) {
    auto recording = std::make_shared<detail::UnderflowRecording>(meter.parameters_);
    if (scaler != nullptr) {
      const detail::InternalOps internal;
      const at::Tensor scale = scaler->scale_tensor();
      scale_ = scale.defined() ? scale.clone() : at::Tensor();
      if (!scale.defined()) known_scale_ = scaler->get_scale();  // as the host then knows it
    }
    observation_.emplace("UnderflowMeter", recording);
    recording_ = std::move(recording);
    exceptions_ = std::uncaught_exceptions();
  }
  ++history_->steps_in_all;
  history_->in_step = true;
}

inline UnderflowMeter::Step::~Step() {
  observation_.reset();
  history_->in_step = false;
  if (!recording_ || std::uncaught_exceptions() > exceptions_) return;
  try {
    const at::DisableRecordFunctionGuard not_recorded;
    const detail::InternalOps internal;
    history_->add({.step = history_->steps_in_all - 1, .scale = known_scale_}, scale_, *recording_);
  } catch (const std::exception& error) {
    TORCH_WARN("UnderflowMeter: the counts of step ", history_->steps_in_all - 1,
               " are lost: ", error.what());
  }
}

inline std::ostream& operator<<(std::ostream& out, const UnderflowReport& report) {
  const auto percent = [](double share) { return detail::fixed_text(100. * share, 2) + " %"; };
  out << report.steps.size() << " of " << report.steps_in_all << " steps metered";
  if (report.steps.empty()) {
    out << '\n';
    return out;
  }
  if (report.rows.empty()) {
    out << ": no 16-bit gradient was made in them (are forward, under a guard, and backward within "
           "the step?)\n";
  } else {
    out << ": " << percent(report.total().share())
        << " of the elements of 16-bit gradients underflow\n";
  }
  std::vector<std::vector<std::string>> lines{
      {"module", "gradients", "elements", "zero", "share", "not looked at"}};
  for (const UnderflowRow& row : report.rows) {
    lines.push_back({row.module, row.of_weights ? "of weights" : "of inputs",
                     std::to_string(row.elements), std::to_string(row.lost), percent(row.share()),
                     row.not_looked_at == 0 ? "-" : std::to_string(row.not_looked_at)});
  }
  if (!report.rows.empty()) detail::print_columns(out, lines, 2);
  constexpr std::size_t most = 20;
  lines = {{"step", "scale", "share"}};
  for (std::size_t i = report.steps.size() - std::min(most, report.steps.size());
       i < report.steps.size(); ++i) {
    const UnderflowStep& step = report.steps[i];
    lines.push_back({std::to_string(step.step), detail::number_text(step.scale),
                     step.elements == 0 ? "-" : percent(step.share())});
  }
  detail::print_columns(out, lines, 0);
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
