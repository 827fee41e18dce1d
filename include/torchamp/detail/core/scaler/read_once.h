// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <type_traits>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A number in a 0-dim fp32 tensor, read at most once.
struct ReadOnce {
  at::Tensor tensor{};
  std::optional<double> on_host{};

  /// The value, if it is available without waiting for a device.
  std::optional<double> without_reading() const {
    if (on_host) return on_host;
    if (tensor.defined() && tensor.is_cpu()) return *tensor.const_data_ptr<float>();
    return std::nullopt;
  }

  /// The tensor, or the double in `on_host`. Error: there is none.
  template <class Number>
  const Number& as() const {
    constexpr bool is_double = std::is_same_v<Number, double>;
    TORCHAMP_CHECK(is_double ? on_host.has_value() : tensor.defined(),
                   "GradScaler::update: these options need a number of the gradients that was not "
                   "measured. MeasuredRow::measure must measure it for them.");
    if constexpr (is_double) {
      return *on_host;
    } else {
      return tensor;
    }
  }

  /// Synchronises if the host does not have the value.
  double read() {
    if (!on_host) on_host = tensor.item<double>();
    return *on_host;
  }

  /// Protects the value from later changes of the tensor.
  void keep() {
    if (!on_host) tensor = tensor.clone();
  }
};

}  // namespace TORCHAMP_NAMESPACE::detail
