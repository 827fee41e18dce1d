// SPDX-License-Identifier: BSD-3-Clause
// What a guard and a kernel of torchamp's cost a call, next to the raw at::autocast calls and to
// LibTorch alone.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <benchmark/benchmark.h>
#include <torchamp/autocast.h>

namespace {

using torchamp::AutocastGuard;
using torchamp::Policy;

void raw_region() {
  const bool enabled = at::autocast::is_autocast_enabled(at::kCPU);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  const bool cache = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::increment_nesting();
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, enabled);
  at::autocast::set_autocast_dtype(at::kCPU, dtype);
  at::autocast::set_autocast_cache_enabled(cache);
}

void region_raw(benchmark::State& state) {
  for (auto _ : state) raw_region();
}
BENCHMARK(region_raw);

void region_guard(benchmark::State& state) {
  for (auto _ : state) const AutocastGuard guard(at::kCPU);
}
BENCHMARK(region_guard);

void region_nested_guard(benchmark::State& state) {
  const AutocastGuard outer(at::kCPU);
  for (auto _ : state) const AutocastGuard guard(at::kCPU);
}
BENCHMARK(region_nested_guard);

void add(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::ones({4, 4});
  for (auto _ : state) benchmark::DoNotOptimize(x + x);
}

// Registered in this order: the first runs before torchamp has kernels.
void add_before_kernels(benchmark::State& state) {
  add(state);
}
BENCHMARK(add_before_kernels);

void add_outside_guards(benchmark::State& state) {
  { const AutocastGuard installs(at::kCPU); }
  add(state);
}
BENCHMARK(add_outside_guards);

void add_with_kernel(benchmark::State& state) {
  const AutocastGuard guard(at::kCPU);
  add(state);
}
BENCHMARK(add_with_kernel);

void add_with_kernel_and_torchs_policy(benchmark::State& state) {
  const AutocastGuard guard(at::kCPU, {.policy = Policy::torch()});
  add(state);
}
BENCHMARK(add_with_kernel_and_torchs_policy);

void add_with_predicate(benchmark::State& state) {
  const auto has_two_dims = [](const torchamp::OpCall& call) {
    return call.argument("self").toTensor().dim() == 2;
  };
  const AutocastGuard guard(
      at::kCPU, {.policy = Policy::standard().fp32({"add"}, {.predicate = has_two_dims})});
  add(state);
}
BENCHMARK(add_with_predicate);

// What fp32 additions cost a residual network: forward and backward of y = x + w2 relu(w1 x), eight
// deep.
void residual(benchmark::State& state, const Policy& policy) {
  const at::Tensor x = at::rand({256, 256});
  const at::Tensor w1 = at::rand({256, 256}).mul_(0.01).requires_grad_();
  const at::Tensor w2 = at::rand({256, 256}).mul_(0.01).requires_grad_();
  for (auto _ : state) {
    // 16-bit from the start, as after a first layer: fp32 would spread through the sums by itself.
    const AutocastGuard guard(at::kCPU, {.policy = policy});
    at::Tensor y = x.mm(w1);
    for (int block = 0; block < 8; ++block) y = y + y.mm(w1).relu().mm(w2);
    y.sum().backward();
  }
}
void residual_standard(benchmark::State& state) {
  residual(state, Policy::standard());
}
void residual_torch(benchmark::State& state) {
  residual(state, Policy::torch());
}
BENCHMARK(residual_standard);
BENCHMARK(residual_torch);

}  // namespace
