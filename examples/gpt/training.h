// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/labs/policy_file.h>
#include <torchamp/labs/precision_audit.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_checkpoint.h>
#include <torchamp/training_step.h>
#include <torchamp/weight_cache.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <memory>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/processes.h"
#include "gpt/text.h"
#include "support/arguments.h"
#include "support/format.h"
#include "support/progress_bar.h"

/// Matrices are decayed; norms and biases are not.
inline std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const Gpt& model) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : model->parameters()) {
    (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  }
  const auto options = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), options(0.1));
  groups.emplace_back(std::move(vectors), options(0.));
  return groups;
}

/// Of step `step` from 0: rises evenly in the first tenth of the steps (in 100 at most), then falls
/// to a tenth along a cosine.
inline double learning_rate(std::int64_t step, std::int64_t steps) {
  constexpr double highest = 1e-3;
  const auto warm_up = std::min<std::int64_t>(100, steps / 10);
  if (step < warm_up) return highest * static_cast<double>(step + 1) / static_cast<double>(warm_up);
  const double done = static_cast<double>(step - warm_up) / static_cast<double>(steps - warm_up);
  return highest * (0.55 + 0.45 * std::cos(std::numbers::pi * done));
}

/// A run, from its start or from where its file left it.
class Training {
 public:
  Training(const Options& options, const Text& text, Processes& processes)
      : options_(options), text_(text), processes_(processes) {
    optimizer_.drop_gradients_after_step();
    train_.add_to(checkpoint_);
    checkpoint_.add("losses", losses_).add("speeds", speeds_).add("processor", processor_);
    torch::manual_seed(static_cast<std::uint64_t>(options.seed + processes.rank()));  // of batches
    processes_.load(checkpoint_);
  }

  Gpt& model() { return model_; }
  torchamp::TrainingStep& train() { return train_; }
  const torch::Tensor& losses() const { return losses_; }  ///< of each step
  const torch::Tensor& speeds() const { return speeds_; }  ///< tokens per second in each step
  /// Seconds that the host computed in all steps together.
  double processor_seconds() const { return processor_.item<double>(); }

  /// Which ops may run in 16 bits, measured with one batch.
  torchamp::AuditedPolicy audit() {
    const auto dtype = options_.device.chosen_dtype();
    const double scale = dtype == torch::kHalf ? 0x1p10 : 1.;
    const auto batch = text_.batch(options_.batch, options_.sizes.length).to(device_);
    torchamp::PrecisionAudit audit(*model_, {.dtype = dtype});
    audit.run([&] {
      const auto loss = loss_of(*model_, batch);
      loss.backward(torch::full_like(loss, scale));
    });
    return audit.policy();
  }

  /// Trains to the end. Shows its progress on the first process.
  void run() {
    using Clock = std::chrono::steady_clock;
    const bool shows = processes_.rank() == 0;
    support::ProgressBar bar("gpt", options_.steps, stdout, train_.steps());
    const double tokens = static_cast<double>(options_.batch * options_.accumulate *
                                              options_.sizes.length * processes_.count());
    std::vector<torch::Tensor> losses;  // stay on the device: reading one would wait for it
    Clock::time_point start = Clock::now();
    std::clock_t processor_start = std::clock();
    while (train_.steps() < options_.steps) {
      losses.push_back(train_one_step());
      const std::int64_t step = train_.steps();
      const bool saves = step % options_.save_every == 0 || step == options_.steps;
      if (!saves && losses.size() < 10) continue;

      const auto read = torch::stack(losses).cpu();
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      const double speed = tokens * static_cast<double>(losses.size()) / seconds;
      append(losses_, read);
      append(speeds_, torch::full_like(read, speed));
      processor_ +=
          static_cast<double>(std::clock() - processor_start) / static_cast<double>(CLOCKS_PER_SEC);
      if (shows && bar.is_due(step)) {
        bar.show(step,
                 support::format("loss %.3f  %.0f tokens/s", losses_[-1].item<double>(), speed));
      }
      losses.clear();
      if (saves) processes_.save(checkpoint_);
      start = Clock::now();
      processor_start = std::clock();
    }
  }

 private:
  /// The batches of a step cast each weight once.
  torchamp::TrainingStepOptions step_options() {
    torchamp::TrainingStepOptions options{
        .dtype = options_.mixed() ? options_.device.chosen_dtype() : torch::kFloat,
        .max_grad_norm = 1.,
        .micro_batches = options_.accumulate,
        .cache = torchamp::WeightCache::window};
    processes_.add_to(options);
    if (processes_.rank() == 0) options.log = (options_.out / "log.csv").string();
    if (options_.policy.empty()) return options;
    try {
      const auto policies = torchamp::load_policies(options_.policy);
      policies.apply_to(*model_);
      options.policy = policies.policy;
    } catch (const c10::Error& error) {
      throw support::UsageError(std::string("--policy: ") + error.what_without_backtrace());
    }
    return options;
  }

  /// One step over several batches; their mean loss.
  torch::Tensor train_one_step() {
    for (auto& group : optimizer_.param_groups()) {
      group.options().set_lr(learning_rate(train_.steps(), options_.steps));
    }
    torch::Tensor sum = torch::zeros({}, device_);
    for (std::int64_t i = 0; i < options_.accumulate; ++i) {
      const auto batch = text_.batch(options_.batch, options_.sizes.length).to(device_);
      sum += train_([&] { return loss_of(*model_, batch); }).loss_tensor();
    }
    return sum / options_.accumulate;
  }

  static void append(torch::Tensor& all, const torch::Tensor& more) {
    all = all.defined() ? torch::cat({all, more}) : more;
  }

  Gpt make_model() const {
    torch::manual_seed(static_cast<std::uint64_t>(options_.seed));
    Gpt model(options_.sizes);
    model->to(device_);
    model->recomputes = options_.recompute == "yes";
    return model;
  }

  const Options& options_;
  const Text& text_;
  Processes& processes_;
  torch::Device device_ = processes_.device_of(options_.device.chosen_device());
  Gpt model_ = make_model();
  torchamp::FusedAdamW optimizer_{parameter_groups(model_), torch::optim::AdamWOptions(1e-3)};
  torchamp::TrainingStep train_{model_, optimizer_, step_options()};
  torch::Tensor losses_, speeds_, processor_ = torch::zeros({}, torch::kDouble);
  torchamp::TrainingCheckpoint checkpoint_{options_.out / "checkpoint.pt"};
};
