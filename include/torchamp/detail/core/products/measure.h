// SPDX-License-Identifier: BSD-3-Clause
// Which products a CPU is slow in.
#pragma once

#include <ATen/Config.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/runtime/native_kernel.h"
#include "torchamp/detail/core/runtime/runtime.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Ops for a measurement: without the state of the thread, unknown to profilers, and on one thread:
/// while other programs use the cores, several wait for each other, in fp32 as long as in 16 bits.
/// (If LibTorch is built without OpenMP, the first number of threads is final, so it stays.)
class PlainOps {
 public:
  PlainOps() {
    // The number holds for the calling thread, and for threads that begin to compute later. The
    // second call, of another thread, takes it back for the latter alone.
    set_threads(1);
    std::thread([this] { set_threads(threads_); }).join();
  }
  PlainOps(const PlainOps&) = delete;
  PlainOps& operator=(const PlainOps&) = delete;
  ~PlainOps() { set_threads(threads_); }

 private:
  static void set_threads(int threads) {
    if (AT_PARALLEL_OPENMP) at::set_num_threads(threads);
  }

  NoWarning of_threads_that_are_set_late_{""};
  int threads_ = at::get_num_threads();
  InternalOps internal_;
  c10::impl::ForceDispatchKeyGuard no_modes_{c10::default_included_set, c10::default_excluded_set};
  at::DisableRecordFunctionGuard not_recorded_;
};

/// Calls the CPU's kernel of an op, without the dispatcher.
inline void call_on_cpu(const char* name, torch::jit::Stack& stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  kernel_of(op, c10::DispatchKey::CPU)
      .callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

/// The least time of some calls, after one that is not counted.
template <class F>
double least_seconds(const F& call) {
  using Clock = std::chrono::steady_clock;
  call();
  double least = std::numeric_limits<double>::max(), all = 0;
  // Other programs make single calls slow.
  for (int i = 0; i < 20 && (i < 5 || all < 5e-3); ++i) {
    const auto begin = Clock::now();
    call();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    least = std::min(least, seconds);
    all += seconds;
  }
  return least;
}

// Note [Slow products]
// A measurement computes a product by LibTorch's kernel and in fp32. Of the time in fp32,
// LibTorch's matrices took 0.2 (bf16 with AMX), 0.95 (fp16 with avx512_fp16), 1.7 (bf16 with
// avx512_bf16 alone), 4.5 (bf16 with avx512 alone) and 30 to 100 (avx2); its convolutions in
// training 0.5 (bf16 with AMX) and more than 100 (fp16, on each CPU). The limit is between these
// clusters, so that noise does not decide: two runs of a program on one machine compute the same.
inline constexpr double slow_ratio = 2.8;

/// Whether a product in `dtype` takes much longer than in fp32. `product` takes the dtype of its
/// operands.
template <class F>
bool is_slower(at::ScalarType dtype, const F& product) {
  const double in_fp32 = least_seconds([&] { product(at::kFloat); });
  return least_seconds([&] { product(dtype); }) > slow_ratio * in_fp32;
}

inline bool multiplies_slowly(at::ScalarType dtype) {
  const at::Tensor left = at::ones({64, 256}, dtype), right = at::ones({256, 256}, dtype);
  return is_slower(dtype, [&](at::ScalarType in) {
    torch::jit::Stack stack{left.to(in), right.to(in)};
    call_on_cpu("aten::mm", stack);
    (void)stack.back().toTensor().to(dtype);
  });
}

/// Measures the backward pass: LibTorch has fast convolutions in fp16 only for inference.
inline bool convolves_slowly(at::ScalarType dtype) {
  const at::Tensor input = at::ones({1, 16, 16, 16}, dtype),
                   weight = at::ones({16, 16, 3, 3}, dtype);
  const std::vector<int64_t> ones{1, 1}, zeros{0, 0};
  return is_slower(dtype, [&](at::ScalarType in) {
    const at::Tensor x = input.to(in);
    torch::jit::Stack stack{x,
                            x,
                            weight.to(in),
                            c10::IValue(),
                            ones,
                            ones,
                            ones,
                            false,
                            zeros,
                            int64_t{1},
                            std::vector<bool>{true, true, false}};
    call_on_cpu("aten::convolution_backward", stack);
  });
}

/// Whether LibTorch's LSTM of one cell runs in `dtype`, forward and backward. An LSTM ends in
/// oneDNN's, which throws where oneDNN has none for the CPU's instructions (on x86, bf16 takes
/// avx512, and fp16 avx512_fp16 or AMX). ONEDNN_MAX_CPU_ISA and other settings also decide.
inline bool runs_lstm(at::ScalarType dtype) try {
  const at::Tensor input = at::zeros({1, 1, 1}, dtype), weight = at::zeros({4, 1}, dtype),
                   bias = at::zeros({4}, dtype), state = at::zeros({1, 1, 1}, dtype);
  const std::vector<int64_t> no_batch_sizes;
  const int64_t lstm = 2;
  torch::jit::Stack forward{input, weight, weight,         bias, bias,       state,
                            state, false,  no_batch_sizes, lstm, int64_t{1}, int64_t{1},
                            true,  false,  false,          true};
  call_on_cpu("aten::mkldnn_rnn_layer", forward);
  const auto result = [&](std::size_t i) -> const at::Tensor& { return forward[i].toTensor(); };
  torch::jit::Stack backward{
      input,      weight,    weight,    bias,      bias,           state, state,    result(0),
      result(1),  result(2), result(0), result(1), result(2),      false, lstm,     int64_t{1},
      int64_t{1}, true,      true,      false,     no_batch_sizes, false, result(3)};
  call_on_cpu("aten::mkldnn_rnn_layer_backward", backward);
  return true;
} catch (...) {  // oneDNN's errors are none of LibTorch's
  return false;
}

/// Whether LibTorch takes much longer for such products in `dtype` than in fp32, or has none. Takes
/// some milliseconds.
inline bool is_slow_in(ProductFamily family, at::ScalarType dtype) {
  const PlainOps plain;
  if (family == ProductFamily::layers) return !runs_lstm(dtype);
  return family == ProductFamily::matrices ? multiplies_slowly(dtype) : convolves_slowly(dtype);
}

}  // namespace TORCHAMP_NAMESPACE::detail
