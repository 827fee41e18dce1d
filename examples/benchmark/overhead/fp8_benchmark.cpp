// SPDX-License-Identifier: BSD-3-Clause
// A linear layer of 1024 x 1024 x 1024, forward and backward, in bf16 and in every fp8 recipe, as a
// CPU rehearses it. Compare processor times, or instructions by --benchmark_perf_counters.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <torchamp/labs/fp8.h>
#include <torchamp/torchamp.h>

namespace {

using torchamp::Fp8Recipe;
using torchamp::Policy;

void linear(benchmark::State& state, const Policy& policy) {
  at::set_num_threads(1);
  at::manual_seed(1);
  const at::Tensor x = at::randn({1024, 1024}).to(at::kBFloat16).requires_grad_();
  const at::Tensor w = at::randn({1024, 1024}).requires_grad_();
  const at::Tensor gradient = at::randn({1024, 1024}).to(at::kBFloat16);
  for (auto _ : state) {
    x.mutable_grad() = w.mutable_grad() = at::Tensor();
    const torchamp::AutocastGuard guard(at::kCPU, {.dtype = at::kBFloat16, .policy = policy});
    at::linear(x, w).backward(gradient);
  }
}

Policy fp8(Fp8Recipe recipe) {
  return torchamp::fp8(Policy::standard(), torchamp::ops::dense, {.recipe = recipe});
}

BENCHMARK_CAPTURE(linear, bf16, Policy::standard())->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(linear, tensorwise, fp8(Fp8Recipe::tensorwise))->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(linear, rowwise, fp8(Fp8Recipe::rowwise))->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(linear, blockwise, fp8(Fp8Recipe::blockwise))->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(linear, mxfp8, fp8(Fp8Recipe::mxfp8))->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(linear, nvfp4, fp8(Fp8Recipe::nvfp4))->Unit(benchmark::kMillisecond);

}  // namespace
