// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <concepts>
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

namespace TORCHAMP_NAMESPACE::detail {

// The inputs and outputs of a user's function: a tree of tensors, vectors, arrays, maps, pairs,
// tuples and optionals.

/// The element types of a container; none for anything else.
template <class... Ts>
struct Parts {
  static constexpr bool is_container = sizeof...(Ts) > 0;
  template <template <class> class Is>
  static constexpr bool any = (Is<Ts>::value || ...);
  template <template <class> class Is>
  static constexpr bool all = (Is<Ts>::value && ...);
};
template <class T>
struct PartsOf : Parts<> {};
template <class T>
struct PartsOf<std::optional<T>> : Parts<T> {};
template <class T, class Allocator>
struct PartsOf<std::vector<T, Allocator>> : Parts<T> {};
template <class T, std::size_t size>
struct PartsOf<std::array<T, size>> : Parts<T> {};
template <class Key, class T, class Less, class Allocator>
struct PartsOf<std::map<Key, T, Less, Allocator>> : Parts<T> {};
template <class A, class B>
struct PartsOf<std::pair<A, B>> : Parts<A, B> {};
template <class... Ts>
struct PartsOf<std::tuple<Ts...>> : Parts<Ts...> {};

/// Calls `visit` with each tensor of a tree, in a fixed order. Other types hold no tensors that
/// matter to autograd.
template <class T, class Visit>
void visit_tensors(T& value, const Visit& visit) {
  if constexpr (std::same_as<T, at::Tensor>) {
    visit(value);
  } else if constexpr (!PartsOf<T>::is_container) {
    return;
  } else if constexpr (requires { value.has_value(); }) {
    if (value) visit_tensors(*value, visit);
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (auto& [key, part] : value) visit_tensors(part, visit);
  } else if constexpr (requires { value.begin(); }) {
    for (auto&& part : value) visit_tensors(part, visit);
  } else {
    std::apply([&](auto&... parts) { (visit_tensors(parts, visit), ...); }, value);
  }
}

template <class Tree>
std::vector<at::Tensor> tensors_of(Tree& tree) {
  std::vector<at::Tensor> tensors;
  visit_tensors(tree, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Replaces the tensors of a tree, in the order of tensors_of().
template <class Tree>
void replace_tensors(Tree& tree, const std::vector<at::Tensor>& tensors) {
  auto next = tensors.begin();
  visit_tensors(tree, [&](at::Tensor& tensor) { tensor = *next++; });
}

/// Whether a T refers to values owned by others, so a copy of it does not keep them.
template <class T>
struct RefersToValues : std::bool_constant<PartsOf<T>::template any<RefersToValues>> {};
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

/// Whether visit_tensors() finds every tensor of a T: it is such a tree, or cannot own a tensor.
template <class T>
struct ShowsItsTensors
    : std::bool_constant<PartsOf<T>::is_container
                             ? PartsOf<T>::template all<ShowsItsTensors>
                             : std::is_trivially_copyable_v<T> && !RefersToValues<T>::value> {};
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

/// Calls the forward of a module holder or pointer; calls anything else directly.
template <class Function, class... Inputs>
decltype(auto) call_forward(Function& function, Inputs&&... inputs) {
  if constexpr (requires { function->forward(std::forward<Inputs>(inputs)...); }) {
    return function->forward(std::forward<Inputs>(inputs)...);
  } else {
    return function(std::forward<Inputs>(inputs)...);
  }
}

}  // namespace TORCHAMP_NAMESPACE::detail
