// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/extras/observe/observer.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/non_finite_op.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Who made the first inf]
//
// LibTorch reports the beginning of each op, with its inputs, and its end, with its outputs, to a
// callback. It also reports nodes of the backward pass, with the sequence number that links an op
// and its node. An op is the cause if it computes a tensor that is not finite from finite inputs.
// This rule alone would name a mask of -inf and uninitialised memory. So tensors that are not
// finite on purpose (from an op with an infinite number as argument, or from an op that makes an
// empty tensor) are recorded by storage, and an op that reads them is not the cause at once.
// Tensors that an op overwrites without reading, such as gradients that zero_grad() zeroes, do not
// count as inputs.
//
// A tensor from outside, or saved inside an op, may be a mask or bad data: the op that reads it
// first is a suspect. An op is also a suspect if it computes NaNs (in backward, infs or NaNs) from
// infs on purpose. The results that are computed from a suspect's tensors are followed: a softmax
// turns a mask into finite numbers, which ends the search. A suspect is the cause if a gradient is
// not finite at the end, or, without a backward pass, a result that no op has used.

/// `zero_` of `aten::zero_.overload`.
inline std::string_view short_name(std::string_view name) {
  name.remove_prefix(name.find("::") + 2);
  return name.substr(0, name.find('.'));
}
/// Ops that overwrite their first argument without reading it.
inline bool overwrites_first(std::string_view op) {
  static constexpr std::array<std::string_view, 14> ops{
      "bernoulli_",     "cauchy_",        "copy_",   "exponential_", "fill_",
      "geometric_",     "log_normal_",    "normal_", "random_",      "uniform_",
      "_foreach_copy_", "_foreach_zero_", "zero_",   "resize_as_"};
  return std::ranges::find(ops, op) != ops.end();
}
/// Whether an op reads only an argument's shape and dtype, as `zeros_like` does.
inline bool ignores_values(std::string_view name, std::size_t argument) {
  const std::string_view op = short_name(name);
  if (argument == 0 && overwrites_first(op)) return true;
  if (!name.starts_with("aten::")) return false;
  return argument == 0 ? op.ends_with("_like") || op.starts_with("new_")
                       : op.ends_with("_as") || op.ends_with("_as_");
}
/// Ops that compute nothing.
inline bool only_arranges(std::string_view op) {
  return op == "detach_" || op == "requires_grad_" || op == "set_" || op == "resize_";
}

/// Whether `dtype` packs two numbers into an element, which LibTorch cannot examine.
constexpr bool is_packed(at::ScalarType dtype) {
#if TORCHAMP_LIBTORCH >= 208
  return dtype == at::ScalarType::Float4_e2m1fn_x2;
#else
  return dtype == at::ScalarType::Undefined;
#endif
}

/// The elements of a tensor that LibTorch can examine; otherwise undefined.
inline at::Tensor values_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || tensor.is_nested()) return {};
  if (!tensor.is_floating_point() && !tensor.is_complex()) return {};
  if (is_packed(tensor.scalar_type())) return {};
  const at::Tensor values = stored_values(tensor);
  return values.defined() && values.numel() > 0 ? values : at::Tensor();
}
/// The tensor in a dtype that LibTorch's functions support.
inline at::Tensor readable(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kComplexHalf) return tensor.to(at::kComplexFloat);
  return at::isFloat8Type(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}
inline bool holds_finite(const at::Tensor& tensor) {
  return readable(tensor).isfinite().all().item<bool>();
}

inline bool has_nan(const at::Tensor& tensor) {
  return readable(tensor).isnan().any().item<bool>();
}

struct NonFiniteCall final : RecordedCall<NonFiniteCall> {
  std::pair<uint64_t, int64_t> sequence{};  // of a node: the forward's thread, and its number there

  // For an op that no other op calls:
  std::vector<std::string> parameters;
  bool asks_for_it = false;     // the program creates infs or NaNs on purpose
  bool gives_anything = false;  // results may be anything: uninitialised memory, or NaNs on purpose
  bool takes_anything = false;  // inputs come from such results
  bool takes_nan = false;
  bool takes_from_outside = false;     // an input is not finite, and no op has made it
  std::optional<std::size_t> suspect;  // the first suspect from which its inputs come
  bool computes = true;
  std::vector<std::string> inputs;
  std::vector<const c10::StorageImpl*> marked;  // of its inputs
  std::vector<at::Tensor> written;              // by an op that returns nothing
};

/// Examines the ops of one run.
class NonFiniteSearch final : public Recording<NonFiniteCall> {
 public:
  explicit NonFiniteSearch(const NamedParameters& named) : Recording(named), named_(named) {}

  /// The op that computed infs or NaNs from finite numbers; otherwise the first suspect that is the
  /// cause.
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

 private:
  using Call = NonFiniteCall;

  /// The data about a tensor that is not finite.
  struct Mark {
    bool is_anything = false;
    std::optional<std::size_t> suspect{};
    std::size_t left = 0;  // the place in left_, if no op has used it
  };
  struct Left {
    std::size_t suspect;
    bool in_backward;
  };

  struct ForwardOp {
    std::string name;
    std::vector<std::string> parameters;
  };

  void begin_node(const at::RecordFunction& function, Call& node) override {
    ran_backward_ = true;
    node.sequence = {function.forwardThreadId(), function.seqNr()};
  }

  void begin_op(const at::RecordFunction& call, Call& begun) override {
    if (begun.caller != nullptr || found_) return;
    const NotRecordedOps internal;
    const std::string& op = begun.op->full_name;
    const c10::FunctionSchema& schema = begun.op->handle.schema();
    const c10::ArrayRef<const c10::IValue> inputs = inputs_of(call);
    begun.gives_anything = op.find("empty") != std::string::npos;
    begun.asks_for_it = begun.gives_anything;
    for (const c10::IValue& value : inputs) {
      const bool is_number =
          value.isDouble() || (value.isScalar() && value.toScalar().isFloatingPoint());
      const double number = is_number ? value.toScalar().toDouble() : 0.;
      begun.asks_for_it |= !std::isfinite(number);
      begun.gives_anything |= std::isnan(number);
    }
    begun.computes = !only_arranges(short_name(op));
    if (!begun.computes) return;
    std::vector<at::Tensor> from_outside;
    const auto look = [&](const at::Tensor& tensor) {
      const at::Tensor values = values_of(tensor);
      if (!values.defined()) return;
      name_parameters(values, begun.parameters);
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
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      const c10::AliasInfo* const alias = argument.alias_info();
      if (alias != nullptr && alias->isWrite() && schema.returns().empty()) {
        for_each_tensor_of(inputs[i],
                           [&](const at::Tensor& tensor) { begun.written.push_back(tensor); });
      }
      if (!ignores_values(op, i) && !argument.is_out()) for_each_tensor_of(inputs[i], look);
    }
    // The node with this number belongs to the last op that began with it on its thread. This holds
    // in the backward pass, which may run a function again.
    if (call.seqNr() >= 0) {
      by_sequence_[{at::RecordFunction::currentThreadId(), call.seqNr()}] = {op, begun.parameters};
    }
    if (from_outside.empty()) return;
    begun.takes_from_outside = true;
    const std::size_t suspect = add_suspect({}, begun);
    for (const at::Tensor& values : from_outside) marks_.set(values, {.suspect = suspect});
    begun.suspect = std::min(begun.suspect.value_or(suspect), suspect);
  }

  void end_op(const at::RecordFunction& call, Call& begun) override {
    if (begun.caller != nullptr || found_ || !begun.computes) return;
    const NotRecordedOps internal;
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
        mark(values, begun);
      } else {
        found_ = report(values, begun);
        return;
      }
    }
    ++ops_;
  }

  /// The inputs were used, unless the op returned them.
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

  /// Marks an output that is not finite, because of an input or on purpose.
  void mark(const at::Tensor& output, Call& begun) {
    const bool is_anything = begun.gives_anything || begun.takes_anything;
    if (!begun.suspect && !is_anything && !begun.asks_for_it &&
        (begun.in_backward || (!begun.takes_nan && has_nan(output)))) {
      begun.suspect = add_suspect(output, begun);
    }
    const Mark* const before = marks_.find(storage_of(output));
    if (before != nullptr && before->suspect == begun.suspect) return;  // a view, or in place
    if (before != nullptr) left_.erase(before->left);
    Mark now{.is_anything = is_anything, .suspect = begun.suspect};
    if (now.suspect) {
      now.left = ++marked_;
      left_.emplace(now.left, Left{*now.suspect, begun.in_backward});
    }
    marks_.set(output, now);
  }

  std::size_t add_suspect(const at::Tensor& output, const Call& call) {
    suspects_.push_back(report(output, call));
    return suspects_.size() - 1;
  }

  NonFiniteOp report(const at::Tensor& output, const Call& call) const {
    NonFiniteOp found;
    found.op = call.op->full_name;
    found.parameters = call.parameters;
    found.inputs_were_finite = !call.takes_from_outside;
    found.inputs = call.inputs;
    found.ops_before = ops_;
    if (output.defined()) {
      found.dtype = output.scalar_type();
      const at::Tensor size = readable(output).abs();
      found.infs = size.isinf().sum().item<int64_t>();
      found.nans = size.isnan().sum().item<int64_t>();
    }
    const Call* node = call.outer;
    while (node != nullptr && node->kind != Call::Kind::node) node = node->outer;
    if (node == nullptr) return found;
    found.in_backward = true;
    found.node = node->node;
    found.parameters.clear();
    auto next = by_sequence_.upper_bound(node->sequence);
    if (next == by_sequence_.begin()) return found;
    if ((--next)->first.first != node->sequence.first) return found;
    found.forward_op = next->second.name;
    found.parameters = next->second.parameters;
    return found;
  }

  /// Describes an input, a tensor of these sizes; with counts and names if it is not finite and
  /// should be.
  std::string described(const at::Tensor& tensor, at::IntArrayRef sizes, bool finite) const {
    std::ostringstream text = classic_stream();
    text << tensor.scalar_type() << ' ' << sizes;
    if (finite) {
      text << " up to " << readable(tensor).abs().max().item<double>();
    } else if (const Mark* mark = marks_.find(storage_of(tensor)); !mark || mark->suspect) {
      std::vector<std::string> names;
      name_parameters(tensor, names);
      if (!names.empty()) text << " of " << c10::Join(", ", names);
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

  /// Removes the mark of a tensor that is now finite, if the tensor has all of its memory.
  void forget(const at::Tensor& tensor) {
    const Mark* const mark = marks_.find(storage_of(tensor));
    if (mark == nullptr || tensor.nbytes() != tensor.storage().nbytes()) return;
    left_.erase(mark->left);
    marks_.erase(storage_of(tensor));
  }

  const NamedParameters named_;
  std::map<std::pair<uint64_t, int64_t>, ForwardOp> by_sequence_;
  StorageMap<Mark> marks_;  // of what is not finite
  std::size_t marked_ = 0;
  std::map<std::size_t, Left> left_;
  std::vector<NonFiniteOp> suspects_;
  std::optional<NonFiniteOp> found_;
  bool ran_backward_ = false;
  int64_t ops_ = 0;
};

TORCHAMP_BODY std::optional<NonFiniteOp> find_non_finite_op(
    const std::function<void()>& forward_and_backward, const NamedParameters& named) {
  TORCH_CHECK_VALUE(
      forward_and_backward,
      "first_non_finite_op: the function is empty. Pass one that runs forward and backward.");
  const auto search = std::make_shared<NonFiniteSearch>(named);
  {
    const Observation observation("first_non_finite_op", search);
    forward_and_backward();
  }
  return search->found();
}

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

TORCHAMP_BODY std::ostream& operator<<(std::ostream& out, const NonFiniteOp& found) {
  out << found.op;
  if (found.in_backward) {
    out << " in backward (" << found.node;
    if (!found.forward_op.empty()) out << ", of " << found.forward_op;
  }
  if (!found.parameters.empty()) out << " on " << c10::Join(", ", found.parameters);
  if (found.in_backward) out << ')';
  if (found.inputs_were_finite) {
    out << " made " << found.infs << " inf, " << found.nans << " NaN in " << found.dtype;
  } else {
    out << " was given infs or NaNs";
  }
  if (!found.inputs.empty()) out << ", of " << c10::Join(", ", found.inputs);
  return out << " (after " << found.ops_before << " ops)\n";
}

}  // namespace TORCHAMP_NAMESPACE
