// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/cuda_graph.h>
#include <torchamp/labs/policy_file.h>
#include <torchamp/labs/precision_audit.h>
#include <torchamp/labs/weights_together.h>
#include <torchamp/master_weights.h>
#include <torchamp/optim.h>
#include <torchamp/torchamp.h>
#include <torchamp/weight_cache.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/make_optimizer.h"
#include "benchmark/comparison/measure.h"
#include "benchmark/comparison/raw_autocast.h"
#include "benchmark/comparison/way.h"
#include "benchmark/weight_average.h"
#include "benchmark/workload.h"
#include "support/op_count.h"

/// Trains a workload in one of the ways of this language. Python's twin is in worker.py.
class Trainer {
 public:
  /// `policy_file`: what an audited way follows.
  Trainer(std::unique_ptr<Workload> workload, const Way& way, at::Device device,
          const std::string& policy_file = "")
      : workload_(std::move(workload)),
        recipe_(workload_->recipe()),
        way_(way),
        policy_(way.casts == "torch" ? torchamp::Policy::torch() : torchamp::Policy::standard()),
        cache_(way.variant == "together" ? torchamp::weights_together()
                                         : torchamp::WeightCache::libtorch),
        device_(device) {
    initialize(workload_->module(), 0);
    torch::manual_seed(1);
    for (std::int64_t i = 0; i < batches * recipe_.accumulate; ++i) {
      const auto batch = workload_->make_batch();
      inputs_per_batch_ = batch.size();
      if (i % recipe_.accumulate == 0) inputs_.emplace_back();
      for (const at::Tensor& input : batch) inputs_.back().push_back(input.to(device));
    }
    workload_->module().to(device);
    if (way.casts == "audited") {
      const torchamp::LoadedPolicies loaded = torchamp::load_policies(policy_file);
      policy_ = loaded.policy;
      loaded.apply_to(workload_->module());
    }
    if (way.variant == "recomputed") workload_->recompute();
    if (way.variant == "unfused") workload_->add_biases_apart();
    if (way.variant == "masters") {
      masters_.emplace(workload_->module().shared_from_this(),
                       torchamp::MasterWeightsOptions{.dtype = dtype_of(way)});
    }
    parameters_ = workload_->module().parameters();
    optimizers_ = make_optimizers(
        masters_ ? masters_->named_parameters() : named_parameters(workload_->module()), recipe_,
        way.optimizer);
    scaler_.emplace(torchamp::GradScalerOptions{.enabled = !way.is_fp32()});
    zero_ = torch::zeros({}, device);
    if (recipe_.weight_average) average_.emplace(workload_->module());
    if (way.is_captured()) {
      torchamp::CudaGraph::Optimizers optimizers;
      for (const auto& optimizer : optimizers_) optimizers.emplace_back(*optimizer);
      graph_.emplace(
          std::move(optimizers),
          [this](const std::vector<at::Tensor>& inputs) { return iterate(inputs); },
          torchamp::CudaGraphOptions{.warmup =
                                         std::max<std::int64_t>(3, recipe_.warmup_steps + 1)});
    }
  }

  std::int64_t parameter_count() const { return count_parameters(workload_->module()); }

  /// The policy that an audit chooses for the first iteration.
  torchamp::AuditedPolicy audit() {
    torchamp::PrecisionAudit audit(workload_->module(), {.dtype = dtype_of(way_)});
    const double scale = way_.dtype == "fp16" ? 0x1p10 : 1.;
    audit.run([&] {
      for (std::int64_t i = 0; i < recipe_.accumulate; ++i) {
        const at::Tensor loss = forward(micro_batch(inputs_.front(), i));
        loss.backward(torch::full_like(loss, scale / static_cast<double>(recipe_.accumulate)));
      }
    });
    return audit.policy();
  }

  /// The ops that are called for one batch's loss and its gradients, or in a `whole` step.
  support::OpCounts count_ops(bool whole) {
    const auto& inputs = inputs_.front();
    zero_grad();
    return support::count_ops([&] {
      if (whole) {
        iterate(inputs);
      } else {
        forward(micro_batch(inputs, 0)).backward();
      }
    });
  }

  /// Steps of training. The loss is their mean.
  RunResult run(std::int64_t steps) {
    at::Tensor sum = torch::zeros({}, device_), first;
    const RunClock clock(device_);
    for (std::int64_t i = 0; i < steps; ++i) {
      if (step_ <= recipe_.warmup_steps && recipe_.warmup_steps > 0) {
        warm_up(*optimizers_.front(), recipe_, step_);
      }
      const auto& inputs = inputs_[static_cast<std::size_t>(step_++) % inputs_.size()];
      const at::Tensor loss = graph_ ? (*graph_)(inputs).front() : iterate(inputs);
      if (i == 0) first = loss.clone();
      sum.add_(loss);
    }
    RunResult result = clock.read();
    result.loss = sum.item<double>() / static_cast<double>(steps);
    result.first_loss = first.item<double>();
    return result;
  }

 private:
  static constexpr std::int64_t batches = 4;  // different ones, again and again

  /// One optimizer step: the loop that a user writes. Returns the mean of its losses.
  at::Tensor iterate(const std::vector<at::Tensor>& inputs) {
    zero_grad();
    at::Tensor sum;
    for (std::int64_t i = 0; i < recipe_.accumulate; ++i) {
      at::Tensor loss = forward(micro_batch(inputs, i));
      if (recipe_.accumulate > 1) loss = loss / static_cast<double>(recipe_.accumulate);
      scaler_->scale(loss).backward();
      if (masters_) masters_->take_gradients();
      sum = i == 0 ? loss.detach() : sum + loss.detach();
    }
    if (recipe_.clip_norm > 0.) clip();
    if (average_) {
      const torchamp::StepResult result = scaler_->step(*optimizers_.front());
      scaler_->update();
      move_average(result);
    } else {
      for (const auto& optimizer : optimizers_) scaler_->step(*optimizer);
      scaler_->update();
    }
    if (masters_) masters_->copy_to_model();
    return sum;
  }

  void zero_grad() {
    for (const auto& optimizer : optimizers_) optimizer->zero_grad();
  }

  void clip() {
    const bool by_hand = way_.optimizer == "stock" && (way_.is_fp32() || way_.casts == "raw");
    if (!by_hand && optimizers_.size() == 1) {
      torchamp::clip_grad_norm_(*scaler_, *optimizers_.front(), recipe_.clip_norm);
      return;
    }
    for (const auto& optimizer : optimizers_) scaler_->unscale_(*optimizer);
    if (by_hand) {
      torch::nn::utils::clip_grad_norm_(parameters_, recipe_.clip_norm);
    } else {
      torchamp::clip_grad_norm_(parameters_, recipe_.clip_norm);
    }
  }

  std::vector<at::Tensor> micro_batch(const std::vector<at::Tensor>& inputs, std::int64_t i) const {
    const auto size = static_cast<std::ptrdiff_t>(inputs_per_batch_);
    const auto first = inputs.begin() + static_cast<std::ptrdiff_t>(i) * size;
    return {first, first + size};
  }

  at::Tensor forward(const std::vector<at::Tensor>& batch) {
    if (way_.is_fp32()) return workload_->loss(batch);
    if (way_.casts == "raw") {
      const RawAutocast autocast(device_.type(), dtype_of(way_));
      return workload_->loss(batch);
    }
    const torchamp::AutocastGuard autocast(
        device_.type(), {.dtype = dtype_of(way_), .policy = policy_, .cache = cache_});
    return workload_->loss(batch);
  }

  /// Without a read where the optimizer makes none.
  void move_average(const torchamp::StepResult& result) {
    if (way_.optimizer == "stock") {
      if (result.stepped()) average_->update();
    } else {
      average_->update(result.found_inf().defined() ? result.found_inf() : zero_);
    }
  }

  std::unique_ptr<Workload> workload_;
  Recipe recipe_;
  Way way_;
  torchamp::Policy policy_;
  torchamp::WeightCache cache_;
  at::Device device_;
  std::vector<std::vector<at::Tensor>> inputs_;  // of each iteration, batch after batch
  std::size_t inputs_per_batch_ = 0;
  std::vector<at::Tensor> parameters_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::optional<torchamp::GradScaler> scaler_;
  std::optional<torchamp::MasterWeights> masters_;
  std::optional<WeightAverage> average_;
  at::Tensor zero_;
  std::optional<torchamp::CudaGraph> graph_;
  std::int64_t step_ = 0;
};
