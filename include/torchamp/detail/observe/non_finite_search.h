// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Storage.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/internal_ops.h"
#include "torchamp/detail/observe/named_parameters.h"
#include "torchamp/detail/observe/recorded_inputs.h"
#include "torchamp/detail/value_tensors.h"

namespace torchamp::detail {

// Note [Who made the first inf]
//
// LibTorch tells a callback when an op begins, with its inputs, and when it ends, with its outputs;
// likewise for the nodes of the backward pass, with the sequence number by which an op and its node
// find each other. An op is to blame if a tensor that it returns is not finite while all that it
// took was. That alone would blame a mask of -inf and memory that nobody has written yet. So what
// is not finite by intention, from an op that takes an infinite number as an argument or that makes
// an empty tensor, is remembered by its storage, and what is made of it is not blamed on anyone.

/// Listens to the ops of one run.
class NonFiniteSearch {
 public:
  struct Call {
    std::string op;
    std::vector<std::string> parameters;
  };
  struct Found {
    Call call;
    std::string node;  // empty in forward
    Call forward;
    bool inputs_were_finite = true;
    std::vector<std::string> inputs;
    at::ScalarType dtype = at::kFloat;
    int64_t infs = 0, nans = 0, ops_before = 0;
  };
  using Named = NamedParameters;

  /// Runs `body` and listens.
  static std::unique_ptr<NonFiniteSearch> run(const std::function<void()>& body,
                                              const Named& named) {
    const std::scoped_lock one_at_a_time(running());
    std::unique_ptr<NonFiniteSearch> search(new NonFiniteSearch(named));
    current() = search.get();
    struct Callback {
      at::CallbackHandle handle = at::addThreadLocalCallback(
          at::RecordFunctionCallback(&NonFiniteSearch::begin, &NonFiniteSearch::end)
              .needsInputs(true)
              .needsOutputs(true)
              .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
      ~Callback() {
        at::removeCallback(handle);
        current() = nullptr;
      }
    };
    const Callback callback;
    body();
    return search;
  }

  const std::optional<Found>& found() const { return found_; }

 private:
  explicit NonFiniteSearch(const Named& named) : named_(named) {}

  static std::mutex& running() {
    static std::mutex mutex;
    return mutex;
  }
  static NonFiniteSearch*& current() {
    static NonFiniteSearch* search = nullptr;
    return search;
  }

  /// What one call to an op leaves for its end.
  struct Context : at::ObserverContext {
    bool is_node = false;
    bool is_outermost = false;
    Call call;
    bool asks_for_it = false;
    bool takes_remembered = false;
    bool takes_non_finite = false;
    std::vector<std::string> inputs;
  };

  /// How deep the calling thread is in ops and in which backward node.
  struct Thread {
    int depth = 0;
    std::vector<std::pair<std::string, int64_t>> nodes;
  };
  static Thread& thread() {
    static thread_local Thread thread;
    return thread;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    NonFiniteSearch* const search = current();
    if (!search) return nullptr;
    auto context = std::make_unique<Context>();
    if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      context->is_node = true;
      thread().nodes.emplace_back(call.name(), call.seqNr());
      return context;
    }
    const auto name = call.operator_name();
    if (!name) return nullptr;  // a region of code, no op
    context->is_outermost = ++thread().depth == 1;
    if (context->is_outermost && !search->done_) search->look_at_inputs(call, *name, *context);
    return context;
  }

  static void end(const at::RecordFunction& call, at::ObserverContext* base) {
    auto* const context = static_cast<Context*>(base);
    NonFiniteSearch* const search = current();
    if (!context || !search) return;
    if (context->is_node) {
      thread().nodes.pop_back();
      return;
    }
    --thread().depth;
    if (context->is_outermost && !search->done_) search->look_at_outputs(call, *context);
  }

  template <typename Look>
  static void for_each_tensor(at::ArrayRef<const c10::IValue> values, const Look& look) {
    for (const c10::IValue& value : values) for_each_tensor_of(value, look);
  }

  static bool can_look(const at::Tensor& tensor) {
    return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex()) &&
           tensor.layout() == at::kStrided && !tensor.is_meta() && tensor.numel() > 0;
  }
  static bool is_finite(const at::Tensor& tensor) { return tensor.isfinite().all().item<bool>(); }

  void look_at_inputs(const at::RecordFunction& call, const c10::OperatorName& name,
                      Context& context) {
    const at::DisableRecordFunctionGuard quiet;
    const InternalOps guard;
    context.call.op = c10::toString(name);
    context.asks_for_it = context.call.op.find("empty") != std::string::npos;
    for (const c10::IValue& value : recorded_inputs(call)) {
      const bool infinite = (value.isDouble() && !std::isfinite(value.toDouble())) ||
                            (value.isScalar() && value.toScalar().isFloatingPoint() &&
                             !std::isfinite(value.toScalar().toDouble()));
      context.asks_for_it |= infinite;
    }
    for_each_tensor(recorded_inputs(call), [&](const at::Tensor& tensor) {
      if (!can_look(tensor)) return;
      name_parameters(tensor, context.call);
      const std::scoped_lock lock(mutex_);
      const bool finite = is_finite(tensor);
      if (finite) {
        forget(tensor);
      } else if (remembers(tensor)) {
        context.takes_remembered = true;
      } else {
        context.takes_non_finite = true;
      }
      context.inputs.push_back(described(tensor, finite));
    });
    if (thread().nodes.empty() && call.seqNr() >= 0) {
      // The node that carries this number is made by the last op that began with it.
      const std::scoped_lock lock(mutex_);
      by_sequence_[call.seqNr()] = context.call;
    }
  }

  void look_at_outputs(const at::RecordFunction& call, const Context& context) {
    const std::vector<c10::IValue>& outputs = call.outputs();
    const at::DisableRecordFunctionGuard quiet;
    const InternalOps guard;
    const std::scoped_lock lock(mutex_);
    for_each_tensor(at::ArrayRef<c10::IValue>(outputs), [&](const at::Tensor& tensor) {
      if (found_ || !can_look(tensor)) return;
      if (is_finite(tensor)) {
        forget(tensor);
      } else if (context.asks_for_it || context.takes_remembered) {
        remember(tensor);
      } else {
        blame(tensor, context);
      }
    });
    if (!found_ && context.takes_non_finite && !context.asks_for_it) blame({}, context);
    ++ops_;
  }

  void blame(const at::Tensor& output, const Context& context) {
    Found found;
    found.call = context.call;
    found.inputs_were_finite = !context.takes_non_finite;
    found.inputs = context.inputs;
    found.ops_before = ops_;
    if (output.defined()) {
      found.dtype = output.scalar_type();
      const at::Tensor size = output.abs();
      found.infs = size.isinf().sum().item<int64_t>();
      found.nans = size.isnan().sum().item<int64_t>();
    }
    if (!thread().nodes.empty()) {
      const auto& [node, sequence] = thread().nodes.back();
      found.node = node;
      auto next = by_sequence_.upper_bound(sequence);
      if (sequence >= 0 && next != by_sequence_.begin()) found.forward = (--next)->second;
    }
    found_ = std::move(found);
    done_ = true;
  }

  /// What an op was given; with the counts and the names of what came in as it should not.
  std::string described(const at::Tensor& tensor, bool finite) const {
    std::ostringstream text;
    text << tensor.scalar_type() << ' ' << tensor.sizes();
    if (finite) {
      text << " up to " << tensor.abs().max().item<double>();
    } else if (!remembers(tensor)) {
      Call call;
      name_parameters(tensor, call);
      for (std::size_t i = 0; i < call.parameters.size(); ++i) {
        text << (i == 0 ? " of " : ", ") << call.parameters[i];
      }
      const at::Tensor size = tensor.abs();
      text << " with " << size.isinf().sum().item<int64_t>() << " inf, "
           << size.isnan().sum().item<int64_t>() << " NaN";
    }
    return text.str();
  }

  void name_parameters(const at::Tensor& tensor, Call& call) const {
    for (const auto& [name, parameter] : named_) {
      if (!parameter.defined() || !parameter.has_storage()) continue;
      if (!parameter.storage().is_alias_of(tensor.storage())) continue;
      const bool known =
          std::find(call.parameters.begin(), call.parameters.end(), name) != call.parameters.end();
      if (!known) call.parameters.push_back(name);
    }
  }

  // By storage, which is kept so that its address is not used again.
  void remember(const at::Tensor& tensor) {
    if (!remembers(tensor)) remembered_.push_back(tensor.storage());
  }
  bool remembers(const at::Tensor& tensor) const {
    return std::any_of(remembered_.begin(), remembered_.end(), [&](const c10::Storage& storage) {
      return storage.is_alias_of(tensor.storage());
    });
  }
  void forget(const at::Tensor& tensor) {
    const auto is_its = [&](const c10::Storage& storage) {
      return storage.is_alias_of(tensor.storage()) && tensor.nbytes() == storage.nbytes();
    };
    remembered_.erase(std::remove_if(remembered_.begin(), remembered_.end(), is_its),
                      remembered_.end());
  }

  const Named& named_;
  std::mutex mutex_;  // autograd has a thread for each device
  std::map<int64_t, Call> by_sequence_;
  std::vector<c10::Storage> remembered_;
  std::optional<Found> found_;
  std::atomic<bool> done_ = false;  // found_ is set, and stays as it is
  int64_t ops_ = 0;
};

}  // namespace torchamp::detail
