// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torchamp::detail {

template <class Visit>
void visit_tensors(at::Tensor& tensor, Visit&& visit) {
  visit(tensor);
}

// Declared before any is defined, so that containers may hold containers.
template <class T, class Visit>
void visit_tensors(std::optional<T>& value, Visit&& visit);
template <class T, class Visit>
void visit_tensors(std::vector<T>& values, Visit&& visit);
template <class T, std::size_t size, class Visit>
void visit_tensors(std::array<T, size>& values, Visit&& visit);
template <class Key, class T, class Visit>
void visit_tensors(std::map<Key, T>& values, Visit&& visit);
template <class A, class B, class Visit>
void visit_tensors(std::pair<A, B>& values, Visit&& visit);
template <class... Ts, class Visit>
void visit_tensors(std::tuple<Ts...>& values, Visit&& visit);

/// Whatever else a function takes or returns holds no tensor that autograd needs to know of.
template <class T, class Visit>
void visit_tensors(T&, Visit&&) {}

template <class T, class Visit>
void visit_tensors(std::optional<T>& value, Visit&& visit) {
  if (value) visit_tensors(*value, visit);
}

template <class T, class Visit>
void visit_tensors(std::vector<T>& values, Visit&& visit) {
  if constexpr (!std::is_same_v<T, bool>) {
    for (T& value : values) visit_tensors(value, visit);
  }
}

template <class T, std::size_t size, class Visit>
void visit_tensors(std::array<T, size>& values, Visit&& visit) {
  for (T& value : values) visit_tensors(value, visit);
}

template <class Key, class T, class Visit>
void visit_tensors(std::map<Key, T>& values, Visit&& visit) {
  for (auto& [key, value] : values) visit_tensors(value, visit);
}

template <class A, class B, class Visit>
void visit_tensors(std::pair<A, B>& values, Visit&& visit) {
  visit_tensors(values.first, visit);
  visit_tensors(values.second, visit);
}

template <class... Ts, class Visit>
void visit_tensors(std::tuple<Ts...>& values, Visit&& visit) {
  std::apply([&](auto&... each) { (visit_tensors(each, visit), ...); }, values);
}

/// The tensors of `tree`, a tensor or any nesting of vectors, arrays, maps, pairs, tuples and
/// optionals of them, in a fixed order.
template <class Tree>
std::vector<at::Tensor> tensors_of(Tree& tree) {
  std::vector<at::Tensor> tensors;
  visit_tensors(tree, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Puts `tensors` where tensors_of() found them.
template <class Tree>
void replace_tensors(Tree& tree, const std::vector<at::Tensor>& tensors) {
  auto next = tensors.begin();
  visit_tensors(tree, [&](at::Tensor& tensor) { tensor = *next++; });
}

}  // namespace torchamp::detail
