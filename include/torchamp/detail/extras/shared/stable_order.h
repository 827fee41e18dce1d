// SPDX-License-Identifier: BSD-3-Clause
// Sorting rows of reports.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Returns the places of the values in ascending order of their key; the order of equal values does
/// not change.
///
/// Used instead of std::stable_sort, which in libstdc++ 12 calls a deprecated function: clang++ 19
/// warns of it at each use.
template <class T, class Key>
std::vector<std::size_t> stable_order(const std::vector<T>& values, Key key) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](std::size_t i) { return std::pair(key(values[i]), i); });
  return order;
}

/// Sorts the values in that order.
template <class T, class Key>
void sort_in_stable_order(std::vector<T>& values, Key key) {
  std::vector<T> sorted;
  sorted.reserve(values.size());
  for (const std::size_t i : stable_order(values, key)) sorted.push_back(std::move(values[i]));
  values = std::move(sorted);
}

}  // namespace TORCHAMP_NAMESPACE::detail
