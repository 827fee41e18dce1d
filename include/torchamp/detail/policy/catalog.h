// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/frontend/edit_distance.h>

#include <cstddef>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/overlay/runtime.h"
#include "torchamp/detail/text.h"
#include "torchamp/ops.h"

namespace torchamp::detail {

/// Parts of a user's name: "softmax", "softmax.int", "mylib::op", "mylib::op.overload".
struct ParsedName {
  std::string base;                     // with its namespace: "aten::softmax"
  std::optional<std::string> overload;  // unset: all overloads

  static ParsedName of(std::string_view text) {
    const auto colons = text.find("::");
    const auto dot = text.find('.', colons == std::string_view::npos ? 0 : colons);
    ParsedName name;
    name.base =
        (colons == std::string_view::npos ? "aten::" : "") + std::string(text.substr(0, dot));
    if (dot != std::string_view::npos) name.overload = std::string(text.substr(dot + 1));
    return name;
  }
};

/// Number of single-character edits between two names, of long ones between their beginnings.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  const std::string from(a.substr(0, longest_shown)), to(b.substr(0, longest_shown));
  return torch::jit::ComputeEditDistance(from.c_str(), to.c_str(), /*maxEditDistance=*/0);
}

/// How many families of torchamp::ops have the op.
inline std::size_t count_families(std::string_view name) {
  std::size_t count = 0;
  for (const OpFamily& family : ops::families) {
    for (const std::string_view op : family) count += op == name ? 1 : 0;
  }
  return count;
}

/// The ops that are registered at the moment. LibTorch tells it of every op that comes or goes, so
/// that it needs no look at all of them; LibTorch's own lists keep the names of ops that have gone.
class OpCatalog {
 public:
  /// The overload names of "aten::add", sorted: empty if the op is unknown. Any thread.
  static std::vector<std::string> overloads(const std::string& base) {
    OpCatalog& catalog = instance();
    const std::scoped_lock lock(catalog.mutex_);
    std::vector<std::string> found;
    for (std::size_t at = catalog.first_of(base); at != 0; at = catalog.ops_[at].next) {
      const c10::OperatorName* const op = catalog.ops_[at].name;
      if (op == nullptr || op->name != base) continue;
      std::size_t place = found.size();
      found.push_back(op->overload_name);
      for (; place > 0 && found[place] < found[place - 1]; --place) {
        found[place].swap(found[place - 1]);
      }
    }
    return found;
  }

  /// The known name nearest to `base` in its namespace, without "aten::"; empty if nothing is known
  /// there. Of several as near, the one in most families, and of these the first by name.
  static std::string nearest(std::string_view base) {
    OpCatalog& catalog = instance();
    const std::scoped_lock lock(catalog.mutex_);
    const std::string_view space = base.substr(0, base.find("::") + 2);
    std::string_view best;
    std::size_t best_distance = std::numeric_limits<std::size_t>::max(), best_families = 0;
    for (const Op& op : catalog.ops_) {
      if (op.name == nullptr || !op.name->name.starts_with(space)) continue;
      const std::string_view name = op.name->name;
      if (name == best) continue;
      const std::size_t distance = edit_distance(base, name);
      if (distance > best_distance) continue;
      const std::size_t families = name.starts_with("aten::") ? count_families(name.substr(6)) : 0;
      if (distance == best_distance &&
          (families < best_families || (families == best_families && name > best))) {
        continue;
      }
      best_distance = distance;
      best_families = families;
      best = name;
    }
    return std::string(best.starts_with("aten::") ? best.substr(6) : best);
  }

 private:
  class Listener final : public c10::OpRegistrationListener {
   public:
    explicit Listener(OpCatalog& catalog) : catalog_(catalog) {}
    void onOperatorRegistered(const c10::OperatorHandle& op) override {
      catalog_.add(op.operator_name());
    }
    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
      catalog_.remove(op.operator_name());
    }

   private:
    OpCatalog& catalog_;
  };

  // Never destroyed: ops go until the process ends, and LibTorch calls this library's listener.
  static OpCatalog& instance() {
    static OpCatalog& catalog = make();
    return catalog;
  }

  static OpCatalog& make() {
    pin_this_library();
    auto& catalog = *new OpCatalog;
    std::unique_ptr<c10::OpRegistrationListener> listener(new Listener(catalog));
    // Its end would take the listener away.
    new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::move(listener)));
    return catalog;
  }

  // A table with chains, as LibTorch has some 3400 ops and tells of all of them within the first
  // guard: a map would allocate for each.
  struct Op {
    const c10::OperatorName* name = nullptr;  // LibTorch's own; null where there is no op any more
    std::size_t next = 0;                     // the next one whose name has that hash; 0 is none
  };

  std::size_t& first_of(std::string_view base) {
    return first_[std::hash<std::string_view>()(base) % std::size(first_)];
  }

  void add(const c10::OperatorName& op) {
    const std::scoped_lock lock(mutex_);
    std::size_t& first = first_of(op.name);
    ops_.push_back({&op, first});
    first = ops_.size() - 1;
  }

  void remove(const c10::OperatorName& op) {
    const std::scoped_lock lock(mutex_);
    for (std::size_t at = first_of(op.name); at != 0; at = ops_[at].next) {
      if (ops_[at].name == &op) ops_[at].name = nullptr;
    }
  }

  std::mutex mutex_;
  std::vector<Op> ops_{1};  // the first is none
  std::size_t first_[4096] = {};
};

/// Handles of the overloads that `text` names. Without any: an error naming `call`, the op and the
/// nearest known name; or nothing, if `missing_ok`.
inline std::vector<c10::OperatorHandle> find_ops(std::string_view text, std::string_view call,
                                                 bool missing_ok = false) {
  const ParsedName name = ParsedName::of(text);
  std::vector<c10::OperatorHandle> found;
  const std::vector<std::string> overloads = OpCatalog::overloads(name.base);
  for (const std::string& overload : overloads) {
    if (name.overload && *name.overload != overload) continue;
    if (auto op = c10::Dispatcher::singleton().findSchema({name.base, overload})) {
      found.push_back(*op);
    }
  }
  if (!found.empty() || missing_ok) return found;
  if (overloads.empty() || !name.overload) {
    const std::string nearest = OpCatalog::nearest(name.base);
    TORCH_CHECK(!nearest.empty(), call, ": LibTorch knows no op '", shorten(text),
                "', nor any other of its namespace. Load the library that registers it first. "
                "LibTorch's own ops are named without one: 'softmax'.");
    TORCH_CHECK(false, call, ": LibTorch knows no op '", shorten(text), "'. Did you mean '",
                nearest, "'?");
  }
  std::string known;
  for (const std::string& overload : overloads) {
    known += (known.empty() ? "'" : ", '") + (overload.empty() ? name.base : overload) + "'";
  }
  TORCH_CHECK(false, call, ": the op '", name.base, "' has no overload '", shorten(*name.overload),
              "'. It has ", known, ".");
  return found;  // not reached, which GCC does not see without optimisation
}

}  // namespace torchamp::detail
