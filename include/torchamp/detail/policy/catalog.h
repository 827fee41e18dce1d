// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/frontend/edit_distance.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
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
  /// The overloads of "aten::add", by their names: none if the op is unknown. Any thread.
  static std::vector<c10::OperatorHandle> overloads(std::string_view base) {
    OpCatalog& catalog = instance();
    const std::scoped_lock lock(catalog.mutex_);
    std::vector<c10::OperatorHandle> found;
    for (std::size_t at = catalog.first_of(base); at != 0; at = catalog.ops_[at - 1].next) {
      const Op& op = catalog.ops_[at - 1];
      if (op.is_gone || op.name().name != base) continue;
      std::size_t place = found.size();
      found.push_back(op.handle);
      // std::sort takes longer to compile than the rest of this.
      for (; place > 0 && is_before(found[place], found[place - 1]); --place) {
        std::swap(found[place], found[place - 1]);
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
      if (op.is_gone || !op.name().name.starts_with(space)) continue;
      const std::string_view name = op.name().name;
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
    void onOperatorRegistered(const c10::OperatorHandle& op) override { catalog_.add(op); }
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
    catalog.ops_.reserve(4096);
    // Its end would take the listener away.
    new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::move(listener)));
    const std::scoped_lock lock(catalog.mutex_);
    catalog.link_those_told_at_first();
    return catalog;
  }

  // A table with chains, as LibTorch has some 3400 ops and tells of all of them within the first
  // guard: a map would allocate for each.
  struct Op {
    c10::OperatorHandle handle;
    bool is_gone = false;    // the handle leads nowhere then
    std::uint32_t next = 0;  // the next one whose name has that hash, from 1; 0 is none

    const c10::OperatorName& name() const { return handle.operator_name(); }
  };

  static bool is_before(const c10::OperatorHandle& a, const c10::OperatorHandle& b) {
    return a.operator_name().overload_name < b.operator_name().overload_name;
  }

  std::uint32_t& first_of(std::string_view base) {
    return first_[quick_hash(base) % std::size(first_)];
  }

  void link(std::size_t index) {
    std::uint32_t& first = first_of(ops_[index].name().name);
    ops_[index].next = first;
    first = static_cast<std::uint32_t>(index + 1);
  }

  // Note [The first walk over all ops]
  // Most of what the first guard waits for is memory: the names of all ops, which nobody has looked
  // at for long. LibTorch tells of them one by one on the thread that makes the catalog, and lets
  // nobody register meanwhile: so these are taken down without a lock, their names are fetched
  // ahead, and only then hashed.
  bool is_first_walk() const { return std::this_thread::get_id() == maker_ && !is_linked_; }

  /// With the lock held.
  void link_those_told_at_first() {
    if (is_linked_) return;
    for (std::size_t i = 0; i < told_at_first_; ++i) link(i);
    is_linked_ = true;
  }

  void add(const c10::OperatorHandle& op) {
    const c10::OperatorName& name = op.operator_name();
    if (is_first_walk()) {
      __builtin_prefetch(name.name.data());
      ops_.push_back({op});
      told_at_first_ = ops_.size();
      return;
    }
    const std::scoped_lock lock(mutex_);
    ops_.push_back({op});
    link(ops_.size() - 1);
  }

  void remove(const c10::OperatorName& name) {
    const std::scoped_lock lock(mutex_);
    link_those_told_at_first();
    for (std::size_t at = first_of(name.name); at != 0; at = ops_[at - 1].next) {
      Op& op = ops_[at - 1];
      if (!op.is_gone && &op.name() == &name) op.is_gone = true;
    }
  }

  const std::thread::id maker_ = std::this_thread::get_id();
  bool is_linked_ = false;  // what the first walk has told of
  std::size_t told_at_first_ = 0;
  std::mutex mutex_;
  std::vector<Op> ops_;
  std::uint32_t first_[4096] = {};
};

/// Handles of the overloads that `text` names. Without any: an error naming `call`, the op and the
/// nearest known name; or nothing, if `missing_ok`.
inline std::vector<c10::OperatorHandle> find_ops(std::string_view text, std::string_view call,
                                                 bool missing_ok = false) {
  const ParsedName name = ParsedName::of(text);
  std::vector<c10::OperatorHandle> overloads = OpCatalog::overloads(name.base);
  if (!name.overload && !overloads.empty()) return overloads;
  std::vector<c10::OperatorHandle> found;
  for (const c10::OperatorHandle& op : overloads) {
    if (op.operator_name().overload_name == name.overload) found.push_back(op);
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
  const std::string base(text.substr(0, text.size() - name.overload->size() - 1));
  for (const c10::OperatorHandle& op : overloads) {
    const std::string& overload = op.operator_name().overload_name;
    known += (known.empty() ? "'" : ", '") + base + (overload.empty() ? "" : '.' + overload) + "'";
  }
  TORCH_CHECK(false, call, ": the op '", name.base, "' has no overload '", shorten(*name.overload),
              "'. It has ", known, ".");
  return found;  // not reached, which GCC does not see without optimisation
}

}  // namespace torchamp::detail
