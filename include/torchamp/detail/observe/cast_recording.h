// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "torchamp/cast_recorder.h"
#include "torchamp/detail/devices.h"
#include "torchamp/detail/observe/announcements.h"
#include "torchamp/detail/observe/named_parameters.h"
#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/observe/parameter_owners.h"
#include "torchamp/detail/observe/recorded_op.h"
#include "torchamp/detail/observe/storage_map.h"
#include "torchamp/detail/overlay/rule_of_call.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/weights/cast.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// Note [What a cast recording sees]
// LibTorch tells a recording of every call through its dispatcher, with arguments and results;
// calls that an op makes itself are nested in it. A redispatch is not a call: a kernel of autograd,
// or an overlay of ours, is part of the op. LibTorch's own autocast kernels call their op again,
// which is nested in the first call. So what the program calls are the calls that no other op
// makes, and each of them counts once, by the dtype of its result.
//
// A cast is a call of aten::_to_copy that changes the dtype. It is autocast's if
//  - it comes before any other call that its op makes,
//  - it takes one of the op's own arguments,
//  - the device's autocast key has been excluded since the op was called, and
//  - autograd has not been: kernels that convert for themselves (type promotion on a CPU, say) lie
//    below it. (In inference mode it is excluded all along; but there only additions convert again
//    after autocast did, and those get one cast, see Note [One cast for an addition].)
// This takes in the conversion with which softmax begins when autocast asks it for fp32.
// A cast that no op makes is the program's own, or, in backward, autograd's.

struct DtypeChange {
  at::ScalarType from, to;
  DtypeChange reversed() const { return {to, from}; }
  bool operator==(const DtypeChange&) const = default;
};

/// One call that is being recorded, or a scope around calls.
struct RecordedFrame final : Observer::Call {
  std::thread::id thread = std::this_thread::get_id();

  std::string module;  // innermost known
  std::string node;    // the autograd node that runs, in backward
  bool is_node = false;
  bool is_user_scope = false;
  bool backward = false;
  uint64_t first_node = at::sequence_number::peek();  // of autograd, made in the frame

  const RecordedOp* op = nullptr;   // null: a scope
  RecordedFrame* caller = nullptr;  // the op that makes the call; null: the program
  RecordedFrame* root = nullptr;    // the outermost op that this call is part of
  c10::DispatchKeySet excluded;
  std::vector<RecordedTensor> arguments;
  bool calls_others = false;  // has called an op that is no conversion
  bool comes_first = false;   // its caller had not
  int casts_made = 0;         // for this op and not for the ops that it calls

  // Of a root.
  struct CastMade {
    DtypeChange change;
    int64_t bytes;
    bool undone;
  };
  std::vector<CastMade> casts;
  int64_t cache_hits = 0;
  int64_t cache_misses = 0;
  std::optional<Cast> choice;      // see Note [A choice is told once]
  std::optional<std::string> fp8;  // under the rule fp8: empty, or why it was not followed
  std::optional<DtypeChange> origin;

  /// A look into the cache of weights, for this root.
  void add(const WeightCastNote& note) {
    ++(note.hit ? cache_hits : cache_misses);
    if (!note.in_place) return;
    const auto width = c10::elementSize(note.from) + c10::elementSize(note.to);
    casts.push_back({{note.from, note.to}, note.numel * static_cast<int64_t>(width), false});
  }
};

/// What a CastRecorder counts.
class CastRecording final : public Observer {
 public:
  /// `parameters`: by their names in the model.
  explicit CastRecording(const NamedParameters& parameters) : owners_(owners_of(parameters)) {}

  inline std::unique_ptr<Observer::Call> begin(const at::RecordFunction& call) override;
  inline void end(const at::RecordFunction& call, Observer::Call& begun) override;

  std::vector<CastReport::Row> rows() const {
    const std::scoped_lock lock(mutex_);
    return rows_;
  }

 private:
  using ForwardNode = std::pair<uint64_t, int64_t>;  // thread and sequence number
  using RowKey = std::tuple<bool, std::string, std::string>;

  void start_op(const at::RecordFunction& call, const RecordedOp& op, RecordedFrame& frame);
  void start_root(RecordedFrame& frame);
  void name_new_nodes(const RecordedFrame& frame);
  void end_cast(const std::vector<c10::IValue>& outputs, const RecordedFrame& frame);
  void end_root(const std::vector<c10::IValue>& outputs, const RecordedFrame& frame);
  const RecordedOp* op_of(const at::RecordFunction& call);
  CastReport::Row& row_of(const RecordedFrame& frame);

  mutable std::mutex mutex_;
  std::map<std::thread::id, std::vector<RecordedFrame*>> stacks_;
  std::map<c10::OperatorName, std::optional<RecordedOp>,
           bool (*)(const c10::OperatorName&, const c10::OperatorName&)>
      ops_{[](const c10::OperatorName& a, const c10::OperatorName& b) {
        return std::tie(a.name, a.overload_name) < std::tie(b.name, b.overload_name);
      }};
  StorageMap<std::string> owners_;   // modules by their parameters
  StorageMap<DtypeChange> origins_;  // of tensors that were cast, or computed from such
  std::map<ForwardNode, std::string> forward_modules_;  // for the nodes' backward
  std::map<RowKey, std::size_t> row_index_;
  std::vector<CastReport::Row> rows_;
};

inline const RecordedOp* CastRecording::op_of(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name) return nullptr;
  const auto [found, is_new] = ops_.try_emplace(*name);
  if (is_new) found->second = RecordedOp::of(*name);
  return found->second ? &*found->second : nullptr;
}

inline std::unique_ptr<Observer::Call> CastRecording::begin(const at::RecordFunction& call) {
  const std::scoped_lock lock(mutex_);
  if (call.scope() == at::RecordScope::USER_SCOPE) {
    if (const auto choice = announced_choice(call.name())) {
      const auto& stack = stacks_[std::this_thread::get_id()];
      if (!stack.empty()) stack.back()->choice = choice;
      return nullptr;
    }
    if (std::string_view(call.name()).starts_with(fp8_scope)) {
      const auto& stack = stacks_[std::this_thread::get_id()];
      if (!stack.empty()) stack.back()->fp8 = std::string(call.name()).substr(fp8_scope.size());
      return nullptr;
    }
    if (const auto note = announced_weight_cast(call.name())) {
      const auto& stack = stacks_[std::this_thread::get_id()];
      if (!stack.empty() && stack.back()->root != nullptr) stack.back()->root->add(*note);
      return nullptr;
    }
  }
  auto frame = std::make_unique<RecordedFrame>();
  auto& stack = stacks_[frame->thread];
  RecordedFrame* const outer = stack.empty() ? nullptr : stack.back();
  if (outer != nullptr) {
    frame->module = outer->module;
    frame->node = outer->node;
    frame->backward = outer->backward;
    frame->caller = outer->op ? outer : outer->caller;
  }
  if (call.scope() == at::RecordScope::USER_SCOPE) {
    frame->module = call.name();
    frame->is_user_scope = true;
  } else if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    frame->backward = true;
    frame->node = call.name();
    frame->is_node = true;
    frame->caller = nullptr;
    // It stays: backward() may come again, with retain_graph.
    const auto module = forward_modules_.find({call.forwardThreadId(), call.seqNr()});
    if (module != forward_modules_.end()) frame->module = module->second;
  } else if (const RecordedOp* op = op_of(call)) {
    start_op(call, *op, *frame);
  } else if (std::string_view(call.name()).starts_with("autograd::engine::")) {
    frame->backward = true;
    frame->caller = nullptr;
  }
  stack.push_back(frame.get());
  return frame;
}

inline void CastRecording::start_op(const at::RecordFunction& call, const RecordedOp& op,
                                    RecordedFrame& frame) {
  frame.op = &op;
  frame.excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  for_each_floating_tensor(inputs_of(call), [&](const at::Tensor& tensor) {
    frame.arguments.push_back({tensor.unsafeGetTensorImpl(), storage_of(tensor),
                               tensor.scalar_type(), tensor.device().type(), tensor.dim() > 0});
  });
  if (frame.caller == nullptr) {
    frame.root = &frame;
    start_root(frame);
  } else {
    frame.root = frame.caller->root;
    frame.comes_first = !frame.caller->calls_others;
    if (!op.is_conversion) frame.caller->calls_others = true;
  }
}

inline void CastRecording::start_root(RecordedFrame& frame) {
  const std::string* owner = nullptr;
  for (const RecordedTensor& argument : frame.arguments) {
    if (owner == nullptr) owner = owners_.find(argument.storage);
    const DtypeChange* origin = origins_.find(argument.storage);
    if (origin != nullptr && origin->to == at::kFloat && is_16_bit(origin->from)) {
      frame.origin = *origin;
    }
  }
  if (owner != nullptr) frame.module = *owner;
}

inline void CastRecording::end(const at::RecordFunction& call, Observer::Call& begun) {
  auto& frame = static_cast<RecordedFrame&>(begun);
  const std::scoped_lock lock(mutex_);
  auto& stack = stacks_[frame.thread];
  std::erase(stack, &frame);
  // What the engine then does with the node's gradients is for the same module.
  if (frame.is_node && !stack.empty()) stack.back()->module = frame.module;
  if (frame.is_user_scope || frame.root == &frame) name_new_nodes(frame);
  if (frame.op == nullptr || call.outputs().empty()) return;  // a scope, or an op that threw
  if (frame.op->full_name == "aten::_to_copy") end_cast(call.outputs(), frame);
  if (frame.root == &frame) end_root(call.outputs(), frame);
}

/// Remembers the frame's module for the nodes of autograd made in it that no inner frame has named.
inline void CastRecording::name_new_nodes(const RecordedFrame& frame) {
  if (frame.backward || frame.module.empty()) return;
  const uint64_t thread = at::RecordFunction::currentThreadId();
  for (auto node = frame.first_node; node < at::sequence_number::peek(); ++node) {
    forward_modules_.try_emplace({thread, static_cast<int64_t>(node)}, frame.module);
  }
}

/// Whether autocast made the conversion `cast` for `op`, which called it: see
/// Note [What a cast recording sees].
inline bool is_autocasts(const RecordedFrame& cast, const RecordedFrame& op) {
  const RecordedTensor& from = cast.arguments.front();
  if (!cast.comes_first || !at::autocast::is_autocast_available(from.device)) return false;
  const c10::DispatchKey key = autocast_key(from.device);
  if (op.excluded.has(key) || !cast.excluded.has(key)) return false;
  constexpr auto autograd = c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  if ((cast.excluded & autograd) != (op.excluded & autograd)) return false;
  if (op.op->promotes && op.casts_made > 0) return false;
  return std::any_of(op.arguments.begin(), op.arguments.end(),
                     [&](const RecordedTensor& own) { return own.tensor == from.tensor; });
}

inline void CastRecording::end_cast(const std::vector<c10::IValue>& outputs,
                                    const RecordedFrame& frame) {
  const at::Tensor& result = outputs.front().toTensor();
  if (frame.arguments.empty() || !result.is_floating_point()) return;
  const RecordedTensor& source = frame.arguments.front();
  const DtypeChange change{source.dtype, result.scalar_type()};
  if (change.from == change.to) return;
  const RecordedFrame* conversion = &frame;
  while (conversion->caller != nullptr && conversion->caller->op->is_conversion) {
    conversion = conversion->caller;
  }
  RecordedFrame* const op = conversion->caller;
  if (op != nullptr) {
    if (!is_autocasts(*conversion, *op)) return;
    ++op->casts_made;
  }
  const auto width = c10::elementSize(change.from) + c10::elementSize(change.to);
  const DtypeChange* origin = origins_.find(source.storage);
  frame.root->casts.push_back({change, result.numel() * static_cast<int64_t>(width),
                               origin != nullptr && *origin == change.reversed()});
  origins_.set(result, change);
}

inline CastReport::Row& CastRecording::row_of(const RecordedFrame& frame) {
  const bool is_cast_in_reverse =
      frame.op->is_conversion && std::string_view(frame.node).starts_with("ToCopyBackward");
  const std::string& label = is_cast_in_reverse ? frame.node : frame.op->label;
  const auto [found, is_new] =
      row_index_.try_emplace({frame.backward, frame.module, label}, rows_.size());
  if (is_new) {
    CastReport::Row row;
    row.backward = frame.backward;
    row.module = frame.module;
    row.op = label;
    rows_.push_back(std::move(row));
  }
  return rows_[found->second];
}

inline void CastRecording::end_root(const std::vector<c10::IValue>& outputs,
                                    const RecordedFrame& frame) {
  const RecordedOp& op = *frame.op;
  std::vector<at::Tensor> results;
  for_each_floating_tensor(outputs, [&](const at::Tensor& tensor) { results.push_back(tensor); });
  if (op.is_copy) {
    for (const at::Tensor& result : results) origins_.erase(storage_of(result));
    return;
  }
  if (op.is_conversion ? frame.casts.empty() : !op.computes) return;
  const bool gives_tensors = std::any_of(
      outputs.begin(), outputs.end(),
      [](const c10::IValue& value) { return value.isTensor() || value.isTensorList(); });
  if (frame.arguments.empty() || !gives_tensors) return;

  at::ScalarType dtype = frame.arguments.front().dtype;
  if (!results.empty()) {
    dtype = results.front().scalar_type();
  } else if (!frame.casts.empty()) {
    dtype = frame.casts.back().change.to;
  } else {
    for (const auto& argument : frame.arguments) dtype = c10::promoteTypes(dtype, argument.dtype);
  }
  CastReport::Row& row = row_of(frame);
  ++row.calls[dtype];
  if (frame.fp8) ++(frame.fp8->empty() ? row.fp8 : row.not_fp8[*frame.fp8]);
  for (const auto& cast : frame.casts) {
    ++row.casts;
    row.cast_bytes += cast.bytes;
    row.undone += cast.undone ? 1 : 0;
  }
  row.cache_hits += frame.cache_hits;
  row.cache_misses += frame.cache_misses;
  if (op.is_conversion || dtype != at::kFloat) return;

  bool mixed = has_16_bit_and_fp32(frame.arguments, /*all_decide=*/true);
  bool takes_what_it_gets = false;
  if (mixed || frame.origin) {
    const Cast rule = rule_of_call(op.handle, frame.arguments.front().device, frame.choice);
    takes_what_it_gets = rule == Cast::unchanged || rule == Cast::promote;
    mixed = mixed &&
            (rule == Cast::promote || has_16_bit_and_fp32(frame.arguments, /*all_decide=*/false));
  }
  if (mixed && takes_what_it_gets && !op.is_mutable) ++row.fp32_by_input;
  const auto widening = std::find_if(frame.casts.begin(), frame.casts.end(), [](const auto& cast) {
    return is_16_bit(cast.change.from) && cast.change.to == at::kFloat;
  });
  if (widening != frame.casts.end()) {
    for (const at::Tensor& result : results) origins_.set(result, widening->change);
  } else if (frame.casts.empty() && frame.origin && takes_what_it_gets) {
    for (const at::Tensor& result : results) origins_.set(result, *frame.origin);
  }
}

}  // namespace torchamp::detail

namespace TORCHAMP_NAMESPACE {

inline CastRecorder::CastRecorder(const detail::NamedParameters& parameters)
    : recording_(std::make_shared<detail::CastRecording>(parameters)),
      observation_("CastRecorder", recording_) {}

inline CastReport CastRecorder::report() const {
  return CastReport(recording_->rows());
}

}  // namespace TORCHAMP_NAMESPACE
