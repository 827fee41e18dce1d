// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
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

#include "torchamp/detail/observe/finite_values.h"
#include "torchamp/detail/observe/named_parameters.h"
#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/observe/print_report.h"
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
// an empty tensor, is remembered by its storage, and what is made of it is not blamed at once. What
// an op overwrites without reading it, such as the gradients that zero_grad() fills with zeros, is
// none of its inputs.
//
// What came in from outside, or was saved by the inside of an op, may be a mask or bad data: the
// op that takes it first is a suspect. So is one that makes NaNs, or in backward anything, of infs
// that the program asked for. What is made of a suspect's tensors is followed: a softmax makes
// finite numbers of a mask, and there it ends. A suspect is to blame if something is left of it: a
// gradient, or without a backward pass any result that no op made something else of.

/// Looks at the ops of one run.
class NonFiniteSearch final : public Observer {
 public:
  explicit NonFiniteSearch(NamedParameters named) : named_(std::move(named)) {}

  /// The op that made infs or NaNs of finite numbers, or else the first suspect that is to blame.
  std::optional<NonFiniteOp> found() const {
    const std::scoped_lock lock(mutex_);
    if (found_) return found_;
    std::optional<std::size_t> first;
    for (const auto& [id, left] : left_) {
      if (ran_backward_ && !left.in_backward) continue;
      first = std::min(first.value_or(left.suspect), left.suspect);
    }
    return first ? std::optional(suspects_[*first]) : std::nullopt;
  }

  std::unique_ptr<Observer::Call> begin(const at::RecordFunction& call) override {
    auto begun = std::make_unique<Call>();
    const std::scoped_lock lock(mutex_);
    Thread& thread = threads_[std::this_thread::get_id()];
    if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      ran_backward_ = begun->is_node = true;
      thread.nodes.push_back({call.name(), {call.forwardThreadId(), call.seqNr()}});
      return begun;
    }
    if (std::string_view(call.name()).starts_with("autograd::engine::")) {
      begun->is_engine = true;  // which adds up gradients between nodes
      ++thread.engines;
      return begun;
    }
    const auto name = call.operator_name();
    if (!name) return nullptr;  // a region of code, no op
    begun->is_outermost = ++thread.depth == 1;
    try {
      if (begun->is_outermost && !found_) look_at_inputs(call, *name, thread, *begun);
    } catch (...) {  // LibTorch goes on without the end of this call
      --thread.depth;
      throw;
    }
    return begun;
  }

  void end(const at::RecordFunction& call, Observer::Call& base) override {
    auto& begun = static_cast<Call&>(base);
    const std::scoped_lock lock(mutex_);
    Thread& thread = threads_[std::this_thread::get_id()];
    if (begun.is_node) {
      thread.nodes.pop_back();
      return;
    }
    if (begun.is_engine) {
      --thread.engines;
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
    bool is_engine = false;
    bool is_outermost = false;
    Op op;
    bool asks_for_it = false;     // the program wants what is not finite
    bool gives_anything = false;  // memory that nobody has written, or NaNs as asked for
    bool takes_anything = false;  // made of such
    bool takes_nan = false;
    bool takes_from_outside = false;     // what is not finite and no op has made
    std::optional<std::size_t> suspect;  // the first one of which its inputs are made
    bool computes = true;
    std::vector<std::string> inputs;
    std::vector<const c10::StorageImpl*> marked;  // of its inputs
    std::vector<at::Tensor> written;              // by an op that returns nothing
  };

  /// What is known of a tensor that is not finite.
  struct Mark {
    bool is_anything = false;
    std::optional<std::size_t> suspect{};
    std::size_t left = 0;  // in left_, if nothing else has been made of it
  };
  struct Left {
    std::size_t suspect;
    bool in_backward;
  };

  /// How deep a thread is in ops, and in which nodes of the backward pass.
  struct Thread {
    int depth = 0, engines = 0;
    struct Node {
      std::string name;
      std::pair<uint64_t, int64_t> sequence;  // the forward's thread, the number there
    };
    std::vector<Node> nodes;

    bool in_backward() const { return engines > 0 || !nodes.empty(); }
  };

  void look_at_inputs(const at::RecordFunction& call, const c10::OperatorName& name,
                      const Thread& thread, Call& begun) {
    const at::DisableRecordFunctionGuard quiet;
    const InternalOps guard;
    begun.op.name = c10::toString(name);
    begun.gives_anything = begun.op.name.find("empty") != std::string::npos;
    begun.asks_for_it = begun.gives_anything;
    for (const c10::IValue& value : inputs_of(call)) {
      const bool is_number =
          value.isDouble() || (value.isScalar() && value.toScalar().isFloatingPoint());
      const double number = is_number ? value.toScalar().toDouble() : 0.;
      begun.asks_for_it |= !std::isfinite(number);
      begun.gives_anything |= std::isnan(number);
    }
    begun.computes = !only_arranges(short_name(begun.op.name));
    if (!begun.computes) return;
    const std::optional<c10::FunctionSchema> schema = call.operator_schema();
    std::vector<at::Tensor> from_outside;
    const auto look = [&](const at::Tensor& tensor) {
      const at::Tensor values = values_of(tensor);
      if (!values.defined()) return;
      name_parameters(values, begun.op.parameters);
      const bool finite = holds_finite(values);
      const Mark* const mark = finite ? nullptr : marks_.find(storage_of(values));
      begun.inputs.push_back(described(values, tensor.sizes(), finite));
      if (finite) return forget(values);
      begun.marked.push_back(storage_of(values));
      begun.takes_nan = begun.takes_nan || has_nan(values);
      if (mark == nullptr) {
        from_outside.push_back(values);
      } else {
        begun.takes_anything |= mark->is_anything;
        if (mark->suspect)
          begun.suspect = std::min(begun.suspect.value_or(*mark->suspect), *mark->suspect);
      }
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
    if (from_outside.empty()) return;
    begun.takes_from_outside = true;
    const std::size_t suspect = add_suspect({}, thread, begun);
    for (const at::Tensor& values : from_outside) marks_.set(values, {.suspect = suspect});
    begun.suspect = std::min(begun.suspect.value_or(suspect), suspect);
  }

  void look_at_outputs(const at::RecordFunction& call, const Thread& thread, Call& begun) {
    const at::DisableRecordFunctionGuard quiet;
    const InternalOps guard;
    if (!begun.computes) return;
    std::vector<at::Tensor> outputs = begun.written;
    for (const c10::IValue& output : call.outputs()) {
      for_each_tensor_of(output, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
    }
    std::erase_if(outputs, [](const at::Tensor& tensor) { return !values_of(tensor).defined(); });
    if (!outputs.empty()) end_what_is_left(begun.marked, outputs);
    for (const at::Tensor& output : outputs) {
      const at::Tensor values = values_of(output);
      if (holds_finite(values)) {
        forget(values);
      } else if (begun.asks_for_it || !begun.marked.empty()) {
        mark(values, thread, begun);
      } else {
        found_ = report(values, thread, begun);
        return;
      }
    }
    ++ops_;
  }

  /// Something else has been made of inputs, unless the op gave them back.
  void end_what_is_left(const std::vector<const c10::StorageImpl*>& inputs,
                        const std::vector<at::Tensor>& outputs) {
    for (const c10::StorageImpl* const input : inputs) {
      const Mark* const mark = marks_.find(input);
      const bool is_output = std::ranges::any_of(outputs, [&](const at::Tensor& output) {
        return storage_of(values_of(output)) == input;
      });
      if (mark != nullptr && !is_output) left_.erase(mark->left);
    }
  }

  /// Marks an output that is not finite, as was an input, or as it was asked for.
  void mark(const at::Tensor& output, const Thread& thread, Call& begun) {
    const bool is_anything = begun.gives_anything || begun.takes_anything;
    if (!begun.suspect && !is_anything && !begun.asks_for_it &&
        (thread.in_backward() || (!begun.takes_nan && has_nan(output)))) {
      begun.suspect = add_suspect(output, thread, begun);
    }
    const Mark* const before = marks_.find(storage_of(output));
    if (before != nullptr && before->suspect == begun.suspect) return;  // a view, or in place
    if (before != nullptr) left_.erase(before->left);
    Mark now{.is_anything = is_anything, .suspect = begun.suspect};
    if (now.suspect) {
      now.left = ++marked_;
      left_.emplace(now.left, Left{*now.suspect, thread.in_backward()});
    }
    marks_.set(output, now);
  }

  std::size_t add_suspect(const at::Tensor& output, const Thread& thread, const Call& call) {
    suspects_.push_back(report(output, thread, call));
    return suspects_.size() - 1;
  }

  NonFiniteOp report(const at::Tensor& output, const Thread& thread, const Call& call) const {
    NonFiniteOp found;
    found.op = call.op.name;
    found.parameters = call.op.parameters;
    found.inputs_were_finite = !call.takes_from_outside;
    found.inputs = call.inputs;
    found.ops_before = ops_;
    if (output.defined()) {
      found.dtype = output.scalar_type();
      const at::Tensor size = readable(output).abs();
      found.infs = size.isinf().sum().item<int64_t>();
      found.nans = size.isnan().sum().item<int64_t>();
    }
    if (thread.nodes.empty()) return found;
    const auto& [node, sequence] = thread.nodes.back();
    found.in_backward = true;
    found.node = node;
    found.parameters.clear();
    auto next = by_sequence_.upper_bound(sequence);
    if (next == by_sequence_.begin()) return found;
    if ((--next)->first.first != sequence.first) return found;
    found.forward_op = next->second.name;
    found.parameters = next->second.parameters;
    return found;
  }

  /// What an op was given, a tensor of these sizes; with the counts and the names of what came in
  /// as it should not.
  std::string described(const at::Tensor& tensor, at::IntArrayRef sizes, bool finite) const {
    std::ostringstream text = classic_stream();
    text << tensor.scalar_type() << ' ' << sizes;
    if (finite) {
      text << " up to " << readable(tensor).abs().max().item<double>();
    } else if (const Mark* mark = marks_.find(storage_of(tensor)); !mark || mark->suspect) {
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

  /// What is finite now, if it is all of its memory.
  void forget(const at::Tensor& tensor) {
    const Mark* const mark = marks_.find(storage_of(tensor));
    if (mark == nullptr || tensor.nbytes() != tensor.storage().nbytes()) return;
    left_.erase(mark->left);
    marks_.erase(storage_of(tensor));
  }

  const NamedParameters named_;
  mutable std::mutex mutex_;  // autograd has a thread for each device
  std::map<std::thread::id, Thread> threads_;
  std::map<std::pair<uint64_t, int64_t>, Op> by_sequence_;
  StorageMap<Mark> marks_;  // of what is not finite
  std::size_t marked_ = 0;
  std::map<std::size_t, Left> left_;
  std::vector<NonFiniteOp> suspects_;
  std::optional<NonFiniteOp> found_;
  bool ran_backward_ = false;
  int64_t ops_ = 0;
};

inline std::optional<NonFiniteOp> find_non_finite_op(
    const std::function<void()>& forward_and_backward, const NamedParameters& named) {
  TORCH_CHECK_VALUE(forward_and_backward,
                    "first_non_finite_op: the function is empty. Give one that runs forward and "
                    "backward.");
  const auto search = std::make_shared<NonFiniteSearch>(named);
  {
    const Observation observation("first_non_finite_op", search);
    forward_and_backward();
  }
  return search->found();
}

}  // namespace torchamp::detail
