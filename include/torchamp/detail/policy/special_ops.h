// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "torchamp/version.h"

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

/// Whether LibTorch's autocast runs an LSTM in `dtype` on a CPU, forward and backward. In a thread
/// of its own, where nothing of the caller's state is in force.
[[gnu::cold]] inline bool autocast_runs_lstm_on_cpu(at::ScalarType dtype) {
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

[[gnu::cold]] inline void warn_of_recurrent_layers_in_fp32(at::ScalarType dtype) {
  TORCH_WARN_ONCE(
      "torchamp: this CPU has no LSTM in ", dtype,
      " (oneDNN has none for its instructions), so LSTMs, GRUs and RNNs run in fp32 here under "
      "Policy::standard(). Policy::effect tells of a layer; Policy::fp32(ops::recurrent) says the "
      "same without this warning, and under Policy::torch() an LSTM throws.");
}

/// Drops LibTorch's warning of the calling thread that the weights of a recurrent layer are
/// scattered, and passes on all others, while it lives. See Note [Recurrent layers].
class NoWarningOfScatteredWeights final : public c10::WarningHandler {
 public:
  [[gnu::cold]] void process(const c10::Warning& warning) override {
    if (warning.msg().find("not part of single contiguous chunk") == std::string::npos) {
      outer_->process(warning);
    }
  }

 private:
  c10::WarningHandler* outer_ = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

// Note [Binary cross entropy]
// binary_cross_entropy takes probabilities, in general a sigmoid's. In 16 bits a sigmoid rounds to
// 1 from about 8.3 on in fp16 and 6.2 in bf16, and in fp16 to 0 below about -17: the loss of such
// an element is the constant 100 that LibTorch clamps the logarithm to, or 0, and its gradient is
// lost in the sigmoid, whatever the loss itself is computed in. That is why LibTorch's CUDA kernel
// for autocast refuses the op. The ban also stops programs that do it right, with a sigmoid in
// fp32, and that ran on a CPU, where there is none. So Policy::standard() computes the op in fp32
// on every device, and warns once of what the ban is for, which the dtype of the input alone tells:
// a 16-bit probability has been rounded already. Policy::torch() keeps the ban.

/// Warns once, from the dtype of the op's first argument. Reads no device.
[[gnu::cold]] inline void warn_of_16_bit_probabilities(const c10::OperatorHandle& op,
                                                       const torch::jit::Stack& stack) {
  const c10::IValue& input = stack[stack.size() - op.schema().arguments().size()];
  if (!input.isTensor() || !input.toTensor().defined()) return;
  const at::ScalarType dtype = input.toTensor().scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16) return;
  TORCH_WARN_ONCE(
      "torchamp: binary_cross_entropy was given probabilities in ", dtype,
      ". The loss is computed in fp32, but a sigmoid in 16 bits has already rounded those that are "
      "close to 0 or 1, whose gradients are then lost. Use binary_cross_entropy_with_logits, or "
      "compute the sigmoid in fp32 (torch::sigmoid(logits.to(torch::kFloat)), or "
      "Policy::fp32(\"sigmoid\")).");
}

}  // namespace torchamp::detail
