// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "torchamp/ops.h"

namespace torchamp::detail {

// Note [Recurrent layers]
// On CUDA, lstm, gru, rnn_tanh and rnn_relu end in _cudnn_rnn, whose autocast kernel casts to fp16
// whatever the region's dtype is. So on CUDA, and where its lists are followed, Policy::standard()
// casts the layers' own arguments, which cuDNN then takes as they are. The casts of the weights no
// longer lie in one piece of memory as cuDNN wants them: each call puts them together, as
// LibTorch's autocast kernel does, but with a warning, which is dropped as nothing can be done.
//
// On a CPU an LSTM ends in oneDNN's, whose autocast kernel casts to the region's dtype also where
// oneDNN has none in it (bf16 takes avx512, fp16 avx512_fp16 or AMX), and throws. So there
// Policy::standard() runs the layers in fp32, all four by one rule: the others are made of
// products, which such a CPU is slow in. What counts is not the CPU but whether oneDNN makes an
// LSTM, which ONEDNN_MAX_CPU_ISA and other settings decide with it; so one of one cell is tried.

/// The recurrent layers.
inline constexpr std::string_view recurrent_layer_ops[] = {"lstm", "gru", "rnn_tanh", "rnn_relu"};
inline constexpr OpFamily recurrent_layer("recurrent_layer", recurrent_layer_ops);

/// Whether LibTorch's autocast runs an LSTM in `dtype` on a CPU, forward and backward. In a thread
/// of its own, where nothing of the caller's state is in force.
inline bool autocast_runs_lstm_on_cpu(at::ScalarType dtype) {
  bool runs = false;
  std::thread([&] {
    const at::DisableRecordFunctionGuard not_recorded;
    at::autocast::set_autocast_cache_enabled(false);  // all threads share it
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    try {
      const auto ones = [](at::IntArrayRef sizes) {
        return at::ones(sizes, at::TensorOptions(at::kCPU).dtype(at::kFloat)).requires_grad_();
      };
      const std::vector<at::Tensor> weights{ones({4, 1}), ones({4, 1}), ones({4}), ones({4})};
      const at::Tensor hidden = ones({1, 1, 1});
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const auto result = at::lstm(ones({1, 1, 1}), {hidden, hidden}, weights, /*has_biases=*/true,
                                   /*num_layers=*/1, /*dropout=*/0., /*train=*/true,
                                   /*bidirectional=*/false, /*batch_first=*/false);
      at::autocast::set_autocast_enabled(at::kCPU, false);
      std::get<0>(result).sum().backward();
      runs = true;
    } catch (...) {  // oneDNN's errors are none of LibTorch's
    }
  }).join();
  return runs;
}

/// Whether a device has recurrent layers in `dtype`, fp16 or bf16; only CPUs may lack them. The
/// first call for a CPU and a dtype tries. Any thread. While oneDNN is switched off, LibTorch makes
/// the layers of products, which all CPUs have.
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
  TORCH_WARN_ONCE(
      "torchamp: this CPU has no LSTM in ", dtype,
      " (oneDNN has none for its instructions), so LSTMs, GRUs and RNNs run in fp32 here under "
      "Policy::standard(). Policy::effect tells of a layer; Policy::fp32(ops::recurrent) says the "
      "same without this warning, and under Policy::torch() an LSTM throws.");
}

}  // namespace torchamp::detail
