// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/extras/observe/observer.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/detail/extras/weights/cast.h"
#include "torchamp/ops.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Arithmetic of recorders, which is hidden from observers.
class NotRecordedOps {
 private:
  at::DisableRecordFunctionGuard not_recorded_;
  InternalOps internal_;
};

/// Data per storage, shared by all views of a tensor. Keeps no storage's memory alive, and
/// distinguishes a new storage at the same address.
template <class Value>
class StorageMap {
 public:
  void set(const at::Tensor& tensor, Value value) {
    if (!tensor.has_storage()) return;
    if (entries_.size() >= next_sweep_) sweep();
    entries_.insert_or_assign(storage_of(tensor), Entry{WeakMemory(tensor), std::move(value)});
  }

  const Value* find(const c10::StorageImpl* storage) const {
    const auto found = entries_.find(storage);
    return found == entries_.end() || found->second.memory.is_gone() ? nullptr
                                                                     : &found->second.value;
  }

  void erase(const c10::StorageImpl* storage) { entries_.erase(storage); }

 private:
  struct Entry {
    WeakMemory memory;
    Value value;
  };

  void sweep() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.memory.is_gone(); });
    next_sweep_ = std::max<std::size_t>(1024, 2 * entries_.size());
  }

  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  std::size_t next_sweep_ = 1024;
};

/// Calls `function` with each defined floating-point tensor in a list of arguments or results.
template <class Values, class Function>
void for_each_floating_tensor(const Values& values, const Function& function) {
  for (const c10::IValue& value : values) {
    for_each_tensor_of(value, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_floating_point()) function(tensor);
    });
  }
}

/// The argument-independent data of one op overload for a recording.
struct RecordedOp {
  c10::OperatorHandle handle;
  std::string full_name;  // "aten::add.Tensor"
  std::string label;      // "add.Tensor", as a Policy takes it
  bool is_conversion;     // requests another dtype: `to` and the ops that it calls
  bool is_copy;           // into a tensor whose dtype is given
  bool computes;          // computes values: no view, and no empty tensor
  bool is_mutable;
  bool promotes;  // see Note [One cast for an addition]

  static std::optional<RecordedOp> of(const c10::OperatorName& name) {
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle) return std::nullopt;
    const std::string full = detail::full_name(name);
    const c10::FunctionSchema& schema = handle->schema();
    const bool is_view = std::ranges::any_of(schema.returns(), [](const c10::Argument& result) {
      return result.alias_info() != nullptr && !result.alias_info()->isWrite();
    });
    const std::string_view base = name.name;
    return RecordedOp{*handle,
                      full,
                      full.starts_with("aten::") ? full.substr(6) : full,
                      base == "aten::to" || base == "aten::_to_copy" || base == "aten::type_as" ||
                          base.starts_with("aten::_autocast_to_"),
                      base == "aten::copy_" || base == "aten::copy",
                      !is_view && !base.ends_with("_like") && !base.starts_with("aten::new_"),
                      schema.is_mutable(),
                      contains(ops::addition, name)};
  }
};

/// A recorded call, or a scope around calls. `Self` derives from it.
template <class Self>
struct RecordedCall : Observer::Call {
  enum class Kind { op, scope, node, engine };
  Kind kind = Kind::op;
  std::string module{};  // innermost known
  std::string node{};    // the autograd node that runs, in backward
  bool in_backward = false;
  bool creates_graph = false;      // backward does
  const RecordedOp* op = nullptr;  // null if the call is no op
  Self* caller = nullptr;          // the op that makes the call; null: the program, or backward
  Self* outer = nullptr;           // the call around it on this thread

  /// Whether it computes gradients: in backward, except if a node runs a function again.
  bool is_of_backward() const {
    return in_backward && (creates_graph || !at::GradMode::is_enabled());
  }

 private:
  template <class>
  friend class Recording;
  std::vector<Self*>* calls_ = nullptr;                // of its thread
  uint64_t first_node_ = at::sequence_number::peek();  // of autograd, made in it
};

/// Determines for each call the op and the autograd node around it, and its module: the owner of a
/// parameter among its arguments, or else the innermost user scope around it; in backward, the
/// module of the op that made the node, or of the parameter whose gradient is added to. Functions
/// are called by one thread at a time.
template <class Recorded>
class Recording : public Observer {
 public:
  std::unique_ptr<Observer::Call> begin(const at::RecordFunction& call) final {
    const std::scoped_lock lock(mutex_);
    std::vector<Recorded*>& calls = calls_[std::this_thread::get_id()];
    Recorded* const outer = calls.empty() ? nullptr : calls.back();
    const std::string_view name = call.name();
    const bool is_scope = call.scope() == at::RecordScope::USER_SCOPE;
    if (is_scope && (name.starts_with(choice_scope) || name.starts_with(fp8_scope) ||
                     name.starts_with(weight_cast_scope))) {
      if (outer != nullptr) take_report(name, *outer);
      return nullptr;
    }
    auto begun = std::make_unique<Recorded>();
    begun->calls_ = &calls;
    begun->outer = outer;
    if (outer != nullptr) {
      begun->module = outer->module;
      begun->node = outer->node;
      begun->in_backward = outer->in_backward;
      begun->creates_graph = outer->creates_graph;
      begun->caller = outer->op != nullptr ? outer : outer->caller;
    }
    const bool is_node = call.scope() == at::RecordScope::BACKWARD_FUNCTION;
    if (is_scope) {
      begun->kind = Recorded::Kind::scope;
      begun->module = name;
    } else if (is_node || name.starts_with("autograd::engine::")) {
      begun->kind = is_node ? Recorded::Kind::node : Recorded::Kind::engine;
      begun->in_backward = true;
      begun->creates_graph = at::GradMode::is_enabled();
      begun->caller = nullptr;
      if (is_node) {
        begun->node = name;
        // Kept, since backward() may run again, with retain_graph.
        const auto module = forward_modules_.find({call.forwardThreadId(), call.seqNr()});
        if (module != forward_modules_.end()) begun->module = module->second;
        begin_node(call, *begun);
      }
    } else {
      begun->op = op_of(call);
      // Not an op, such as "gloo:all_reduce", which may end on another thread, and after its
      // caller.
      if (begun->op == nullptr) return nullptr;
      if (begun->caller == nullptr && (begun->module.empty() || !begun->is_of_backward())) {
        const std::string* owner = nullptr;
        for_each_floating_tensor(inputs_of(call), [&](const at::Tensor& tensor) {
          if (owner == nullptr) owner = owners_.find(storage_of(tensor));
          if (owner == nullptr && is_accumulating(*begun)) owner = owner_of_gradient(tensor);
        });
        if (owner != nullptr) begun->module = *owner;
      }
      begin_op(call, *begun);
    }
    calls.push_back(begun.get());
    return begun;
  }

  void end(const at::RecordFunction& call, Observer::Call& base) final {
    auto& begun = static_cast<Recorded&>(base);
    const std::scoped_lock lock(mutex_);
    std::erase(*begun.calls_, &begun);
    if (begun.kind == Recorded::Kind::node) {
      end_node(begun);
      // The engine's later work on the node's gradients belongs to the same module.
      if (begun.outer != nullptr) begun.outer->module = begun.module;
    } else if (begun.kind != Recorded::Kind::engine) {
      if (begun.caller == nullptr || begun.op == nullptr) name_new_nodes(begun);
      if (begun.op != nullptr) end_op(call, begun);
    }
  }

 protected:
  /// `parameters`: by their names in the model.
  explicit Recording(const NamedParameters& parameters) {
    for (const auto& [name, parameter] : parameters) {
      // For a shared parameter, the first name.
      if (!parameter.defined() || owners_.find(storage_of(parameter)) != nullptr) continue;
      const auto dot = name.rfind('.');
      owners_.set(parameter, dot == std::string::npos ? "" : name.substr(0, dot));
      parameters_.emplace_back(parameter);
    }
  }

  virtual void begin_op(const at::RecordFunction& call, Recorded& begun) = 0;
  /// Without outputs if it threw.
  virtual void end_op(const at::RecordFunction& call, Recorded& begun) = 0;
  virtual void begin_node(const at::RecordFunction&, Recorded&) {}
  virtual void end_node(Recorded&) {}
  /// A report of an autocast kernel by the name of an empty scope in a call, see
  /// Note [Reports of a choice].
  virtual void take_report(std::string_view, Recorded&) {}

  mutable std::mutex mutex_;  // autograd has a thread for each device

 private:
  const RecordedOp* op_of(const at::RecordFunction& call) {
    const auto name = call.operator_name();
    if (!name) return nullptr;
    const auto [found, is_new] = ops_.try_emplace(full_name(*name));
    if (is_new) found->second = RecordedOp::of(*name);
    return found->second ? &*found->second : nullptr;
  }

  /// Whether `call` is of the node that adds a new gradient to a parameter's, which no op has made.
  static bool is_accumulating(const Recorded& call) {
    return call.node.ends_with("AccumulateGrad");
  }
  /// The module of the parameter whose gradient `tensor` is; null if none has it.
  const std::string* owner_of_gradient(const at::Tensor& tensor) {
    const auto* const known = gradients_.find(storage_of(tensor));
    if (known != nullptr) return known;
    for (const WeakTensor& weak : parameters_) {
      const at::Tensor parameter = weak.lock();
      // Autograd's threads for other devices may be writing to gradients of those devices.
      if (!parameter.defined() || parameter.device() != tensor.device()) continue;
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
      if (!gradient.defined()) continue;
      if (const auto* const owner = owners_.find(storage_of(parameter))) {
        gradients_.set(gradient, *owner);
      }
    }
    return gradients_.find(storage_of(tensor));
  }

  /// Records the module for autograd nodes that are created in `call`, but not in inner calls.
  void name_new_nodes(const Recorded& call) {
    if (call.module.empty()) return;
    const uint64_t thread = at::RecordFunction::currentThreadId();
    for (auto node = call.first_node_; node < at::sequence_number::peek(); ++node) {
      forward_modules_.try_emplace({thread, static_cast<int64_t>(node)}, call.module);
    }
  }

  std::map<std::thread::id, std::vector<Recorded*>> calls_;  // that have not ended
  std::map<std::string, std::optional<RecordedOp>> ops_;
  StorageMap<std::string> owners_;  // modules by their parameters
  std::vector<WeakTensor> parameters_;
  StorageMap<std::string> gradients_;  // modules by their parameters' gradients
  std::map<std::pair<uint64_t, int64_t>, std::string> forward_modules_;  // by thread and number
};

}  // namespace TORCHAMP_NAMESPACE::detail
