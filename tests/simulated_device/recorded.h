// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "simulated_device/capture.h"

namespace simulated {

/// Device tensors as CPU tensors over the same bytes, which keep nothing alive: for what a graph
/// does later.
class LaterView {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::map<const void*, at::Tensor> tensors_;
  std::map<const void*, c10::Storage> storages_;
};

/// Notes in `capture` that `move_bytes` is to be done, with CPU tensors over the bytes of `from`
/// and `to`, each of which is on the device or keeps its own memory.
void record_copy(
    Capture& capture, std::string what, const at::Tensor& from, const at::Tensor& to,
    std::function<void(const at::Tensor& from, const at::Tensor& to, int64_t stream)> move_bytes);

/// A kernel, as it is recorded: made from its arguments before it is rehearsed, and from its
/// results afterwards.
class RecordedKernel {
 public:
  RecordedKernel(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args, int64_t kernels,
                 std::function<void(torch::jit::Stack*)> instead);

  /// The argument at `index` is a generator to draw from.
  void draws_from(std::size_t index, at::Generator generator) {
    generators_.emplace_back(index, std::move(generator));
  }
  /// Its next result: its own memory, or undefined for an argument, or a view of one.
  void returns(const at::Tensor& fresh) { results_.push_back(fresh); }

  void record(Capture& capture) &&;

 private:
  c10::OperatorHandle op_;
  torch::jit::Stack args_;
  int64_t kernels_;
  std::function<void(torch::jit::Stack*)> instead_;
  std::vector<std::pair<std::size_t, at::Generator>> generators_;
  std::vector<at::Tensor> results_;
};

}  // namespace simulated
