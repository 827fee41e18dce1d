// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "torchamp/version.h"

/// @file
/// @brief Extra. Learning rates that warm up and then decay: WarmupCosine, WarmupLinear.

namespace TORCHAMP_NAMESPACE {

/// Options of WarmupCosine and WarmupLinear. An aggregate, for designated initialisers.
struct WarmupOptions {
  /// The number of steps in which the rate grows from 0. 0: no warm-up.
  int64_t warmup_steps = 0;
  /// The number of steps after which the rate has decayed; afterwards it is constant. Must be set.
  int64_t total_steps = 0;
  /// The rate at total_steps, as a share of the full rate.
  double min_lr_ratio = 0.;
};

/// Base of WarmupCosine and WarmupLinear: an LRScheduler whose rates depend only on the full rates
/// and on the number of steps.
///
/// The full rate of a group is its rate at construction. For a group that is added later it is the
/// rate at the next step(). After n calls of step() the rate is the full rate times
///
///     n / warmup_steps            while n < warmup_steps; so the first step has a rate of 0
///     m + (1 - m) * decay(x)      with m = min_lr_ratio, and x from 0 at warmup_steps to 1 at
///                                 total_steps
///
/// as in Python with LambdaLR and the formulas of Hugging Face's get_cosine_schedule_with_warmup
/// and get_linear_schedule_with_warmup. Rates set by hand last until the next step(). The optimizer
/// must outlive it. Never synchronises. One thread at a time.
class WarmupScheduler : public torch::optim::LRScheduler {
 public:
  /// Writes the number of steps and the full rates, for TrainingCheckpoint and TrainingStep::save.
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("steps", c10::IValue(static_cast<int64_t>(step_count_)));
    archive.write("full_rates", c10::IValue(full_rates_));
  }

  /// Reads what save() wrote, and sets the rates of the optimizer. The options of construction do
  /// not change. If the archive has another number of groups, throws and changes nothing.
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue steps, rates;
    archive.read("steps", steps);
    archive.read("full_rates", rates);
    const std::vector<double> full = rates.toDoubleVector();
    TORCH_CHECK(full.size() == optimizer_->param_groups().size(), name_,
                "::load: the archive has learning rates of ", full.size(),
                " parameter groups, and the optimizer has ", optimizer_->param_groups().size(),
                " groups. Load it into a scheduler for an optimizer of the same groups.");
    full_rates_ = full;
    step_count_ = static_cast<unsigned>(steps.toInt());
    set_rates(step_count_);
  }

 protected:
  /// `name` begins error texts. Sets the rates of the first step.
  WarmupScheduler(torch::optim::Optimizer& optimizer, const WarmupOptions& options,
                  const char* name)
      : LRScheduler(optimizer), optimizer_(&optimizer), options_(options), name_(name) {
    TORCH_CHECK_VALUE(options.warmup_steps >= 0, name, ": warmup_steps is ", options.warmup_steps,
                      ". It must be at least 0.");
    TORCH_CHECK_VALUE(options.total_steps > options.warmup_steps, name, ": total_steps is ",
                      options.total_steps, ". It must be above warmup_steps, which is ",
                      options.warmup_steps, ".");
    TORCH_CHECK_VALUE(options.min_lr_ratio >= 0. && options.min_lr_ratio <= 1., name,
                      ": min_lr_ratio is ", options.min_lr_ratio, ". It must be between 0 and 1.");
    add_new_groups();
    if (options.warmup_steps > 0) {
      for (auto& group : optimizer.param_groups()) group.options().set_lr(0.);
    }
  }

  /// The share of the decay that remains: 1 for a progress of 0, and 0 for a progress of 1.
  virtual double decay(double progress) const = 0;

  /// The rates of the next step, for LRScheduler::step().
  std::vector<double> get_lrs() override {
    add_new_groups();
    return rates_after(step_count_ + 1);
  }

 private:
  void add_new_groups() {
    auto& groups = optimizer_->param_groups();
    for (std::size_t g = full_rates_.size(); g < groups.size(); ++g) {
      full_rates_.push_back(groups[g].options().get_lr());
    }
  }

  std::vector<double> rates_after(unsigned steps) const {
    const auto warmup = static_cast<double>(options_.warmup_steps);
    const auto total = static_cast<double>(options_.total_steps);
    double factor = steps / warmup;
    if (steps >= warmup) {
      const double share = decay(std::min(1., (steps - warmup) / (total - warmup)));
      factor = options_.min_lr_ratio + (1. - options_.min_lr_ratio) * share;
    }
    std::vector<double> rates = full_rates_;
    for (double& rate : rates) rate *= factor;
    return rates;
  }

  void set_rates(unsigned steps) {
    const std::vector<double> rates = rates_after(steps);
    for (std::size_t g = 0; g < rates.size(); ++g) {
      optimizer_->param_groups()[g].options().set_lr(rates[g]);
    }
  }

  torch::optim::Optimizer* optimizer_;
  WarmupOptions options_;
  const char* name_;
  std::vector<double> full_rates_;
};

/// Learning rates that grow linearly in warmup_steps and then fall along half a cosine; see
/// WarmupScheduler.
///
///     torchamp::WarmupCosine rates(optimizer, {.warmup_steps = 100, .total_steps = 10000});
///     torchamp::TrainingStep train(model, optimizer, {.scheduler = rates});
class WarmupCosine final : public WarmupScheduler {
 public:
  /// Sets the rates of the first step. Errors: options that are out of range.
  WarmupCosine(torch::optim::Optimizer& optimizer, const WarmupOptions& options)
      : WarmupScheduler(optimizer, options, "WarmupCosine") {}

 private:
  double decay(double progress) const override {
    return 0.5 * (1. + std::cos(std::numbers::pi * progress));
  }
};

/// Learning rates that grow linearly in warmup_steps and then fall linearly; see WarmupScheduler.
class WarmupLinear final : public WarmupScheduler {
 public:
  /// Sets the rates of the first step. Errors: options that are out of range.
  WarmupLinear(torch::optim::Optimizer& optimizer, const WarmupOptions& options)
      : WarmupScheduler(optimizer, options, "WarmupLinear") {}

 private:
  double decay(double progress) const override { return 1. - progress; }
};

}  // namespace TORCHAMP_NAMESPACE
