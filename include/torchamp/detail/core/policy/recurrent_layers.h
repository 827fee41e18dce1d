// SPDX-License-Identifier: BSD-3-Clause
// Which 16-bit recurrent layers a device has.
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

#include <atomic>
#include <thread>
#include <tuple>

#include "torchamp/detail/core/base/text.h"

namespace torchamp::detail {

// Note [Recurrent layers]
// On CUDA, lstm, gru, rnn_tanh and rnn_relu end in _cudnn_rnn, whose autocast kernel casts to fp16
// whatever the region's dtype is. So where CUDA's lists are followed, Policy::standard() casts the
// layers' own arguments. The casts of the weights then do not lie in one piece of memory as cuDNN
// wants them: each call puts them together, with a warning, which is dropped.
//
// On a CPU an LSTM ends in oneDNN's, whose autocast kernel throws where oneDNN has none in the
// region's dtype (bf16 takes avx512, fp16 avx512_fp16 or AMX). So there Policy::standard() runs the
// layers in fp32, all four by one rule: the others are made of products, which such a CPU is slow
// in. ONEDNN_MAX_CPU_ISA and other settings also decide whether oneDNN makes an LSTM; so one of one
// cell is tried.

/// Runs an LSTM on a CPU under LibTorch's autocast in `dtype`, forward and backward. In a thread of
/// its own, where nothing of the caller's state is in force.
inline void run_lstm_on_cpu(at::ScalarType dtype, bool* runs) try {
  const at::DisableRecordFunctionGuard not_recorded;
  at::autocast::set_autocast_cache_enabled(false);  // all threads share it
  at::autocast::set_autocast_dtype(at::kCPU, dtype);
  const at::Tensor cell = at::zeros({1, 1, 1}, at::kFloat);
  const at::Tensor weight = at::zeros({4, 1}, at::kFloat).requires_grad_();
  const at::Tensor bias = at::zeros({4}, at::kFloat).requires_grad_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto result = at::lstm(cell, {cell, cell}, {weight, weight, bias, bias},
                               /*has_biases=*/true, /*num_layers=*/1, /*dropout=*/0.,
                               /*train=*/true, /*bidirectional=*/false, /*batch_first=*/false);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  std::get<0>(result).sum().backward();
  *runs = true;
} catch (...) {  // oneDNN's errors are none of LibTorch's
}

inline bool autocast_runs_lstm_on_cpu(at::ScalarType dtype) {
  bool runs = false;
  std::thread(run_lstm_on_cpu, dtype, &runs).join();
  return runs;
}

/// Whether a device has recurrent layers in `dtype`, fp16 or bf16; only CPUs may lack them, and
/// none while oneDNN is switched off. The first call for a CPU and a dtype tries. Any thread.
inline bool has_recurrent_layers(at::DeviceType device, at::ScalarType dtype) {
  if (device != at::kCPU || !at::globalContext().userEnabledMkldnn()) return true;
  if (dtype == at::kBFloat16) {
    static const bool bf16 = autocast_runs_lstm_on_cpu(at::kBFloat16);
    return bf16;
  }
  static const bool fp16 = autocast_runs_lstm_on_cpu(at::kHalf);
  return fp16;
}

inline void warn_of_recurrent_layers_in_fp32(at::ScalarType dtype) {
  static std::atomic<bool> is_known = false;
  warn_once(
      is_known,
      {"torchamp: this CPU has no LSTM in ", c10::toString(dtype),
       " (oneDNN has none for its instructions), so LSTMs, GRUs and RNNs run in fp32 here under "
       "Policy::standard(). Policy::effect tells of a layer; Policy::fp32(ops::recurrent) says "
       "the same without this warning. Policy::torch() throws for an LSTM of unpacked input."});
}

}  // namespace torchamp::detail
