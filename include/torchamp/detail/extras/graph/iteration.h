// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/observe/observer.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Tensors at fixed addresses for the batches, whose shapes the first batch determines.
class StaticInputs {
 public:
  explicit StaticInputs(c10::Device device) : device_(device) {}

  /// Copies `batch` in. A batch that does not fit is an error and changes nothing.
  void fill(const std::vector<at::Tensor>& batch) {
    check(batch);
    if (!allocated_) {
      std::vector<at::Tensor> fresh;
      for (const at::Tensor& input : batch) {
        fresh.push_back(at::empty_like(input, input.options().device(device_)));
      }
      tensors_ = std::move(fresh);
      allocated_ = true;
    }
    for (std::size_t i = 0; i < batch.size(); ++i) {
      tensors_[i].copy_(batch[i], /*non_blocking=*/true);
    }
  }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  /// Whether `batch` has the same shapes and dtypes, and may be copied in.
  bool fit(const std::vector<at::Tensor>& batch) const {
    if (!allocated_) return false;
    return std::ranges::equal(
        batch, tensors_, [this](const at::Tensor& input, const at::Tensor& fixed) {
          return input.defined() && !input.requires_grad() && input.layout() == at::kStrided &&
                 (input.is_cpu() || input.device() == device_) && input.sizes() == fixed.sizes() &&
                 input.scalar_type() == fixed.scalar_type();
        });
  }

  /// Throws an error with the reason if it does not fit. The first batch may have any shapes and
  /// dtypes.
  void check(const std::vector<at::Tensor>& batch) const {
    TORCH_CHECK_VALUE(!allocated_ || batch.size() == tensors_.size(), "CudaGraph: ", batch.size(),
                      " inputs, but the first call had ", tensors_.size(),
                      ". Pass the same number each time, or call reset() first.");
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const at::Tensor& input = batch[i];
      TORCH_CHECK_VALUE(input.defined(), "CudaGraph: input ", i, " is undefined.");
      TORCH_CHECK_VALUE(!input.requires_grad(), "CudaGraph: input ", i,
                        " requires grad, but no gradient reaches it, since the iteration uses a "
                        "copy. Pass input.detach().");
      TORCH_CHECK_VALUE(input.is_cpu() || input.device() == device_, "CudaGraph: input ", i,
                        " is on ", input.device(), ", but the optimizers' parameters are on ",
                        device_, ". Move it there, or leave it on the CPU.");
      TORCH_CHECK_VALUE(input.layout() == at::kStrided, "CudaGraph: input ", i, " is ",
                        input.layout(), ", and a graph's inputs are strided. Pass its parts.");
      if (!allocated_) continue;
      const at::Tensor& fixed = tensors_[i];
      TORCH_CHECK_VALUE(
          input.sizes() == fixed.sizes() && input.scalar_type() == fixed.scalar_type(),
          "CudaGraph: input ", i, " is ", input.scalar_type(), input.sizes(),
          ", but in the first call it was ", fixed.scalar_type(), fixed.sizes(),
          ". A graph holds one shape: pad or drop such a batch, set CudaGraphOptions::shapes, or "
          "call reset() first.");
    }
  }

 private:
  c10::Device device_;
  std::vector<at::Tensor> tensors_;
  bool allocated_ = false;
};

/// Finds the first op that makes the host wait for a device, or a device for host memory, which a
/// CUDA graph cannot hold.
class HostAccess final : public Observer {
 public:
  explicit HostAccess(at::DeviceType device) : device_(device) {}

  /// "aten::_local_scalar_dense (Tensor::item) on a tensor of shape []"; empty if there was none.
  std::string first() const {
    const std::lock_guard lock(mutex_);
    return first_;
  }

  std::unique_ptr<Call> begin(const at::RecordFunction& call) override {
    if (call.scope() == at::RecordScope::FUNCTION) look_at(call.name(), inputs_of(call));
    return nullptr;
  }
  void end(const at::RecordFunction&, Call&) override {}

 private:
  /// Why the host waits for an op on tensors of the device; empty if it does not.
  static std::string_view why_read(std::string_view name) {
    constexpr std::array<std::string_view, 8> shaped_by_values{
        "aten::nonzero",           "aten::masked_select", "aten::_unique",
        "aten::_unique2",          "aten::unique_dim",    "aten::unique_consecutive",
        "aten::repeat_interleave", "aten::bincount"};
    if (name == "aten::_local_scalar_dense") return "Tensor::item";
    if (name == "aten::equal") return "returns a bool";
    const bool is_one = std::ranges::find(shaped_by_values, name) != shaped_by_values.end();
    return is_one ? "the result's shape depends on values" : "";
  }

  static bool draws_random_numbers(std::string_view name) {
    constexpr std::array<std::string_view, 9> fillers{
        "aten::random_",     "aten::uniform_",     "aten::normal_",
        "aten::bernoulli_",  "aten::exponential_", "aten::geometric_",
        "aten::log_normal_", "aten::cauchy_",      "aten::multinomial"};
    return std::ranges::find(fillers, name) != fillers.end();
  }

  void look_at(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
    if (inputs.empty() || !inputs[0].isTensor()) return;
    const at::Tensor& first = inputs[0].toTensor();
    if (!first.defined()) return;
    if (name == "aten::copy_") {
      if (inputs.size() < 2 || !inputs[1].isTensor()) return;
      const at::Tensor& source = inputs[1].toTensor();
      if (!source.defined() || first.device().type() == source.device().type()) return;
      const at::Tensor& on_host = first.is_cpu() ? first : source;
      if (first.device().type() != device_ && source.device().type() != device_) return;
      const bool waits = inputs.size() < 3 || !inputs[2].isBool() || !inputs[2].toBool();
      if (waits || !on_host.is_pinned()) {
        note(name, first.is_cpu() ? "from the device to the host" : "from the host to the device",
             source);
      }
      return;
    }
    if (device_ != at::kCPU && first.is_cpu() && draws_random_numbers(name)) {
      note(name, "random numbers of the host, which replays would repeat", first);
    }
    if (first.device().type() != device_) return;
    // The overload that counts: (repeats, output_size), only without output_size.
    if (name == "aten::repeat_interleave" && (inputs.size() != 2 || !inputs[1].isNone())) return;
    const std::string_view why = why_read(name);
    if (!why.empty()) note(name, why, first);
  }

  void note(std::string_view name, std::string_view why, const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    if (!first_.empty()) return;
    std::ostringstream text;
    text << name << " (" << why << ") on a tensor of shape " << tensor.sizes();
    first_ = text.str();
  }

  at::DeviceType device_;
  mutable std::mutex mutex_;
  std::string first_;
};

/// While it lives, detects host accesses by ops of the calling thread and of its backward workers.
class HostAccessWatch {
 public:
  explicit HostAccessWatch(at::DeviceType device)
      : access_(std::make_shared<HostAccess>(device)),
        observation_("CudaGraph", access_, Watched::ops) {}

  std::string first() const { return access_->first(); }

 private:
  std::shared_ptr<HostAccess> access_;
  Observation observation_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
