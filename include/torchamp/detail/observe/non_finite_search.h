// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "torchamp/detail/observe/named_parameters.h"
#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/observe/storage_map.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/non_finite_op.h"

namespace torchamp::detail {

// Note [Who made the first inf]
//
// LibTorch tells a callback when an op begins, with its inputs, and when it ends, with its outputs;
// likewise for the nodes of the backward pass, with the sequence number by which an op and its node
// find each other. An op is to blame if a tensor that it returns is not finite while all that it
// took was. That alone would blame a mask of -inf and memory that nobody has written yet. So what
// is not finite by intention, from an op that takes an infinite number as an argument or that makes
// an empty tensor, is remembered by its storage, and what is made of it is not blamed on anyone.
// What an op overwrites without reading it, such as the gradients that zero_grad() fills with
// zeros, is none of its inputs.

/// Looks at the ops of one run.
class NonFiniteSearch final : public Observer {
 public:
  explicit NonFiniteSearch(NamedParameters named) : named_(std::move(named)) {}

  std::optional<NonFiniteOp> found() const {
    const std::scoped_lock lock(mutex_);
    return found_;
  }

  std::unique_ptr<Observer::Call> begin(const at::RecordFunction& call) override {
    auto begun = std::make_unique<Call>();
    const std::scoped_lock lock(mutex_);
    Thread& thread = threads_[std::this_thread::get_id()];
    if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      begun->is_node = true;
      thread.nodes.push_back({call.name(), {call.forwardThreadId(), call.seqNr()}});
      return begun;
    }
    const auto name = call.operator_name();
    if (!name) return nullptr;  // a region of code, no op
    begun->is_outermost = ++thread.depth == 1;
    try {
      if (begun->is_outermost && !found_) look_at_inputs(call, *name, *begun);
    } catch (...) {  // LibTorch goes on without the end of this call
      --thread.depth;
      throw;
    }
    return begun;
  }

  void end(const at::RecordFunction& call, Observer::Call& base) override {
    const auto& begun = static_cast<const Call&>(base);
    const std::scoped_lock lock(mutex_);
    Thread& thread = threads_[std::this_thread::get_id()];
    if (begun.is_node) {
      thread.nodes.pop_back();
      return;
    }
    --thread.depth;
    if (begun.is_outermost && !found_) look_at_outputs(call, thread, begun);
  }

 private:
  struct Op {
    std::string name;
    std::vector<std::string> parameters;
  };

  struct Call final : Observer::Call {
    bool is_node = false;
    bool is_outermost = false;
    Op op;
    bool asks_for_it = false;
    bool takes_remembered = false;
    bool takes_non_finite = false;
    bool computes = true;
    std::vector<std::string> inputs;
    std::vector<at::Tensor> written;  // by an op that returns nothing
  };

  /// How deep a thread is in ops, and in which nodes of the backward pass.
  struct Thread {
    int depth = 0;
    struct Node {
      std::string name;
      std::pair<uint64_t, int64_t> sequence;  // the forward's thread, the number there
    };
    std::vector<Node> nodes;
  };

  /// `zero_` of `aten::zero_.overload`.
  static std::string_view short_name(std::string_view name) {
    name.remove_prefix(name.find("::") + 2);
    return name.substr(0, name.find('.'));
  }
  /// Ops whose first argument comes out with other values, whatever it held.
  static bool overwrites_first(std::string_view op) {
    static constexpr std::array<std::string_view, 14> ops{
        "bernoulli_",     "cauchy_",        "copy_",   "exponential_", "fill_",
        "geometric_",     "log_normal_",    "normal_", "random_",      "uniform_",
        "_foreach_copy_", "_foreach_zero_", "zero_",   "resize_as_"};
    return std::ranges::find(ops, op) != ops.end();
  }
  /// Whether an op looks at an argument's shape and dtype only, as `zeros_like` does.
  static bool ignores_values(std::string_view name, std::size_t argument) {
    const std::string_view op = short_name(name);
    if (argument == 0 && overwrites_first(op)) return true;
    if (!name.starts_with("aten::")) return false;
    return argument == 0 ? op.ends_with("_like") || op.starts_with("new_")
                         : op.ends_with("_as") || op.ends_with("_as_");
  }
  /// Ops that compute nothing.
  static bool only_arranges(std::string_view op) {
    return op == "detach_" || op == "requires_grad_" || op == "set_" || op == "resize_";
  }

  /// The numbers that a tensor holds, where there are any that LibTorch can look at; else
  /// undefined.
  static at::Tensor values_of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_meta() || tensor.is_nested()) return {};
    if (!tensor.is_floating_point() && !tensor.is_complex()) return {};
    if (tensor.scalar_type() == at::ScalarType::Float4_e2m1fn_x2) return {};
    const at::Tensor values = [&]() -> at::Tensor {
      switch (tensor.layout()) {
        case at::kStrided:
          return tensor;
        case at::kSparse:
          return tensor._values();
        case at::kSparseCsr:
        case at::kSparseCsc:
        case at::kSparseBsr:
        case at::kSparseBsc:
          return tensor.values();
        default:
          return {};
      }
    }();
    return values.defined() && values.numel() > 0 ? values : at::Tensor();
  }
  /// In a dtype that LibTorch's functions know.
  static at::Tensor readable(const at::Tensor& tensor) {
    if (tensor.scalar_type() == at::kComplexHalf) return tensor.to(at::kComplexFloat);
    return at::isFloat8Type(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
  }
  static bool is_finite(const at::Tensor& tensor) {
    return readable(tensor).isfinite().all().item<bool>();
  }

  void look_at_inputs(const at::RecordFunction& call, const c10::OperatorName& name, Call& begun) {
    const at::DisableRecordFunctionGuard quiet;
    const InternalOps guard;
    begun.op.name = c10::toString(name);
    begun.asks_for_it = begun.op.name.find("empty") != std::string::npos;
    for (const c10::IValue& value : inputs_of(call)) {
      const bool infinite = (value.isDouble() && !std::isfinite(value.toDouble())) ||
                            (value.isScalar() && value.toScalar().isFloatingPoint() &&
                             !std::isfinite(value.toScalar().toDouble()));
      begun.asks_for_it |= infinite;
    }
    begun.computes = !only_arranges(short_name(begun.op.name));
    if (!begun.computes) return;
    const std::optional<c10::FunctionSchema> schema = call.operator_schema();
    const auto look = [&](const at::Tensor& tensor) {
      const at::Tensor values = values_of(tensor);
      if (!values.defined()) return;
      name_parameters(values, begun.op.parameters);
      const bool finite = is_finite(values);
      if (finite) {
        forget(values);
      } else if (remembers(values)) {
        begun.takes_remembered = true;
      } else {
        begun.takes_non_finite = true;
      }
      begun.inputs.push_back(described(values, tensor.sizes(), finite));
    };
    const c10::ArrayRef<const c10::IValue> inputs = inputs_of(call);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool known = schema && i < schema->arguments().size();
      const c10::AliasInfo* const alias = known ? schema->arguments()[i].alias_info() : nullptr;
      if (alias && alias->isWrite() && schema->returns().empty()) {
        for_each_tensor_of(inputs[i],
                           [&](const at::Tensor& tensor) { begun.written.push_back(tensor); });
      }
      if (ignores_values(begun.op.name, i) || (known && schema->arguments()[i].is_out())) continue;
      for_each_tensor_of(inputs[i], look);
    }
    // The node that carries this number is made by the last op that began with it on its thread,
    // in the backward pass too: it may run a function again.
    if (call.seqNr() >= 0) {
      by_sequence_[{at::RecordFunction::currentThreadId(), call.seqNr()}] = begun.op;
    }
  }

  void look_at_outputs(const at::RecordFunction& call, const Thread& thread, const Call& begun) {
    const std::vector<c10::IValue>& outputs = call.outputs();
    const at::DisableRecordFunctionGuard quiet;
    const InternalOps guard;
    if (!begun.computes) return;
    const auto look = [&](const at::Tensor& tensor) {
      const at::Tensor values = found_ ? at::Tensor() : values_of(tensor);
      if (!values.defined()) return;
      if (is_finite(values)) {
        forget(values);
      } else if (begun.asks_for_it || begun.takes_remembered) {
        remember(values);
      } else {
        blame(values, thread, begun);
      }
    };
    for (const c10::IValue& output : outputs) for_each_tensor_of(output, look);
    for (const at::Tensor& tensor : begun.written) look(tensor);
    if (!found_ && begun.takes_non_finite && !begun.asks_for_it) blame({}, thread, begun);
    ++ops_;
  }

  void blame(const at::Tensor& output, const Thread& thread, const Call& call) {
    NonFiniteOp& found = found_.emplace();
    found.op = call.op.name;
    found.parameters = call.op.parameters;
    found.inputs_were_finite = !call.takes_non_finite;
    found.inputs = call.inputs;
    found.ops_before = ops_;
    if (output.defined()) {
      found.dtype = output.scalar_type();
      const at::Tensor size = readable(output).abs();
      found.infs = size.isinf().sum().item<int64_t>();
      found.nans = size.isnan().sum().item<int64_t>();
    }
    if (thread.nodes.empty()) return;
    const auto& [node, sequence] = thread.nodes.back();
    found.in_backward = true;
    found.node = node;
    found.parameters.clear();
    auto next = by_sequence_.upper_bound(sequence);
    if (sequence.second < 0 || next == by_sequence_.begin()) return;
    if ((--next)->first.first != sequence.first) return;
    found.forward_op = next->second.name;
    found.parameters = next->second.parameters;
  }

  /// What an op was given, a tensor of these sizes; with the counts and the names of what came in
  /// as it should not.
  std::string described(const at::Tensor& tensor, at::IntArrayRef sizes, bool finite) const {
    std::ostringstream text;
    text << tensor.scalar_type() << ' ' << sizes;
    if (finite) {
      text << " up to " << readable(tensor).abs().max().item<double>();
    } else if (!remembers(tensor)) {
      std::vector<std::string> names;
      name_parameters(tensor, names);
      for (std::size_t i = 0; i < names.size(); ++i) text << (i == 0 ? " of " : ", ") << names[i];
      const at::Tensor size = readable(tensor).abs();
      text << " with " << size.isinf().sum().item<int64_t>() << " inf, "
           << size.isnan().sum().item<int64_t>() << " NaN";
    }
    return text.str();
  }

  void name_parameters(const at::Tensor& tensor, std::vector<std::string>& names) const {
    for (const auto& [name, parameter] : named_) {
      if (!parameter.defined() || !parameter.has_storage()) continue;
      if (!parameter.storage().is_alias_of(tensor.storage())) continue;
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }

  void remember(const at::Tensor& tensor) { remembered_.set(tensor, true); }
  bool remembers(const at::Tensor& tensor) const {
    return remembered_.find(storage_of(tensor)) != nullptr;
  }
  void forget(const at::Tensor& tensor) {
    if (tensor.nbytes() == tensor.storage().nbytes()) remembered_.erase(storage_of(tensor));
  }

  const NamedParameters named_;
  mutable std::mutex mutex_;  // autograd has a thread for each device
  std::map<std::thread::id, Thread> threads_;
  std::map<std::pair<uint64_t, int64_t>, Op> by_sequence_;
  StorageMap<bool> remembered_;  // what is not finite by intention
  std::optional<NonFiniteOp> found_;
  int64_t ops_ = 0;
};

inline std::optional<NonFiniteOp> find_non_finite_op(
    const std::function<void()>& forward_and_backward, const NamedParameters& named) {
  const auto search = std::make_shared<NonFiniteSearch>(named);
  {
    const Observation observation("first_non_finite_op", search);
    forward_and_backward();
  }
  return search->found();
}

}  // namespace torchamp::detail
