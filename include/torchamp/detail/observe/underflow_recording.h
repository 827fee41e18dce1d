// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

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
#include <utility>
#include <vector>

#include "torchamp/detail/observe/announcements.h"
#include "torchamp/detail/observe/call_in_fp32.h"
#include "torchamp/detail/observe/named_parameters.h"
#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/observe/parameter_owners.h"
#include "torchamp/detail/observe/recorded_op.h"
#include "torchamp/detail/observe/storage_map.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/detail/tensors.h"
#include "torchamp/detail/weights/cast.h"

namespace torchamp::detail {

// Note [What a gradient is]
// LibTorch tells an observer of the calls in backward, and in which node they are made, but not
// what the node gives. A result of a call in a node is a gradient if its memory outlives the node:
// what is temporary there does not. Calls that the engine makes between nodes make gradients: it
// sums over dimensions that were broadcast, and casts. It also adds up what several nodes give for
// one tensor, which loses nothing, since a sum of two 16-bit numbers is a multiple of the smallest
// one; nor does a parameter's own accumulation. Such sums, copies and casts carry on what they are
// made of: where AccumulateGrad takes one, these were gradients of weights.

/// A 16-bit gradient that an op made.
struct MadeGradient {
  std::string module;
  bool of_weights = false;
  int64_t elements = 0;
  at::Tensor lost{};  // 0-dim, how many; undefined if it was not looked at
};

/// What is seen of one step.
class UnderflowRecording final : public Observer {
 public:
  explicit UnderflowRecording(const NamedParameters& parameters) : owners_(owners_of(parameters)) {}

  std::unique_ptr<Observer::Call> begin(const at::RecordFunction& call) override {
    const std::scoped_lock lock(mutex_);
    Thread& thread = threads_[std::this_thread::get_id()];
    const std::string_view name = call.name();
    const bool is_scope = call.scope() == at::RecordScope::USER_SCOPE;
    if (is_scope && (announced_choice(call.name()) || name.starts_with(fp8_scope) ||
                     name.starts_with(weight_cast_scope))) {
      return nullptr;
    }
    auto frame = std::make_unique<Frame>();
    if (!thread.empty()) {
      frame->module = thread.back()->module;
      frame->in_backward = thread.back()->in_backward;
    }
    if (is_scope) {
      frame->module = name;
    } else if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      begin_node(call, *frame);
    } else if (name.starts_with("autograd::engine::")) {
      frame->kind = Frame::Kind::engine;
      frame->in_backward = true;
    } else {
      const RecordedOp* const op = op_of(call);
      if (op == nullptr || (!thread.empty() && thread.back()->op != nullptr)) return nullptr;
      frame->op = op;
      begin_op(inputs_of(call), thread.empty() ? nullptr : thread.back(), *frame);
    }
    thread.push_back(frame.get());
    return frame;
  }

  void end(const at::RecordFunction& call, Observer::Call& base) override {
    auto& frame = static_cast<Frame&>(base);
    const std::scoped_lock lock(mutex_);
    Thread& thread = threads_[frame.thread];
    std::erase(thread, &frame);
    Frame* const outer = thread.empty() ? nullptr : thread.back();
    if (frame.kind == Frame::Kind::node) {
      end_node(frame);
      // What the engine then does with the node's gradients is for the same module.
      if (outer != nullptr) outer->module = frame.module;
      return;
    }
    if (frame.kind == Frame::Kind::other) name_new_nodes(frame);
    if (frame.op != nullptr && frame.in_backward) end_op(call.outputs(), frame, outer);
  }

  /// The gradients of the step, in the order in which they were made.
  const std::vector<std::shared_ptr<MadeGradient>>& gradients() const { return gradients_; }

 private:
  using Made = std::shared_ptr<MadeGradient>;
  struct Frame final : Observer::Call {
    enum class Kind { other, node, engine };
    Kind kind = Kind::other;
    std::thread::id thread = std::this_thread::get_id();
    std::string module{};  // innermost known
    bool in_backward = false;
    uint64_t first_node = at::sequence_number::peek();  // of autograd, made in the frame

    // Of an op.
    const RecordedOp* op = nullptr;
    bool carries_on = false;                         // adds nothing of its own to what it takes
    std::vector<Made> taken{};                       // that its arguments are made of
    std::vector<const c10::StorageImpl*> sources{};  // of its floating-point arguments
    std::optional<std::vector<at::Tensor>> exact{};  // its results in fp32

    // Of a node.
    bool accumulates = false;
    std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, Made>> made{};
  };
  using Thread = std::vector<Frame*>;

  const RecordedOp* op_of(const at::RecordFunction& call) {
    const auto name = call.operator_name();
    if (!name) return nullptr;
    const auto [found, is_new] = ops_.try_emplace(c10::toString(*name));
    if (is_new) found->second = RecordedOp::of(*name);
    return found->second ? &*found->second : nullptr;
  }

  void begin_node(const at::RecordFunction& call, Frame& frame) {
    frame.kind = Frame::Kind::node;
    frame.in_backward = true;
    frame.accumulates = std::string_view(call.name()).ends_with("AccumulateGrad");
    // It stays: backward() may come again, with retain_graph.
    const auto module = forward_modules_.find({call.forwardThreadId(), call.seqNr()});
    frame.module = module == forward_modules_.end() ? std::string() : module->second;
    if (!frame.accumulates) return;
    for_each_floating_tensor(inputs_of(call), [&](const at::Tensor& gradient) {
      const std::vector<Made>* const parts = made_of_.find(storage_of(gradient));
      if (parts == nullptr) return;
      for (const Made& part : *parts) part->of_weights = true;
    });
  }

  void end_node(Frame& frame) {
    for (auto& [storage, made] : frame.made) {
      if (!storage.expired()) gradients_.push_back(std::move(made));
    }
  }

  static bool only_copies(const RecordedOp& op) {
    return op.is_copy || op.label == "clone" || op.label.starts_with("contiguous");
  }
  static bool adds(const RecordedOp& op) {
    return op.label == "add.Tensor" || op.label == "add_.Tensor";
  }

  void begin_op(c10::ArrayRef<const c10::IValue> arguments, const Frame* outer, Frame& frame) {
    if (frame.module.empty() || !frame.in_backward) {
      const std::string* owner = nullptr;
      for_each_floating_tensor(arguments, [&](const at::Tensor& tensor) {
        if (owner == nullptr) owner = owners_.find(storage_of(tensor));
      });
      if (owner != nullptr) frame.module = *owner;
    }
    if (!frame.in_backward) return;
    const bool in_node = outer != nullptr && outer->kind == Frame::Kind::node;
    const RecordedOp& op = *frame.op;
    frame.carries_on = only_copies(op) || (in_node ? outer->accumulates : adds(op));
    for_each_floating_tensor(arguments, [&](const at::Tensor& tensor) {
      frame.sources.push_back(storage_of(tensor));
      const std::vector<Made>* const parts = made_of_.find(storage_of(tensor));
      if (parts == nullptr || !(frame.carries_on || op.is_conversion)) return;
      frame.taken.insert(frame.taken.end(), parts->begin(), parts->end());
    });
    if (frame.carries_on || frame.sources.empty()) return;
    if (!(op.computes || op.is_conversion) || !can_be_made_twice(op.handle)) return;
    const at::DisableRecordFunctionGuard not_recorded;
    const InternalOps internal;
    // Before the op runs, which may write to its arguments.
    frame.exact = results_in_fp32(op.handle, arguments);
  }

  void end_op(const std::vector<c10::IValue>& outputs, Frame& frame, Frame* outer) {
    const RecordedOp& op = *frame.op;
    std::size_t place = 0;
    for_each_floating_tensor(outputs, [&](const at::Tensor& result) {
      const std::size_t i = place++;
      if (!result.has_storage() || result.layout() != at::kStrided) return;
      const bool is_argument =
          std::ranges::find(frame.sources, storage_of(result)) != frame.sources.end();
      const bool is_made = op.is_conversion ? !is_argument : op.computes && !frame.carries_on;
      if (!is_16_bit(result.scalar_type()) || !is_made || frame.sources.empty()) {
        if (!frame.taken.empty()) made_of_.set(result, frame.taken);
        return;
      }
      auto made = std::make_shared<MadeGradient>(
          MadeGradient{.module = frame.module, .elements = result.numel()});
      const bool is_known = frame.exact && i < frame.exact->size() &&
                            (*frame.exact)[i].sizes().equals(result.sizes());
      if (is_known) made->lost = count_lost(result, (*frame.exact)[i]);
      made_of_.set(result, {made});
      if (outer != nullptr && outer->kind == Frame::Kind::node) {
        // An op in place makes it anew.
        std::erase_if(outer->made, [&](const auto& earlier) {
          return earlier.first._unsafe_get_target() == storage_of(result);
        });
        outer->made.emplace_back(result.storage().getWeakStorageImpl(), std::move(made));
      } else {
        gradients_.push_back(std::move(made));
      }
    });
  }

  static at::Tensor count_lost(const at::Tensor& result, const at::Tensor& exact) {
    const at::DisableRecordFunctionGuard not_recorded;
    const InternalOps internal;
    return result.eq(0.).logical_and_(exact.ne(0.)).sum();
  }

  /// Remembers the frame's module for the nodes of autograd made in it that no inner frame has
  /// named.
  void name_new_nodes(const Frame& frame) {
    if (frame.module.empty()) return;
    const uint64_t thread = at::RecordFunction::currentThreadId();
    for (auto node = frame.first_node; node < at::sequence_number::peek(); ++node) {
      forward_modules_.try_emplace({thread, static_cast<int64_t>(node)}, frame.module);
    }
  }

  std::mutex mutex_;
  std::map<std::thread::id, Thread> threads_;
  std::map<std::string, std::optional<RecordedOp>> ops_;
  StorageMap<std::string> owners_;  // modules by their parameters
  std::map<std::pair<uint64_t, int64_t>, std::string> forward_modules_;  // by thread and number
  StorageMap<std::vector<Made>> made_of_;
  std::vector<Made> gradients_;
};

}  // namespace torchamp::detail
