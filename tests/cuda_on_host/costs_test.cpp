// SPDX-License-Identifier: BSD-3-Clause
// What torchamp's steps cost in LibTorch's real CUDA code: launches, waits, copies, allocations.
// The table in examples/guide/contributors.md is what is counted here.
#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cctype>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cuda_on_host/stand_in.h"
#include "support/call_counter.h"
#include "support/contributors_page.h"
#include "support/optimizer_kinds.h"
#include "torchamp/clip_grad.h"
#include "torchamp/cuda_graph.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/master_weights.h"

#if __has_include(<nccl.h>)
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "torchamp/distributed/nccl.h"
#include "torchamp/distributed/sharded_masters.h"
#define TORCHAMP_TEST_HAS_NCCL 1
#endif

namespace {

using torchamp::GradScalerOptions;
using torchamp::MasterStorage;

/// What is counted, and what comes before it in each iteration.
struct Iteration {
  std::function<void()> before, counted;
};
using Make = std::function<Iteration(bool clips)>;

/// step() and update() of four parameters of 64 numbers, on one device or two.
Make step_of(std::function<std::unique_ptr<Optimizer>(const Groups&)> make,
             GradScalerOptions options = {}, int devices = 1) {
  return [=](bool clips) -> Iteration {
    struct State {
      explicit State(const GradScalerOptions& options) : scaler(options) {}
      std::unique_ptr<Optimizer> optimizer;
      torchamp::GradScaler scaler;
    };
    const auto state = std::make_shared<State>(options);
    Params parameters;
    for (int i = 0; i < 4; ++i) {
      const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(i % devices));
      parameters.push_back(at::ones({8, 8}, device).requires_grad_());
    }
    state->optimizer = make({OptimizerParamGroup(parameters)});
    Params gradients;
    for (const Tensor& p : parameters) gradients.push_back(at::ones_like(p));
    return {[=] {
              for (std::size_t i = 0; i < parameters.size(); ++i) {
                parameters[i].mutable_grad() = gradients[i];
              }
              state->scaler.scale(at::ones({}, at::kCUDA));
            },
            [=] {
              if (clips) torchamp::clip_grad_norm_(state->scaler, *state->optimizer, 1.);
              state->scaler.step(*state->optimizer);
              state->scaler.update();
            }};
  };
}

template <class Fused, class Options>
Make fused(const Options& options, const GradScalerOptions& scaler = {}, int devices = 1) {
  return step_of([=](const Groups& groups) { return std::make_unique<Fused>(groups, options); },
                 scaler, devices);
}
template <class Plain, class Options>
Make plain(const Options& options) {
  return step_of([=](const Groups& groups) { return std::make_unique<Plain>(groups, options); });
}

/// A bf16 model of four parameters under `Masters`, an fp32 AdamW for these, a scaler.
template <class Masters>
struct UnderMasters {
  template <class MakeMasters>
  explicit UnderMasters(const MakeMasters& make)
      : model(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8)) {
    model->to(at::kCUDA);
    masters = make(model);
    optimizer.emplace(masters->parameters(), AdamWOptions(1e-3));
  }
  void step(bool clips) {
    if (clips) torchamp::clip_grad_norm_(scaler, *optimizer, 1.);
    scaler.step(*optimizer);
    scaler.update();
    masters->copy_to_model();
  }
  Tensor loss() {
    const Tensor x = at::ones({1, 8}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
    return scaler.scale(model->forward(x).to(at::kFloat).sum());
  }
  torch::nn::Sequential model;
  std::unique_ptr<Masters> masters;
  std::optional<torchamp::FusedAdamW> optimizer;
  torchamp::GradScaler scaler{};
};

/// take_gradients(), step(), update() and copy_to_model().
Make masters(MasterStorage storage) {
  return [=](bool clips) -> Iteration {
    const auto state = std::make_shared<UnderMasters<torchamp::MasterWeights>>([&](auto& model) {
      return std::make_unique<torchamp::MasterWeights>(
          model, torchamp::MasterWeightsOptions{.dtype = at::kBFloat16, .storage = storage});
    });
    return {[=] {
              state->masters->zero_grad();
              state->loss().backward();
            },
            [=] {
              state->masters->take_gradients();
              state->step(clips);
            }};
  };
}

#if TORCHAMP_TEST_HAS_NCCL
/// step(), update() and copy_to_model() in a world of one.
Make sharded_masters(MasterStorage storage) {
  return [=](bool clips) -> Iteration {
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(
        c10::make_intrusive<c10d::HashStore>(), /*rank=*/0, /*size=*/1);
    torchamp::add_nccl(*group);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
    const auto state =
        std::make_shared<UnderMasters<torchamp::ShardedMasterWeights>>([&](auto& model) {
          return std::make_unique<torchamp::ShardedMasterWeights>(
              model, group,
              torchamp::ShardedMasterWeightsOptions{.dtype = at::kBFloat16, .storage = storage});
        });
    return {[=] {
              state->optimizer->zero_grad();
              state->loss().backward();
            },
            [=] { state->step(clips); }};
  };
}
#endif

/// A whole iteration of two parameters as a graph: one launch.
Make replay() {
  return [](bool clips) -> Iteration {
    struct State {
      Tensor weight = at::ones({8, 8}, at::kCUDA).requires_grad_();
      Tensor bias = at::ones({8}, at::kCUDA).requires_grad_();
      torchamp::FusedAdam optimizer{{weight, bias}, AdamOptions(1e-3)};
      torchamp::GradScaler scaler{};
      std::optional<torchamp::CudaGraph> graph;
      Params batch{at::ones({8, 8}, at::kCUDA)};
    };
    const auto state = std::make_shared<State>();
    State& in = *state;
    in.graph.emplace(in.optimizer, [&in, clips](const Params& batch) {
      in.optimizer.zero_grad();
      const Tensor loss = at::addmm(in.bias, batch[0], in.weight).sum();
      in.scaler.scale(loss).backward();
      if (clips) torchamp::clip_grad_norm_(in.scaler, in.optimizer, 1.);
      in.scaler.step(in.optimizer);
      in.scaler.update();
      return loss;
    });
    return {[] {}, [state] { (*state->graph)(state->batch); }};
  };
}

constexpr int earlier = 8;  ///< iterations before the counted iteration

struct Costs {
  uint64_t earlier_waits = 0;  ///< of the host, in all iterations before
  StandInCounts counts{};
  int64_t allocations = 0, bytes = 0;  ///< of LibTorch's caching allocators
  int ops = 0;                         ///< that the host has called, within others, too
};

/// Of one iteration, when the ones before it have made all that is made once.
Costs costs_of(const Iteration& iteration) {
  using c10::CachingDeviceAllocator::DeviceStats;
  const auto totals = [] {
    std::pair<int64_t, int64_t> sums;
    for (c10::DeviceIndex i = 0; i < 2; ++i) {
      const DeviceStats stats = c10::cuda::CUDACachingAllocator::getDeviceStats(i);
      sums.first += stats.allocation[0].allocated;
      sums.second += stats.allocated_bytes[0].allocated;
    }
    return sums;
  };
  Costs costs;
  StandInCounts before, after;
  for (int i = 0; i < earlier; ++i) {
    iteration.before();
    stand_in_counts(&before);
    iteration.counted();
    stand_in_counts(&after);
    costs.earlier_waits += after.waits - before.waits;
  }
  iteration.before();
  for (int64_t i = 0; i < 2; ++i) torch::cuda::synchronize(i);
  const auto [allocations, bytes] = totals();
  stand_in_counts(&before);
  {
    const CallCounter calls;
    iteration.counted();
    costs.ops = calls.called_anywhere();
  }
  StandInCounts& counts = costs.counts;
  stand_in_counts(&counts);
  costs.allocations = totals().first - allocations;
  costs.bytes = totals().second - bytes;
  counts.kernels -= before.kernels;
  counts.waits -= before.waits;
  counts.pageable -= before.pageable;
  counts.to_host -= before.to_host;
  counts.to_device -= before.to_device;
  counts.on_host -= before.on_host;
  counts.on_device -= before.on_device;
  counts.between_devices -= before.between_devices;
  counts.allocations -= before.allocations;
  counts.host_allocations -= before.host_allocations;
  counts.graph_launches -= before.graph_launches;
  counts.replayed_nodes -= before.replayed_nodes;
  return costs;
}

struct Row {
  std::string what;
  Make make;
  bool waits = false;  ///< whether the host waits for the device
};
std::ostream& operator<<(std::ostream& out, const Row& row) {
  return out << row.what;
}

std::vector<Row> rows() {
  const AdamOptions adam(1e-3);
  const AdamWOptions adamw(1e-3);
  const SGDOptions sgd(1e-3);
  std::vector<Row> all{
      {"`FusedAdam`", fused<torchamp::FusedAdam>(adam)},
      {"`FusedAdamW`", fused<torchamp::FusedAdamW>(adamw)},
      {"with `amsgrad`", fused<torchamp::FusedAdamW>(AdamWOptions(1e-3).amsgrad(true))},
      {"`FusedSGD`", fused<torchamp::FusedSGD>(sgd)},
      {"with momentum", fused<torchamp::FusedSGD>(SGDOptions(1e-3).momentum(0.9))},
      {"with dampening", fused<torchamp::FusedSGD>(SGDOptions(1e-3).momentum(0.9).dampening(0.5))},
      {"`FusedAdagrad`", fused<torchamp::FusedAdagrad>(AdagradOptions(1e-3))},
      {"`FusedMuon`", fused<torchamp::FusedMuon>(torchamp::MuonOptions(1e-3))},
      {"`FusedAdam`, `skip_non_finite()`",
       fused<torchamp::FusedAdam>(adam, GradScalerOptions::skip_non_finite())},
      {"`FusedAdam`, `fairseq()`", fused<torchamp::FusedAdam>(adam, GradScalerOptions::fairseq())},
      {"`FusedAdam`, `megatron()`",
       fused<torchamp::FusedAdam>(adam, GradScalerOptions::megatron())},
      {"`FusedAdam`, `deepspeed()`",
       fused<torchamp::FusedAdam>(adam, GradScalerOptions::deepspeed())},
      {"`FusedAdam`, `fixed(2)`", fused<torchamp::FusedAdam>(adam, GradScalerOptions::fixed(2.))},
      {"`FusedAdam`, two GPUs", fused<torchamp::FusedAdam>(adam, {}, 2)},
      {"LibTorch's `SGD`", plain<torch::optim::SGD>(sgd), true},
      {"LibTorch's `Adam`", plain<torch::optim::Adam>(adam), true},
      {"LibTorch's `AdamW`", plain<torch::optim::AdamW>(adamw), true},
      {"LibTorch's `Adagrad`", plain<torch::optim::Adagrad>(AdagradOptions(1e-3)), true},
      {"LibTorch's `RMSprop`", plain<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3)),
       true},
      {"`MasterWeights`, full, `FusedAdamW`", masters(MasterStorage::full)},
      {"`MasterWeights`, split, `FusedAdamW`", masters(MasterStorage::split)},
  };
#if TORCHAMP_TEST_HAS_NCCL
  all.push_back(
      {"`ShardedMasterWeights`, full, `FusedAdamW`", sharded_masters(MasterStorage::full)});
  all.push_back(
      {"`ShardedMasterWeights`, split, `FusedAdamW`", sharded_masters(MasterStorage::split)});
#endif
  all.push_back({"`CudaGraph`, a replay of an iteration with `FusedAdam`", replay()});
  return all;
}

class CostsOnHost : public testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(Steps, CostsOnHost, testing::ValuesIn(rows()), [](const auto& instance) {
  std::string name = instance.param.what;
  std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
  return name;
});

/// "1 to the host".
std::string copies_of(const StandInCounts& counts) {
  std::string text;
  const auto add = [&text](uint64_t copies, const char* way) {
    if (copies == 0) return;
    text += (text.empty() ? "" : ", ") + std::to_string(copies) + way;
  };
  add(counts.to_host, " to the host");
  add(counts.to_device, " to the GPU");
  add(counts.between_devices, " between GPUs");
  add(counts.on_device - counts.between_devices, " on the GPU");
  return text.empty() ? "0" : text;
}

std::string line_of(const Row& row, const Costs& plain, const Costs& clipped) {
  const auto launches = [](const Costs& costs) {
    return costs.counts.graph_launches == 0
               ? std::to_string(costs.counts.kernels)
               : "1 of " + std::to_string(costs.counts.replayed_nodes) + " nodes";
  };
  return "| " + row.what + " | " + launches(plain) + " | " + launches(clipped) + " | " +
         std::to_string(plain.counts.waits) + " | " + copies_of(plain.counts) + " | " +
         std::to_string(plain.allocations) + " | " + std::to_string(plain.bytes) + " | " +
         std::to_string(plain.ops) + " |";
}

TEST_P(CostsOnHost, AStepCostsWhatTheGuideSays) {
  const Row& row = GetParam();
  const Costs plain = costs_of(row.make(false)), clipped = costs_of(row.make(true));
  for (const Costs& costs : {plain, clipped}) {
    EXPECT_EQ(costs.counts.waits, row.waits ? 1U : 0U);
    if (costs.counts.graph_launches == 0) {
      EXPECT_EQ(costs.earlier_waits, row.waits ? earlier : 0U) << "from the first step on";
    }
    EXPECT_EQ(costs.counts.pageable, 0U);
    EXPECT_EQ(costs.counts.allocations + costs.counts.host_allocations, 0U)
        << "of CUDA, not of LibTorch's caches";
    EXPECT_GT(costs.counts.kernels + costs.counts.graph_launches, 0U);
  }
  const std::string line = line_of(row, plain, clipped);
  expect_on_contributors_page(line);
}

}  // namespace
