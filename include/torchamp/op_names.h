// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <concepts>
#include <initializer_list>
#include <ranges>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/ops.h"

namespace torchamp {

/// The ops that an edit of a Policy names. Made from one name, a `{…}` list or any range of names,
/// or a family: one of torchamp::ops, or a program's own, which is the list of its names. A name is
/// "softmax" (all overloads), "softmax.int" or "mylib::op".
class OpNames {
 public:
  // Implicit, so that edits read as `policy.fp32({"pow", "exp"})` and `policy.fp32(ops::norm)`.
  OpNames(const char* name) : names_{name} {}
  OpNames(std::string_view name) : names_{std::string(name)} {}
  OpNames(std::string name) : names_{std::move(name)} {}
  OpNames(std::initializer_list<std::string_view> names) : names_(names.begin(), names.end()) {}
  OpNames(const OpFamily& family) : names_(family.begin(), family.end()) {
    for (const OpFamily& ours : ops::families) {
      if (ours == family) family_ = ours.name();
    }
  }
  template <std::ranges::input_range Names>
  requires(std::convertible_to<std::ranges::range_reference_t<Names>, std::string_view> &&
           !std::convertible_to<Names, std::string_view> &&
           !std::same_as<std::remove_cvref_t<Names>, OpFamily> &&
           !std::same_as<std::remove_cvref_t<Names>, OpNames>) OpNames(Names&& names) {
    for (auto&& name : names) names_.emplace_back(std::string_view(name));
  }

  auto begin() const { return names_.begin(); }
  auto end() const { return names_.end(); }
  /// The name of the family of torchamp::ops that these are, or empty.
  std::string_view family() const { return family_; }

 private:
  std::vector<std::string> names_;
  std::string_view family_;
};

}  // namespace torchamp
