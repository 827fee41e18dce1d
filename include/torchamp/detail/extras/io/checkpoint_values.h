// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/scaler/loss_scale.h"
#include "torchamp/detail/core/scaler/scale_update.h"
#include "torchamp/detail/core/scaler/step_ledger.h"
#include "torchamp/detail/extras/io/archives.h"
#include "torchamp/detail/extras/shared/kept_tensors.h"
#include "torchamp/grad_scaler.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Values in a file]
// An archive holds 64-bit integers, doubles, bools, strings, tensors, lists, and none. Other values
// are stored as follows. An unsigned integer above the largest 64-bit integer: its decimal text (in
// files of version 1 the negative number with the same bits). A long double: its hexadecimal text
// (in older files also a list of doubles whose sum it is). An undefined tensor: none.

/// An integer type, including types for characters.
template <class T>
inline constexpr bool is_integer = std::is_integral_v<T> && !std::is_same_v<T, bool>;

/// `tensor`, or a copy if its storage is larger, because an archive would write the whole storage.
inline at::Tensor without_neighbours(const at::Tensor& tensor) {
  const bool alone = tensor.layout() != at::kStrided || !tensor.has_storage() ||
                     tensor.storage().nbytes() <= tensor.nbytes();
  if (alone) return tensor;
  return tensor.detach().clone().set_requires_grad(tensor.requires_grad());
}

template <class T>
c10::IValue to_ivalue(const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.defined() ? c10::IValue(without_neighbours(value)) : c10::IValue();
  } else if constexpr (is_integer<T>) {
    constexpr auto largest = std::numeric_limits<int64_t>::max();
    if (value > T{} && static_cast<uint64_t>(value) > static_cast<uint64_t>(largest)) {
      return c10::IValue(std::to_string(static_cast<uint64_t>(value)));
    }
    return c10::IValue(static_cast<int64_t>(value));
  } else if constexpr (std::is_same_v<T, long double>) {
    std::array<char, 64> text{};
    (void)std::to_chars(text.data(), text.data() + text.size() - 1, value, std::chars_format::hex);
    return c10::IValue(std::string(text.data()));
  } else if constexpr (std::is_floating_point_v<T>) {
    return c10::IValue(static_cast<double>(value));
  } else {
    return c10::IValue(value);
  }
}

inline void check_kind(bool right, const c10::IValue& value, const char* wanted) {
  TORCH_CHECK(right, "it is a ", value.tagKind(), " in the file and ", wanted, " in the program");
}

template <class T>
T integer_of(const c10::IValue& value, int64_t version) {
  const auto check = [](bool fits, const auto& number) {
    TORCH_CHECK(fits, "it is ", number, " in the file, which an ",
                std::is_unsigned_v<T> ? "unsigned " : "", "integer of ", 8 * sizeof(T),
                " bits cannot hold");
  };
  if (value.isString()) {
    const std::string& text = value.toStringRef();
    uint64_t number = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    check_kind(error == std::errc() && stop == end && !text.empty(), value, "an integer");
    const T narrow = static_cast<T>(number);
    check(narrow > T{} && static_cast<uint64_t>(narrow) == number, number);
    return narrow;
  }
  check_kind(value.isInt(), value, "an integer");
  const int64_t number = value.toInt();
  const T narrow = static_cast<T>(number);
  const bool same_bits = version == 1 && std::is_unsigned_v<T> && sizeof(T) == sizeof(number);
  check(same_bits || (static_cast<int64_t>(narrow) == number && (narrow < T{}) == (number < 0)),
        number);
  return narrow;
}

/// The long double for a text of std::to_chars() with std::chars_format::hex; unset for another
/// text. Not every C++ library's std::from_chars() reads a long double.
inline std::optional<long double> of_hexadecimal(std::string_view text) {
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  const long double sign = negative ? -1.L : 1.L;
  if (text == "inf") return sign * std::numeric_limits<long double>::infinity();
  if (text.starts_with("nan")) return std::numeric_limits<long double>::quiet_NaN();
  const std::size_t p = text.find('p');
  if (p == text.npos) return std::nullopt;
  long double number = 0;
  int exponent = 0, digits = 0, behind_point = 0;
  bool has_point = false;
  for (const char c : text.substr(0, p)) {
    int digit = 0;
    if (c == '.' && !std::exchange(has_point, true)) continue;
    if (std::from_chars(&c, &c + 1, digit, 16).ec != std::errc()) return std::nullopt;
    number = number * 16.L + static_cast<long double>(digit);
    ++digits;
    behind_point += has_point ? 4 : 0;
  }
  const char* const end = text.data() + text.size();
  const char* from = text.data() + p + 1;
  if (from != end && *from == '+') ++from;  // std::from_chars() takes a minus only
  const auto [stop, error] = std::from_chars(from, end, exponent);
  if (digits == 0 || error != std::errc() || stop != end) return std::nullopt;
  return sign * std::ldexp(number, exponent - behind_point);
}

template <class T>
T floating_point_of(const c10::IValue& value) {
  long double number = 0;
  if (value.isDoubleList()) {
    for (const double part : value.toDoubleVector()) number += static_cast<long double>(part);
  } else if (value.isString()) {
    const auto read = of_hexadecimal(value.toStringRef());
    check_kind(read.has_value(), value, "a floating-point number");
    number = *read;
  } else {
    check_kind(value.isDouble(), value, "a floating-point number");
    number = static_cast<long double>(value.toDouble());
  }
  const T narrow = static_cast<T>(number);
  // Compares the number in the file: in a thread that flushes denormals a small `narrow` is 0.
  constexpr auto smallest = static_cast<long double>(std::numeric_limits<T>::denorm_min());
  const bool is_too_small = number != 0.L && std::abs(number) <= smallest / 2;  // rounds to 0
  TORCH_CHECK(std::isfinite(narrow) == std::isfinite(number) && !is_too_small, "it is ", number,
              " in the file, which a ", std::is_same_v<T, float> ? "float" : "double",
              " cannot hold");
  return narrow;
}

/// Throws for a value that `to` cannot represent; a float may be rounded. A tensor with a shape is
/// filled in place, on its own device.
template <class T>
void from_ivalue(const c10::IValue& value, T& to, int64_t version) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    check_kind(value.isNone() || value.isTensor(), value, "a tensor");
    if (value.isNone() || !to.defined()) {
      to = value.isNone() ? at::Tensor() : writable(value.toTensor());
      return;
    }
    const at::Tensor& from = value.toTensor();
    TORCH_CHECK(
        from.sizes() == to.sizes() && from.dtype() == to.dtype() && from.layout() == to.layout(),
        "it is ", from.dtype(), ' ', from.sizes(), " in the file and ", to.dtype(), ' ', to.sizes(),
        " in the program");
    const at::NoGradGuard no_grad;
    to.copy_(from);
  } else if constexpr (is_integer<T>) {
    to = integer_of<T>(value, version);
  } else if constexpr (std::is_floating_point_v<T>) {
    to = floating_point_of<T>(value);
  } else if constexpr (std::is_same_v<T, bool>) {
    check_kind(value.isBool(), value, "a bool");
    to = value.toBool();
  } else {
    check_kind(value.isString(), value, "a string");
    to = value.toStringRef();
  }
}

/// Writes the tensors one by one, each of which may be undefined.
inline void write_tensors(const std::vector<at::Tensor>& tensors,
                          torch::serialize::OutputArchive& archive) {
  archive.write("size", c10::IValue(static_cast<int64_t>(tensors.size())));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    archive.write("tensor_" + std::to_string(i), to_ivalue(tensors[i]));
  }
}

/// Fills the tensors in place, each like from_ivalue(). If the list is empty, it becomes the file's
/// list.
inline void read_tensors(torch::serialize::InputArchive& archive, std::vector<at::Tensor>& to,
                         int64_t version) {
  c10::IValue size;
  archive.read("size", size);
  TORCH_CHECK(size.toInt() >= 0, "its number of tensors is ", size.toInt());
  const auto count = static_cast<std::size_t>(size.toInt());
  TORCH_CHECK(to.empty() || to.size() == count, "it has ", count, " tensors in the file and ",
              to.size(), " in the program");
  to.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    c10::IValue value;
    archive.read("tensor_" + std::to_string(i), value);
    from_ivalue(value, to[i], version);
  }
}

/// Returns a function that restores `value`, a tensor in place.
template <class T>
std::function<void()> undo_of(T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    const at::NoGradGuard no_grad;
    WriteBack kept;
    kept.add(value, WriteBack::Copies::on_device);
    return [&value, handle = value, kept = std::move(kept)] {
      const at::NoGradGuard within;
      value = handle;
      kept.put_back();
    };
  } else if constexpr (std::is_same_v<T, std::vector<at::Tensor>>) {
    const at::NoGradGuard no_grad;
    WriteBack kept;
    for (const at::Tensor& tensor : value) kept.add(tensor, WriteBack::Copies::on_device);
    return [&value, handles = value, kept = std::move(kept)] {
      const at::NoGradGuard within;
      value = handles;
      kept.put_back();
    };
  } else {
    return [&value, kept = value] { value = kept; };
  }
}

/// The tensors of a module, and their memory. LibTorch's load() replaces them by the file's, on its
/// device: views, flat buffers and captured graphs would keep the old values, and the next backward
/// would create new accumulation nodes, without the hooks by which DistributedDataParallel averages
/// gradients.
class WeightsInPlace {
 public:
  explicit WeightsInPlace(const torch::nn::Module& module) {
    for (const auto& tensors : {module.parameters(), module.buffers()}) {
      for (const at::Tensor& tensor : tensors) {
        if (tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
            !repeats_elements(tensor)) {
          weights_.push_back(
              {tensor, tensor.detach(), torch::autograd::impl::try_get_grad_accumulator(tensor)});
        }
      }
    }
  }

  /// Copies the values into the original memory. Call with gradients off.
  void take_back() {
    for (const auto& [tensor, memory, accumulator] : weights_) {
      if (tensor.layout() != at::kStrided || !tensor.has_storage()) continue;
      if (tensor.is_alias_of(memory)) continue;
      if (tensor.sizes() != memory.sizes() || tensor.dtype() != memory.dtype()) continue;
      memory.copy_(tensor);
      tensor.set_data(memory);
      if (accumulator) set(&torch::autograd::impl::set_grad_accumulator, tensor, accumulator);
    }
  }

 private:
  // Older LibTorch uses std::shared_ptr for nodes, newer its own pointers.
  using Accumulator =
      decltype(torch::autograd::impl::try_get_grad_accumulator(std::declval<const at::Tensor&>()));
  template <class Weak>
  static void set(void (*setter)(const at::Tensor&, Weak), const at::Tensor& tensor,
                  const Accumulator& accumulator) {
    setter(tensor, Weak(accumulator));
  }

  struct Weight {
    at::Tensor tensor, memory;
    Accumulator accumulator;  // null if there is none
  };
  std::vector<Weight> weights_;
};

/// Returns a function that restores a scaler's present state, even in an iteration. Error: a call
/// in a window of accumulation, whose gradients would belong to other weights than later
/// gradients.
inline std::function<void()> keep_scaler(GradScaler& scaler) {
  for (const auto& weak : ScalerParts::ledger(scaler).windows) {
    const auto window = weak.lock();
    TORCH_CHECK(
        !window || window->pending == 0,
        "this is within a window of gradient accumulation. First end it: Accumulation::flush() "
        "steps with it, discard() drops it.");
  }
  if (!scaler.is_enabled()) return [] {};
  const LossScale& scale = ScalerParts::scale(scaler);
  const ScaleMemory<double> values = scale.read();
  return [&scaler, values, state = scale.state_of(values)] {
    restore_scaler(scaler, "TrainingCheckpoint::load", state, values);
  };
}

/// Returns a function that restores a module's tensors from copies on the host.
inline std::function<void()> hold_module(const torch::nn::Module& module) {
  WriteBack held;
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage()) {
        held.add(tensor, WriteBack::Copies::on_host);
      }
    }
  }
  return [held = std::move(held)] { held.put_back(); };
}

}  // namespace TORCHAMP_NAMESPACE::detail
