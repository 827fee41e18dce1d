// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/policy/schema.h"

namespace TORCHAMP_NAMESPACE::detail {

TORCHAMP_BODY std::vector<c10::OperatorHandle> all_ops() {
  struct Listener final : c10::OpRegistrationListener {
    std::vector<c10::OperatorHandle>& ops;
    explicit Listener(std::vector<c10::OperatorHandle>& into) : ops(into) {}
    void onOperatorRegistered(const c10::OperatorHandle& op) override { ops.push_back(op); }
    void onOperatorDeregistered(const c10::OperatorHandle&) override {}
  };
  std::vector<c10::OperatorHandle> ops;
  ops.reserve(4096);  // LibTorch has fewer
  {
    const c10::RegistrationHandleRAII told_of_all =
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>(ops));
  }
  return ops;
}

/// The ops that are now registered, by their names. LibTorch reports each op that is added or
/// removed.
class OpCatalog final : public c10::OpRegistrationListener {
 public:
  /// Never destroyed: ops are removed until the process ends.
  static OpCatalog& instance() {
    static OpCatalog& catalog = make();
    return catalog;
  }

  /// The overloads of "aten::add", by their names: none if the op is unknown. Any thread.
  std::vector<c10::OperatorHandle> overloads(std::string_view base) {
    std::vector<c10::OperatorHandle> overloads;
    const std::scoped_lock lock(mutex_);
    const auto [first, last] = ops_.equal_range(base);
    for (auto at = first; at != last; ++at) overloads.push_back(at->second);
    std::sort(overloads.begin(), overloads.end(), [](const auto& a, const auto& b) {
      return a.operator_name().overload_name < b.operator_name().overload_name;
    });
    return overloads;
  }

  /// The known name nearest to `base` in its namespace; empty if nothing is known there. Of several
  /// equally near names the op in most families, then the first by name.
  std::string nearest(std::string_view base) {
    const std::scoped_lock lock(mutex_);
    const std::string_view space = base.substr(0, base.find("::") + 2);
    std::pair<std::int64_t, std::string_view> best;
    for (const auto& [name, op] : ops_) {
      if (!name.starts_with(space)) continue;
      auto rank = static_cast<std::int64_t>(32 * edit_distance(base, name));
      for (const OpFamily& family : ops::families) {
        rank -= contains(family, op.operator_name());
      }
      const std::pair one(rank, name);
      if (best.second.empty() || one < best) best = one;
    }
    return std::string(best.second);
  }

  // LibTorch calls these one at a time. It calls the first of them for all ops inside make().
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    const std::scoped_lock lock(mutex_);
    ops_.emplace(op.operator_name().name, op);
  }
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    const std::scoped_lock lock(mutex_);
    auto [at, last] = ops_.equal_range(op.operator_name().name);
    while (at != last && at->second != op) ++at;
    if (at != last) ops_.erase(at);
  }

 private:
  static OpCatalog& make() {
    pin_this_library();
    auto& catalog = *new OpCatalog;
    std::unique_ptr<c10::OpRegistrationListener> listener(&catalog);
    catalog.ops_.reserve(8192);  // LibTorch has half as many
    // Never destroyed: its destructor would remove the listener.
    new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::move(listener)));
    return catalog;
  }

  std::mutex mutex_;
  /// By "aten::add", which is part of what the handle refers to.
  std::unordered_multimap<std::string_view, c10::OperatorHandle> ops_;
};

TORCHAMP_BODY std::vector<c10::OperatorHandle> find_ops(std::string_view text,
                                                        std::string_view call, bool missing_ok) {
  const auto colons = text.find("::");
  const auto dot = text.find('.', colons == text.npos ? 0 : colons);
  const std::string_view name = text.substr(0, dot);
  const std::string base = std::string(colons == text.npos ? "aten::" : "").append(name);
  std::vector<c10::OperatorHandle> found = OpCatalog::instance().overloads(base);
  if (dot == text.npos && (missing_ok || !found.empty())) return found;
  const std::string_view wanted = dot == text.npos ? "" : text.substr(dot + 1);
  std::string known;
  for (const c10::OperatorHandle& op : found) {
    const std::string& overload = op.operator_name().overload_name;
    if (overload == wanted) return {op};
    known.append(known.empty() ? "'" : ", '").append(name);
    known.append(overload.empty() ? "" : ".").append(overload).append("'");
  }
  if (missing_ok) return {};
  TORCHAMP_CHECK(found.empty(), call, ": the op '", base, "' has no overload '", shorten(wanted),
                 "'. It has ", known, ".");
  std::string nearest = OpCatalog::instance().nearest(base);
  if (nearest.starts_with("aten::")) nearest.erase(0, 6);
  const bool is_alone = nearest.empty();
  TORCHAMP_CHECK(
      false, call, ": LibTorch knows no op '", shorten(text),
      is_alone ? "', nor any other in its namespace. First load the library that registers it. "
                 "LibTorch's own ops have no namespace: 'softmax'."
               : "'. Did you mean '",
      nearest, is_alone ? "" : "'?");
  return {};  // not reached
}

TORCHAMP_BODY std::string_view why_not_castable(const c10::FunctionSchema& schema) {
  constexpr std::string_view writes =
      "it writes to an argument (an in-place or out= form), which a cast would replace by a copy";
  const std::string_view name = schema.name();
  if (schema.is_mutable() || (name.ends_with('_') && !name.ends_with("__"))) return writes;
  bool has_tensors = false, names_dtype = false;
  for (const auto& argument : schema.arguments()) {
    if (argument.name() == "dst"sv || argument.name() == "qaccum"sv) return writes;
    has_tensors = has_tensors || holds_tensors(*argument.type());
    names_dtype = names_dtype || is_dtype(argument, /*optional=*/false);
  }
  if (!has_tensors) return "it takes no tensors";
  if (schema.returns().empty()) {
    return "it returns nothing, so what it does it does to its arguments, which a cast would "
           "replace by copies";
  }
  if (takes_named_dimensions(schema)) return "it takes named dimensions";
  if (names_dtype) return "the caller names its dtype";
  for (const auto& result : schema.returns()) {
    if (result.alias_info()) return "it returns a view of its argument, which a cast would cut off";
  }
  return {};
}

}  // namespace TORCHAMP_NAMESPACE::detail
