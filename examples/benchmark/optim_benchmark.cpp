// SPDX-License-Identifier: BSD-3-Clause
// What a step costs on the host, for 10, 100 and 1000 small parameters (64 elements each) and for
// ten large ones (6400 each): LibTorch's own optimizers, the fused ones alone and under a
// GradScaler, and clipping. optim_benchmark.py compares them with Python's.
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <torch/torch.h>
#include <torchamp/clip_grad.h>
#include <torchamp/grad_scaler.h>
#include <torchamp/optim.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

using Optimizer = torch::optim::Optimizer;
using Params = std::vector<torch::Tensor>;

struct Sizes {
  std::string name;
  int64_t count, elements;
};

const std::vector<Sizes> all_sizes{
    {"10", 10, 64}, {"100", 100, 64}, {"1000", 1000, 64}, {"10_large", 10, 6400}};

Params make_params(const Sizes& sizes) {
  Params params;
  for (int64_t i = 0; i < sizes.count; ++i) {
    params.push_back(torch::randn({sizes.elements}).requires_grad_());
    params.back().mutable_grad() = torch::randn({sizes.elements});
  }
  return params;
}

using Step = std::function<void(Optimizer&)>;

template <class Kind, class Options>
void add_steps(const std::string& name, const Options& options, const Step& step) {
  for (const Sizes& sizes : all_sizes) {
    benchmark::RegisterBenchmark((name + '/' + sizes.name).c_str(), [=](benchmark::State& state) {
      Kind optimizer(make_params(sizes), options);
      step(optimizer);  // makes the state
      for (auto _ : state) step(optimizer);
    });
  }
}

template <class Plain, class Fused, class Options>
void add_optimizer(const std::string& name, const Options& options) {
  const Step alone = [](Optimizer& optimizer) { optimizer.step(); };
  add_steps<Plain>(name + "/libtorch", options, alone);
  add_steps<Fused>(name + "/fused", options, alone);

  // Scaled by 1, so that gradients do not shrink from step to step.
  const auto scaler = std::make_shared<torchamp::GradScaler>(
      torchamp::GradScalerOptions{.init_scale = 1., .growth_interval = 1'000'000'000});
  scaler->scale(torch::ones({}));
  const Step scaled = [scaler](Optimizer& optimizer) {
    scaler->step(optimizer);
    scaler->update();
  };
  add_steps<Plain>(name + "/libtorch_scaled", options, scaled);
  add_steps<Fused>(name + "/fused_scaled", options, scaled);
  add_steps<Fused>(name + "/fused_scaled_clipped", options, [scaler, scaled](Optimizer& optimizer) {
    torchamp::clip_grad_norm_(*scaler, optimizer, 1e6);
    scaled(optimizer);
  });
}

void add_clipping(const std::string& name, const std::function<void(const Params&)>& clip) {
  for (const Sizes& sizes : all_sizes) {
    benchmark::RegisterBenchmark((name + '/' + sizes.name).c_str(), [=](benchmark::State& state) {
      const Params params = make_params(sizes);
      for (auto _ : state) clip(params);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  at::set_num_threads(1);
  using namespace torch::optim;
  add_optimizer<Adam, torchamp::FusedAdam>("adam", AdamOptions(1e-6));
  add_optimizer<AdamW, torchamp::FusedAdamW>("adamw", AdamWOptions(1e-6));
  add_optimizer<SGD, torchamp::FusedSGD>("sgd", SGDOptions(1e-6).momentum(0.9));
  add_optimizer<Adagrad, torchamp::FusedAdagrad>("adagrad", AdagradOptions(1e-6));
  add_clipping("clip_norm/libtorch",
               [](const Params& params) { torch::nn::utils::clip_grad_norm_(params, 1e6); });
  add_clipping("clip_norm/torchamp",
               [](const Params& params) { torchamp::clip_grad_norm_(params, 1e6); });
  add_clipping("clip_value/torchamp",
               [](const Params& params) { torchamp::clip_grad_value_(params, 1e6); });
  benchmark::RunSpecifiedBenchmarks();
}
