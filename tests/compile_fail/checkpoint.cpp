// SPDX-License-Identifier: BSD-3-Clause
#include <torchamp/recompute.h>

#include <span>
#include <string>
#include <unordered_map>
#include <utility>

struct Outputs {
  at::Tensor mean, deviation;
};

void of_a_struct(const at::Tensor& x) {
  const auto function = [](const at::Tensor& t) { return Outputs{t.exp(), t.sin()}; };
  // error: the function returns a type that may hide tensors
  torchamp::checkpoint(function, x);
}

void of_an_unordered_map(const at::Tensor& x) {
  using Map = std::unordered_map<std::string, at::Tensor>;
  const auto function = [](const at::Tensor& t) { return std::pair{1, Map{{"exp", t.exp()}}}; };
  // error: the function returns a type that may hide tensors
  torchamp::checkpoint(function, x);
}

void of_views_of_values(std::span<const at::Tensor> x) {
  const auto function = [](std::span<const at::Tensor> t) { return t[0].exp(); };
  // error: an input refers to values that may be destroyed before backward runs the function again
  torchamp::checkpoint(function, x);
}
