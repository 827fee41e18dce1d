// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace torchamp::detail {

/// Casts the tensors among the inputs of a custom function, for the devices on which autocast is on
/// when it is made.
class CastInputs {
 public:
  explicit CastInputs(at::ScalarType dtype) : dtype_(dtype) {
    for (const at::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
      if (at::autocast::is_autocast_enabled(device)) devices_.push_back(device);
    }
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

  /// Whether one of the outputs is a tensor that a cast made: an input written to in place.
  bool made_any_of(const at::Tensor& output) const {
    for (const at::Tensor& made : made_) {
      if (made.is_same(output)) return true;
    }
    return false;
  }
  bool made_any_of(const std::vector<at::Tensor>& outputs) const {
    for (const at::Tensor& output : outputs) {
      if (made_any_of(output)) return true;
    }
    return false;
  }

 private:
  at::Tensor one(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const at::DeviceType device : devices_) {
      if (!at::autocast::is_eligible(tensor, device) || tensor.scalar_type() == dtype_) continue;
      made_.push_back(at::autocast::cached_cast(dtype_, tensor, device));
      return made_.back();
    }
    return tensor;
  }

  at::ScalarType dtype_;
  std::vector<at::DeviceType> devices_;
  std::vector<at::Tensor> made_;
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
