// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/labs/module_policy.h>
#include <torchamp/torchamp.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// One cost of mixed precision over one size that grows. growth.py has those of the same axis and
/// name for Python.
struct GrowingCost {
  std::string axis;  ///< "parameters": a panel of the picture
  std::string name;  ///< "unscale_"
  std::vector<std::int64_t> sizes;
  /// What is called again and again, made for a size.
  std::function<std::function<void()>(std::int64_t)> make;
};

/// Seconds of processor time of a call: the least of some rounds, since what other programs do to
/// the machine only adds.
inline double seconds_of(const std::function<void()>& call) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const auto seconds = [&](std::int64_t calls) {
    const double start = now();
    for (std::int64_t i = 0; i < calls; ++i) call();
    return (now() - start) / static_cast<double>(calls);
  };
  seconds(2);  // what is set up at first use
  const auto calls =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(5e-3 / seconds(2)), 1, 5000);
  double least = seconds(calls);
  for (int round = 1; round < 7; ++round) least = std::min(least, seconds(calls));
  return least;
}

namespace growth {

using at::Tensor;
using torch::optim::SGDOptions;

/// Optimizers whose own work is nothing: what is left is the scaler's.
struct Idle final : torch::optim::SGD {
  using SGD::SGD;
  Tensor step(LossClosure = nullptr) override { return {}; }
};
struct IdleFused final : torchamp::FusedOptimizer {
  IdleFused(const std::vector<Tensor>& parameters, const SGDOptions& options)
      : FusedOptimizer({torch::optim::OptimizerParamGroup(parameters)},
                       std::make_unique<SGDOptions>(options)) {}
  void step_fused(const Tensor&, const Tensor&, bool) override {}
};

inline std::vector<Tensor> parameters_of(std::int64_t count, std::int64_t elements) {
  std::vector<Tensor> parameters;
  for (std::int64_t i = 0; i < count; ++i) {
    parameters.push_back(torch::zeros({elements}, torch::requires_grad()));
    parameters.back().mutable_grad() = torch::zeros({elements});
  }
  return parameters;
}

enum class Before { nothing, unscale, clip };

/// A step and an update of the scaler over `count` parameters.
template <class Optimizer>
std::function<void()> step_of(std::int64_t count, std::int64_t elements, Before before) {
  struct Parts {
    Optimizer optimizer;
    torchamp::GradScaler scaler{};
    Parts(std::int64_t parameters, std::int64_t elements_of_each)
        : optimizer(parameters_of(parameters, elements_of_each), SGDOptions(1.)) {}
  };
  const auto parts = std::make_shared<Parts>(count, elements);
  return [parts, before, loss = torch::ones({})] {
    parts->scaler.scale(loss);
    if (before == Before::unscale) parts->scaler.unscale_(parts->optimizer);
    if (before == Before::clip) torchamp::clip_grad_norm_(parts->scaler, parts->optimizer, 1.);
    parts->scaler.step(parts->optimizer);
    parts->scaler.update();
  };
}

/// The step that everything here is added to: LibTorch's own.
inline std::function<void()> plain_step(std::int64_t count, std::int64_t elements) {
  auto optimizer =
      std::make_shared<torch::optim::SGD>(parameters_of(count, elements), SGDOptions(0.));
  return [optimizer] { optimizer->step(); };
}

/// The standard policy with `rules` edits of single ops.
inline torchamp::Policy policy_of(std::int64_t rules) {
  torchamp::Policy policy = torchamp::Policy::standard();
  for (const torchamp::OpFamily& family : torchamp::ops::families) {
    for (const std::string_view op : family) {
      if (rules-- <= 0) return policy;
      policy = policy.fp32(torchamp::OpFamily(op, {op}));
    }
  }
  return policy;
}

inline void nest_guards(std::int64_t depth) {
  const torchamp::AutocastGuard guard(at::kCPU, at::kBFloat16);
  if (depth > 1) nest_guards(depth - 1);
}

/// The forward pass of as many modules in a row, which do nothing, in a region.
inline std::function<void()> modules(std::int64_t count, bool have_policies) {
  torch::nn::Sequential row;
  for (std::int64_t i = 0; i < count; ++i) row->push_back(torch::nn::Identity());
  if (have_policies) torchamp::ModulePolicies({{"*", torchamp::Policy::torch()}}).apply_to(*row);
  return [row, x = torch::ones({})]() mutable {
    const torchamp::AutocastGuard guard(at::kCPU, at::kBFloat16);
    row->forward(x);
  };
}

/// Guards and scaled losses of a window, its step and its update.
inline std::function<void()> window_of(std::int64_t micro_batches) {
  auto optimizer = std::make_shared<IdleFused>(parameters_of(10, 64), SGDOptions(1.));
  auto scaler = std::make_shared<torchamp::GradScaler>();
  return [=, loss = torch::ones({})] {
    for (std::int64_t i = 0; i < micro_batches; ++i) {
      { const torchamp::AutocastGuard guard(at::kCPU, at::kBFloat16); }
      scaler->scale(loss);
    }
    scaler->step(*optimizer);
    scaler->update();
  };
}

}  // namespace growth

inline std::vector<GrowingCost> growing_costs() {
  using namespace growth;
  const std::vector<std::int64_t> counts{10, 30, 100, 300, 1000, 3000, 10000};
  const std::vector<std::int64_t> elements{10, 100, 1000, 10000, 100000, 1000000};
  const std::vector<std::int64_t> depths{1, 3, 10, 30, 100};
  std::vector<GrowingCost> costs;
  const auto add_steps = [&](const char* axis, const std::vector<std::int64_t>& sizes,
                             const auto& shape) {
    const auto add = [&](const char* name, auto make, auto... arguments) {
      costs.push_back({axis, name, sizes, [=](std::int64_t size) {
                         const auto [count, each] = shape(size);
                         return make(count, each, arguments...);
                       }});
    };
    add("optimizer.step() alone", plain_step);
    add("scaler step + update", step_of<Idle>, Before::nothing);
    add("unscale_ + step + update", step_of<Idle>, Before::unscale);
    add("clip + step + update", step_of<Idle>, Before::clip);
    add("fused step + update", step_of<IdleFused>, Before::nothing);
  };
  add_steps("parameters of 64 elements", counts,
            [](std::int64_t size) { return std::pair<std::int64_t, std::int64_t>(size, 64); });
  add_steps("elements of 10 parameters", elements,
            [](std::int64_t size) { return std::pair<std::int64_t, std::int64_t>(10, size); });
  costs.push_back({"micro-batches", "guards + scales + fused step + update", depths, window_of});
  costs.push_back({"nested regions", "guards", depths,
                   [](std::int64_t depth) { return [depth] { nest_guards(depth); }; }});
  for (const bool have_policies : {false, true}) {
    costs.push_back({"modules", have_policies ? "forward with policies" : "forward", depths,
                     [=](std::int64_t count) { return modules(count, have_policies); }});
  }
  const std::vector<std::int64_t> rules{1, 3, 10, 30, 100};
  costs.push_back({"rules of the policy", "a guard", rules, [](std::int64_t count) {
                     return [policy = policy_of(count)] {
                       const torchamp::AutocastGuard guard(
                           at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
                     };
                   }});
  costs.push_back({"rules of the policy", "mm in a region", rules, [](std::int64_t count) {
                     const torch::Tensor x = torch::ones({4, 4});
                     return [=, policy = policy_of(count)] {
                       const at::NoGradGuard no_grad;
                       const torchamp::AutocastGuard guard(
                           at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
                       for (int i = 0; i < 10; ++i) (void)x.mm(x);
                     };
                   }});
  costs.push_back(
      {"rules of the policy", "a new policy and its first guard", rules, [](std::int64_t count) {
         return [count] {
           const torchamp::AutocastGuard guard(
               at::kCPU, {.dtype = at::kBFloat16, .policy = policy_of(count)});
         };
       }});
  return costs;
}
