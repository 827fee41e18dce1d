// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/torchamp.h>
#include <torchamp/weight_cache.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "benchmark/comparison/measure.h"
#include "benchmark/comparison/raw_autocast.h"
#include "benchmark/comparison/way.h"
#include "benchmark/workload.h"

/// Predicts with a workload's model in one of the ways of this language, as a server does: in
/// inference mode, a guard around each call. Python's twin is in worker.py.
class Predictor {
 public:
  Predictor(std::unique_ptr<Workload> workload, const Way& way, at::Device device)
      : workload_(std::move(workload)), way_(way), device_(device) {
    torch::nn::Module& module = workload_->module();
    initialize(module, 0);
    torch::manual_seed(1);
    for (int i = 0; i < batches; ++i) {
      inputs_.emplace_back();
      for (const at::Tensor& input : workload_->make_batch()) {
        inputs_.back().push_back(input.to(device));
      }
    }
    module.to(device);
    module.eval();
    if (way.casts == "cast") {
      module.to(dtype_of(way));
      for (auto& batch : inputs_) {
        for (at::Tensor& input : batch) {
          if (input.is_floating_point()) input = input.to(dtype_of(way));
        }
      }
    }
    options_.dtype = dtype_of(way);
    options_.policy = policy_of(way);
    if (way.casts.ends_with("_kept")) options_.cache = torchamp::WeightCache::kept;
    const RunClock clock(device);
    call(inputs_.front());
    first_call_ = clock.read().seconds;
  }

  std::int64_t parameter_count() const { return count_parameters(workload_->module()); }
  /// Seconds of the first call, which casts what later ones find.
  double first_call() const { return first_call_; }

  /// Calls the model. The losses are the mean size of what the last call and the first one say, a
  /// number to know a wrong way by.
  RunResult run(std::int64_t calls) {
    at::Tensor first, last;
    const RunClock clock(device_);
    for (std::int64_t i = 0; i < calls; ++i) {
      last = call(inputs_[static_cast<std::size_t>(i) % inputs_.size()]);
      if (i == 0) first = last;
    }
    RunResult result = clock.read();
    const auto size = [](const at::Tensor& t) { return t.to(at::kFloat).abs().mean(); };
    result.loss = size(last).item<double>();
    result.first_loss = size(first).item<double>();
    return result;
  }

 private:
  /// For "narrow", every op in 16 bits, as in a model that was cast: what comes out of an embedding
  /// is cast, and a bias in fp32 where a product in 16 bits takes it up.
  static torchamp::Policy policy_of(const Way& way) {
    if (way.casts.starts_with("standard")) return torchamp::Policy::standard();
    torchamp::Policy policy = torchamp::Policy::torch();
    if (way.casts.starts_with("narrow")) policy.lower_precision("embedding").promote("add_");
    return policy;
  }

  static constexpr int batches = 4;  // different ones, again and again

  at::Tensor call(const std::vector<at::Tensor>& batch) {
    const c10::InferenceMode inference;
    if (way_.casts == "fp32" || way_.casts == "cast") return workload_->predict(batch);
    if (way_.casts == "raw") {
      const RawAutocast autocast(device_.type(), dtype_of(way_));
      return workload_->predict(batch);
    }
    const torchamp::AutocastGuard autocast(device_.type(), options_);
    return workload_->predict(batch);
  }

  std::unique_ptr<Workload> workload_;
  Way way_;
  at::Device device_;
  torchamp::AutocastOptions options_;
  std::vector<std::vector<at::Tensor>> inputs_;
  double first_call_ = 0.;
};
