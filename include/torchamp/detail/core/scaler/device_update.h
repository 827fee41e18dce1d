// SPDX-License-Identifier: BSD-3-Clause
// The next scale on a device, without a read of it.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/grad_scaler_options.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [An update on a device]
// For torch.amp's rule ATen has a kernel: one launch. For any other rule after_update(), the host's
// formula, is computed on 0-dim tensors: some 45 small launches for a hysteresis, and no wait.

/// The precision in which a device computes an update.
inline at::ScalarType number_type_on(at::Device device) {
  return facts_of(device.type()).fp64 == Fp64::no ? at::kFloat : at::kDouble;
}

/// An update on a device, and the numbers that it stores there besides the scale and the skips in a
/// row. Does not synchronise, except read().
class DeviceUpdate {
 public:
  virtual ~DeviceUpdate() = default;
  virtual void set(const ScaleMemory<double>& values) = 0;
  /// Synchronises.
  virtual void read(ScaleMemory<double>& values) const = 0;
  virtual void limit_growth_tracker(int64_t last) = 0;
  /// Changes `scale` in place, within its limits. `skips`: the skips in a row before.
  virtual void make(const GradScalerOptions& options, const at::Tensor& scale,
                    const Measured& measured, const at::Tensor& skips) = 0;
};

/// torch.amp's update, and the limits.
class TorchUpdate final : public DeviceUpdate {
 public:
  TorchUpdate(const ScaleMemory<double>& values, const at::Tensor& scale)
      : growth_tracker_(at::full({}, values.growth_tracker, scale.options().dtype(at::kInt))) {}

  void set(const ScaleMemory<double>& values) override {
    growth_tracker_.fill_(values.growth_tracker);
  }
  void read(ScaleMemory<double>& values) const override {
    values.growth_tracker = growth_tracker_.item<double>();
  }
  void limit_growth_tracker(int64_t last) override { growth_tracker_.clamp_max_(last); }

  void make(const GradScalerOptions& options, const at::Tensor& scale, const Measured& measured,
            const at::Tensor& /*skips*/) override {
    at::Tensor updated = scale;
    at::_amp_update_scale_(updated, growth_tracker_, measured.found_inf.tensor,
                           options.growth_factor, options.backoff_factor, options.growth_interval);
    updated.clamp_(options.min_scale, options.max_scale);
  }

 private:
  at::Tensor growth_tracker_;  // 0-dim int32
};

/// The number of row `i`.
template <class Memory>
auto& number_of(Memory& memory, std::size_t i) {
  return memory.*scale_memory_rows<decltype(memory.scale)>[i].number;
}

/// Any update: the host's formula on tensors.
class FormulaUpdate final : public DeviceUpdate {
 public:
  FormulaUpdate(const ScaleMemory<double>& values, const at::Tensor& scale)
      : number_(scale.options().dtype(number_type_on(scale.device()))) {
    for (std::size_t i = 0; i < rows; ++i)
      number_of(memory_, i) = at::full({}, number_of(values, i), number_);
    memory_.scale = memory_.skips = at::Tensor();  // the scaler has them
  }

  void set(const ScaleMemory<double>& values) override {
    for (std::size_t i = 0; i < rows; ++i) {
      if (number_of(memory_, i).defined()) number_of(memory_, i).fill_(number_of(values, i));
    }
  }
  void read(ScaleMemory<double>& values) const override {
    for (std::size_t i = 0; i < rows; ++i) {
      if (number_of(memory_, i).defined())
        number_of(values, i) = number_of(memory_, i).item<double>();
    }
  }
  void limit_growth_tracker(int64_t last) override { memory_.growth_tracker.clamp_max_(last); }

  void make(const GradScalerOptions& options, const at::Tensor& scale, const Measured& measured,
            const at::Tensor& skips) override {
    ScaleMemory<at::Tensor> before = memory_;
    before.scale = scale.to(number_);
    before.skips = skips.to(number_);
    const ScaleMemory<at::Tensor> after = after_update(options, before, measured);
    scale.copy_(after.scale);  // an unchanged number is copied onto itself
    for (std::size_t i = 0; i < rows; ++i) {
      if (number_of(memory_, i).defined()) number_of(memory_, i).copy_(number_of(after, i));
    }
  }

 private:
  static constexpr std::size_t rows = std::size(scale_memory_rows<double>);

  at::TensorOptions number_;
  ScaleMemory<at::Tensor> memory_;  // without the scale and the skips
};

}  // namespace TORCHAMP_NAMESPACE::detail
