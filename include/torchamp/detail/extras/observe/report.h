// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <locale>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Common parts of reports: names of parameters, numbers from devices, text.

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// By their names in `module`, which is a torch::nn::Module or has named_parameters() as one has.
template <class Module>
NamedParameters parameters_by_name(const Module& module) {
  NamedParameters named;
  for (const auto& item : module.named_parameters()) named.emplace_back(item.key(), item.value());
  return named;
}

/// By their places in `optimizer`: "group 0, parameter 3".
inline NamedParameters parameters_by_place(const torch::optim::Optimizer& optimizer) {
  NamedParameters named;
  const auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor>& parameters = groups[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      named.emplace_back("group " + std::to_string(g) + ", parameter " + std::to_string(i),
                         parameters[i]);
    }
  }
  return named;
}

/// The parameters of a module or an optimizer, given itself, by a pointer of any kind or by a
/// module holder; or a range of pairs of a name and a parameter.
template <class Owner>
NamedParameters named_parameters_of(const Owner& owner, const char* call) {
  if constexpr (std::derived_from<Owner, torch::nn::Module>) {
    return parameters_by_name<torch::nn::Module>(owner);
  } else if constexpr (std::derived_from<Owner, torch::optim::Optimizer>) {
    return parameters_by_place(owner);
  } else if constexpr (requires { *owner, static_cast<bool>(owner); }) {
    TORCH_CHECK_VALUE(static_cast<bool>(owner), call,
                      ": was given a null pointer or an empty module holder.");
    return named_parameters_of(*owner, call);
  } else {
    NamedParameters named;
    for (const auto& [name, parameter] : owner) named.emplace_back(name, parameter);
    return named;
  }
}

/// All elements of a tensor; of a sparse one, those stored. Undefined for other layouts.
inline at::Tensor stored_values(const at::Tensor& tensor) {
  switch (tensor.layout()) {
    case at::kStrided:
      return tensor;
    case at::kSparse:
      return tensor._values();
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      return tensor.values();
    default:
      return {};
  }
}

/// Flat copies of `tensors`, of one dtype, on the host. Reads each device once.
inline std::vector<at::Tensor> read_together(const std::vector<at::Tensor>& tensors) {
  std::unordered_map<at::Device, std::vector<at::Tensor>> on_device;
  for (const at::Tensor& tensor : tensors) {
    on_device[tensor.device()].push_back(tensor.reshape({-1}));
  }
  std::unordered_map<at::Device, std::pair<at::Tensor, int64_t>> read;  // and how far
  for (const auto& [device, some] : on_device) read[device].first = at::cat(some).cpu();
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    auto& [all, next] = read[tensor.device()];
    result.push_back(all.narrow(0, next, tensor.numel()));
    next += tensor.numel();
  }
  return result;
}

// Reports and files have the same numbers in every C or C++ locale of the program.

inline std::ostringstream classic_stream() {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  return out;
}

/// `value` as printf's %g has it in the C locale, with so many digits; `fixed`: as its %f.
inline std::string number_text(double value, int digits = 6,
                               std::chars_format format = std::chars_format::general) {
  char text[384];  // the largest double has 309 digits before the point
  const auto written = std::to_chars(text, text + sizeof text, value, format, digits);
  return {text, written.ptr};
}
inline std::string fixed_text(double value, int digits) {
  return number_text(value, digits, std::chars_format::fixed);
}

/// `text` as a JSON string.
inline std::string json_string(std::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      json.append("\\u00") += {c < 0x10 ? '0' : '1', "0123456789abcdef"[c & 15]};
    } else {
      if (c == '"' || c == '\\') json += '\\';
      json += c;
    }
  }
  return json + '"';
}

/// Cells of text in aligned columns; those from `first` up to `end` are numbers, to the right.
inline void print_columns(std::ostream& out, const std::vector<std::vector<std::string>>& lines,
                          std::size_t first, std::size_t end = std::string::npos) {
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  for (const auto& line : lines) {
    std::string text;
    for (std::size_t i = 0; i < line.size(); ++i) {
      const bool is_number = i >= first && i < end;
      const std::string space(widths[i] - line[i].size(), ' ');
      text += (i == 0 ? "" : "  ") + (is_number ? space + line[i] : line[i] + space);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out << text << '\n';
  }
}

}  // namespace TORCHAMP_NAMESPACE::detail
