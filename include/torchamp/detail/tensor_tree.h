// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace torchamp::detail {

template <class Visit>
void visit_tensors(at::Tensor& tensor, Visit&& visit) {
  visit(tensor);
}

// Declared before any is defined, so that containers may hold containers.
template <class T, class Visit>
void visit_tensors(std::optional<T>& value, Visit&& visit);
template <class T, class Allocator, class Visit>
void visit_tensors(std::vector<T, Allocator>& values, Visit&& visit);
template <class T, std::size_t size, class Visit>
void visit_tensors(std::array<T, size>& values, Visit&& visit);
template <class Key, class T, class Less, class Allocator, class Visit>
void visit_tensors(std::map<Key, T, Less, Allocator>& values, Visit&& visit);
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

template <class T, class Allocator, class Visit>
void visit_tensors(std::vector<T, Allocator>& values, Visit&& visit) {
  if constexpr (!std::is_same_v<T, bool>) {
    for (T& value : values) visit_tensors(value, visit);
  }
}

template <class T, std::size_t size, class Visit>
void visit_tensors(std::array<T, size>& values, Visit&& visit) {
  for (T& value : values) visit_tensors(value, visit);
}

template <class Key, class T, class Less, class Allocator, class Visit>
void visit_tensors(std::map<Key, T, Less, Allocator>& values, Visit&& visit) {
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

/// Whether a T refers to values that others own, so that a copy of it keeps none of them.
template <class T>
struct RefersToValues : std::false_type {};
template <class T>
struct RefersToValues<c10::ArrayRef<T>> : std::true_type {};
template <class T>
struct RefersToValues<c10::OptionalArrayRef<T>> : std::true_type {};
template <class T>
struct RefersToValues<c10::IListRef<T>> : std::true_type {};
template <class T, std::size_t size>
struct RefersToValues<std::span<T, size>> : std::true_type {};
template <class T>
struct RefersToValues<std::initializer_list<T>> : std::true_type {};
template <>
struct RefersToValues<at::OptionalTensorRef> : std::true_type {};
template <class T>
struct RefersToValues<std::optional<T>> : RefersToValues<T> {};
template <class T, class Allocator>
struct RefersToValues<std::vector<T, Allocator>> : RefersToValues<T> {};
template <class T, std::size_t size>
struct RefersToValues<std::array<T, size>> : RefersToValues<T> {};
template <class Key, class T, class Less, class Allocator>
struct RefersToValues<std::map<Key, T, Less, Allocator>> : RefersToValues<T> {};
template <class A, class B>
struct RefersToValues<std::pair<A, B>> : std::disjunction<RefersToValues<A>, RefersToValues<B>> {};
template <class... Ts>
struct RefersToValues<std::tuple<Ts...>> : std::disjunction<RefersToValues<Ts>...> {};

/// Whether visit_tensors() finds every tensor of a T: it is a tree as above, or nothing that can
/// own a tensor.
template <class T>
struct ShowsItsTensors
    : std::bool_constant<std::is_trivially_copyable_v<T> && !RefersToValues<T>::value> {};
template <class T>
struct ShowsItsTensors<T*> : std::bool_constant<!std::is_class_v<T>> {};
template <>
struct ShowsItsTensors<at::Tensor> : std::true_type {};
template <>
struct ShowsItsTensors<at::Scalar> : std::true_type {};
template <class T>
struct ShowsItsTensors<std::reference_wrapper<T>> : std::false_type {};
template <class Character, class Traits, class Allocator>
struct ShowsItsTensors<std::basic_string<Character, Traits, Allocator>> : std::true_type {};
template <class T>
struct ShowsItsTensors<std::optional<T>> : ShowsItsTensors<T> {};
template <class T, class Allocator>
struct ShowsItsTensors<std::vector<T, Allocator>> : ShowsItsTensors<T> {};
template <class T, std::size_t size>
struct ShowsItsTensors<std::array<T, size>> : ShowsItsTensors<T> {};
template <class Key, class T, class Less, class Allocator>
struct ShowsItsTensors<std::map<Key, T, Less, Allocator>> : ShowsItsTensors<T> {};
template <class A, class B>
struct ShowsItsTensors<std::pair<A, B>> : std::conjunction<ShowsItsTensors<A>, ShowsItsTensors<B>> {
};
template <class... Ts>
struct ShowsItsTensors<std::tuple<Ts...>> : std::conjunction<ShowsItsTensors<Ts>...> {};

}  // namespace torchamp::detail
