// SPDX-License-Identifier: BSD-3-Clause
#include "benchmark/comparison/group_worker.h"

#include <torch/torch.h>
#include <torch/version.h>
#include <torchamp/distributed/process_group.h>
#include <torchamp/distributed/sharded_masters.h>
#include <torchamp/distributed/training_group.h>
#include <torchamp/torchamp.h>
#include <torchamp/training_step.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/comparison/make_optimizer.h"
#include "benchmark/comparison/measure.h"
#include "benchmark/comparison/sent_bytes.h"
#include "benchmark/models.h"
#include "support/format.h"

namespace {

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Moments of a step.
struct Marks {
  double start = 0., forward = 0., backward = 0., end = 0.;
};

/// Trains a workload with the others of a group. Python's twin is in worker_processes.py.
class GroupTrainer {
 public:
  GroupTrainer(std::unique_ptr<Workload> workload, const GroupWorkerOptions& options,
               const torchamp::ProcessGroupPtr& group)
      : workload_(std::move(workload)), recipe_(workload_->recipe()) {
    initialize(workload_->module(), 0);
    torch::manual_seed(1 + static_cast<std::uint64_t>(group->getRank()));
    for (std::int64_t i = 0; i < batches * recipe_.accumulate; ++i) {
      inputs_.push_back(workload_->make_batch());
    }
    parameters_ = count_parameters(workload_->module());
    train_.emplace(
        workload_->module().shared_from_this(),
        [this](const torchamp::TrainingStep::NamedParameters& named) {
          return make_optimizer(named, recipe_, /*fused=*/true);
        },
        step_options(options, group));
  }

  std::int64_t parameter_count() const { return parameters_; }

  /// Steps of training. The loss is their mean.
  RunResult run(std::int64_t steps) {
    at::Tensor sum = torch::zeros({}), first;
    const RunClock clock(at::kCPU);
    for (std::int64_t i = 0; i < steps; ++i) {
      const at::Tensor loss = iterate();
      if (i == 0) first = loss.clone();
      sum.add_(loss);
    }
    RunResult result = clock.read();
    result.loss = sum.item<double>() / static_cast<double>(steps);
    result.first_loss = first.item<double>();
    return result;
  }

  /// One step, and when what of it was done.
  Marks trace() {
    Marks marks;
    marks_ = &marks;
    marks.start = monotonic_seconds();
    iterate();
    marks.end = monotonic_seconds();
    marks_ = nullptr;
    return marks;
  }

 private:
  static constexpr std::int64_t batches = 4;  // different ones, again and again

  torchamp::TrainingStepOptions step_options(const GroupWorkerOptions& options,
                                             const torchamp::ProcessGroupPtr& group) const {
    const bool is_narrow = options.way.variant.ends_with("_16");
    const at::ScalarType dtype = dtype_of(options.way);
    torchamp::TrainingStepOptions step{.dtype = dtype, .micro_batches = recipe_.accumulate};
    if (recipe_.clip_norm > 0.) step.max_grad_norm = recipe_.clip_norm;
    torchamp::DistributedDataParallelOptions sharing;
    torchamp::ShardedMasterWeightsOptions masters{.dtype = dtype};
    if (is_narrow) sharing.reduce_dtype = masters.reduce_dtype = dtype;
    if (options.bucket_bytes > 0) {
      sharing.bucket_bytes = masters.bucket_bytes = options.bucket_bytes;
    }
    if (options.way.variant.starts_with("sharded")) {
      step.masters = masters;
      step.group = group;
    } else {
      step.group = {group, sharing};
    }
    return step;
  }

  /// One optimizer step. Returns the mean of its losses.
  at::Tensor iterate() {
    at::Tensor sum;
    for (std::int64_t i = 0; i < recipe_.accumulate; ++i) {
      const auto& inputs = inputs_[next_++ % inputs_.size()];
      const at::Tensor loss = (*train_)([&] { return loss_of(inputs); }).loss_tensor();
      sum = i == 0 ? loss : sum + loss;
    }
    return recipe_.accumulate > 1 ? sum / static_cast<double>(recipe_.accumulate) : sum;
  }

  at::Tensor loss_of(const std::vector<at::Tensor>& inputs) {
    at::Tensor loss = workload_->loss(inputs);
    if (!marks_) return loss;
    marks_->forward = monotonic_seconds();
    loss.register_hook([this](const at::Tensor& /*gradient*/) {
      torch::autograd::Engine::get_default_engine().queue_callback(
          [this] { marks_->backward = monotonic_seconds(); });
    });
    return loss;
  }

  std::unique_ptr<Workload> workload_;
  Recipe recipe_;
  std::vector<std::vector<at::Tensor>> inputs_;  // of each micro-batch
  std::int64_t parameters_ = 0;
  std::optional<torchamp::TrainingStep> train_;
  std::size_t next_ = 0;
  Marks* marks_ = nullptr;
};

/// Answers what comes in, until the input ends.
void answer(GroupTrainer& trainer, const SentBytes& sent, std::int64_t bytes_before) {
  using support::format;
  std::string command;
  std::int64_t steps = 0;
  while (std::cin >> command >> steps) {
    trainer.run(2);
    if (command == "trace") {
      sent.log(true);
      const Marks marks = trainer.trace();
      const auto entries = sent.entries();
      sent.log(false);
      std::cout << format("traced start=%.9f forward=%.9f backward=%.9f end=%.9f sent=",
                          marks.start, marks.forward, marks.backward, marks.end);
      for (std::size_t i = 0; i < entries.size(); ++i) {
        std::cout << format(i == 0 ? "%.9f:%lld" : ",%.9f:%lld", entries[i].first,
                            static_cast<long long>(entries[i].second));
      }
      std::cout << std::endl;
      continue;
    }
    const std::int64_t sent_before = sent.total();
    const RunResult result = trainer.run(steps);
    const std::int64_t sent_bytes = sent_before < 0 ? -1 : sent.total() - sent_before;
    std::cout << format("ran seconds=%.9g processor=%.9g loss=%.9g first=%.9g peak=%lld sent=%lld",
                        result.seconds, result.processor, result.loss, result.first_loss,
                        static_cast<long long>(process_memory("VmHWM") - bytes_before),
                        static_cast<long long>(sent_bytes))
              << std::endl;
  }
}

[[noreturn]] void fail(std::string reason) {
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  std::cout << "error " << reason << std::endl;
  std::_Exit(1);  // at once: the others of the group wait for this one
}

}  // namespace

int serve_in_group(const GroupWorkerOptions& options) {
  torchamp::ProcessGroupPtr group;
  std::optional<GroupTrainer> trainer;
  try {
    if (options.threads > 0) torch::set_num_threads(static_cast<int>(options.threads));
    group = torchamp::make_process_group({.timeout = std::chrono::minutes(5)});
    // What the libraries load and set up on first use is not a model's memory.
    const Sizes tiny{{"batch", 1}, {"length", 4}, {"layers", 1}, {"width", 8}, {"heads", 1}};
    GroupTrainer(find_model("gpt").make(tiny), options, group).run(1);
    const std::int64_t before = process_memory("VmRSS");
    trainer.emplace(find_model(options.model).make(options.sizes), options, group);
    std::cout << support::format("ready parameters=%lld libtorch=%s first_call=0",
                                 static_cast<long long>(trainer->parameter_count()), TORCH_VERSION)
              << std::endl;
    answer(*trainer, SentBytes(), before);
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  }
  return 0;
}
