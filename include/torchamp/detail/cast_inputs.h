// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/libtorch.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

/// Casts the tensors among the inputs of a custom function, for the devices on which autocast is on
/// when it is made.
class CastInputs {
 public:
  explicit CastInputs(at::ScalarType dtype) : dtype_(dtype) {
    for (const at::DeviceType device : autocast_devices) {
      if (at::autocast::is_autocast_enabled(device)) devices_.push_back(device);
    }
  }

  CastInputs(const CastInputs&) = delete;
  CastInputs& operator=(const CastInputs&) = delete;
  ~CastInputs() {
    // What was written to may be in the cache.
    if (wrote_to_any()) at::autocast::clear_cache();
  }

  /// One input: cast if it holds tensors, else handed on as a reference.
  template <class Input>
  decltype(auto) operator()(Input&& input) {
    using Value = std::remove_cvref_t<Input>;
    if constexpr (std::same_as<Value, at::Tensor>) {
      return one(input);
    } else if constexpr (std::same_as<Value, std::optional<at::Tensor>>) {
      return input ? std::optional(one(*input)) : std::nullopt;
    } else if constexpr (std::same_as<Value, at::TensorList> ||
                         std::same_as<Value, std::vector<at::Tensor>>) {
      std::vector<at::Tensor> list;
      list.reserve(input.size());
      for (const at::Tensor& tensor : input) list.push_back(one(tensor));
      return list;
    } else {
      return std::forward<Input>(input);
    }
  }

  /// Whether a tensor that a cast made has been written to in place, through a view too.
  bool wrote_to_any() const {
    return std::any_of(made_.begin(), made_.end(),
                       [](const auto& made) { return version_of(made.first) != made.second; });
  }

 private:
  at::Tensor one(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const at::DeviceType device : devices_) {
      if (!at::autocast::is_eligible(tensor, device) || tensor.scalar_type() == dtype_) continue;
      at::Tensor made = cast(tensor, device);
      made_.emplace_back(made, version_of(made));
      return made;
    }
    return tensor;
  }

  at::Tensor cast(const at::Tensor& tensor, at::DeviceType device) const {
    if (!c10::InferenceMode::is_enabled()) {
      return at::autocast::cached_cast(dtype_, tensor, device);
    }
    // A tensor made in inference mode does not count its versions.
    const c10::InferenceMode counted(false);
    const c10::NoGradGuard no_grad;
    return tensor.to(dtype_);
  }

  at::ScalarType dtype_;
  std::vector<at::DeviceType> devices_;
  std::vector<std::pair<at::Tensor, std::uint32_t>> made_;  // with its version
};

/// An input after the cast, as the type that the caller gave: LibTorch looks into an
/// at::TensorList, not into a vector.
template <class Given, class Input>
decltype(auto) as_input(Input&& input) {
  if constexpr (std::same_as<std::remove_cvref_t<Given>, at::TensorList>) {
    return at::TensorList(input);
  } else {
    return std::forward<Input>(input);
  }
}

}  // namespace torchamp::detail
