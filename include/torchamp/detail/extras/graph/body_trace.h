// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Formatting.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/extras/observe/observer.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [What a replay cannot see]
// A replay repeats the capture: the same ops, with the same numbers, on the same memory. If a body
// reads other values from the host in each call (a number by reference, a tensor of this batch, a
// branch), the replay uses the values of the capture. So the ops of the last warm-up and of the
// capture are recorded and compared: the ops that the body calls itself, with gradients on, until
// the first backward pass of a device. Ops inside these ops are not compared (a cache may have made
// a cast before), nor are ops that clear gradients.

/// Records the ops of a body's forward pass: see Note [What a replay cannot see].
class BodyTrace final : public Observer {
 public:
  explicit BodyTrace(c10::DeviceType device) : device_(device) {}

  /// How `later` differs from this trace; empty if it does not.
  std::string difference(const BodyTrace& later) const {
    if (later.steps_.empty()) return {};
    const std::size_t count = std::min(steps_.size(), later.steps_.size());
    for (std::size_t i = 0; i < count; ++i) {
      const std::string differs = difference(steps_[i], later.steps_[i]);
      if (!differs.empty()) return differs;
    }
    if (steps_.size() == later.steps_.size()) return {};
    const auto& longer = steps_.size() > count ? steps_ : later.steps_;
    return "it calls " + longer[count].name + " in one call and not in another";
  }

  /// Memory of the device that the body has read and that is still allocated.
  std::vector<WeakMemory> outer_memory() const {
    std::vector<WeakMemory> there;
    for (const auto& [address, memory] : outer_) {
      if (!memory.is_gone()) there.push_back(memory);
    }
    return there;
  }

  std::unique_ptr<Call> begin(const at::RecordFunction& call) override {
    if (std::this_thread::get_id() != thread_) {
      has_backward_begun_ = true;
      return nullptr;
    }
    if (has_backward_begun_ && depth_ == 0) return nullptr;
    if (depth_++ == 0 && at::GradMode::is_enabled()) note(call);
    return std::make_unique<Call>();
  }
  void end(const at::RecordFunction& call, Call&) override {
    if (--depth_ > 0) return;
    for (const c10::IValue& output : call.outputs()) {
      for_each_tensor_of(output, [this](const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        inner_.insert_or_assign(tensor.unsafeGetTensorImpl(), WeakTensor(tensor));
      });
    }
  }

 private:
  struct Step {
    std::string name;
    std::vector<std::string> tensors;  // their dtypes and shapes
    std::vector<std::string> numbers;
    std::vector<const void*> outer;  // addresses
    std::string first_outer;
  };

  static std::string difference(const Step& before, const Step& after) {
    if (before.name != after.name) {
      return "it calls " + after.name + " where the call before called " + before.name +
             " (a branch on the host)";
    }
    if (before.tensors != after.tensors) {
      return "it calls " + after.name +
             " with tensors of other shapes or dtypes than in the call "
             "before";
    }
    if (before.outer != after.outer) {
      return after.name + " reads a tensor (" + after.first_outer +
             ") that is not among the inputs, and read another one in the call before: pass it as "
             "an input";
    }
    if (before.numbers != after.numbers) {
      return after.name +
             " takes another number than in the call before: pass it as an input, a tensor of one "
             "element";
    }
    return {};
  }

  void note(const at::RecordFunction& call) {
    const std::string_view name = call.name();
    if (name == "aten::detach_" || name == "aten::zero_") return;
    Step step{
        .name = std::string(name), .tensors = {}, .numbers = {}, .outer = {}, .first_outer = {}};
    for (const c10::IValue& input : inputs_of(call)) note(step, input);
    steps_.push_back(std::move(step));
  }

  void note(Step& step, const c10::IValue& argument) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      note(step, argument.toTensor());
    } else if (argument.isTensor() || argument.isNone()) {
      step.tensors.emplace_back("none");  // either may be missing here: in x[:, i] a tensor,
      step.numbers.emplace_back("none");  // in clamp(x, none, 1) a number
    } else if (argument.isScalar()) {
      step.numbers.push_back(c10::str(argument.toScalar()));
    } else if (argument.isString()) {
      step.name += ' ' + argument.toStringRef();
    } else if (argument.isList()) {
      step.numbers.push_back(c10::str("list of ", argument.toListRef().size()));
      for (const c10::IValue& element : argument.toListRef()) note(step, element);
    }
  }

  void note(Step& step, const at::Tensor& tensor) {
    step.tensors.push_back(c10::str(tensor.scalar_type(), tensor.sizes()));
    const auto inner = inner_.find(tensor.unsafeGetTensorImpl());
    if (inner != inner_.end() || !tensor.has_storage()) return;
    if (device_ != c10::kCPU && tensor.is_cpu() && tensor.dim() == 0) {
      step.numbers.push_back(c10::str(tensor.item()));
      return;
    }
    if (step.outer.empty()) step.first_outer = step.tensors.back();
    const auto* const begin = static_cast<const char*>(tensor.storage().data());
    step.outer.push_back(begin + static_cast<std::size_t>(tensor.storage_offset()) *
                                     tensor.dtype().itemsize());
    if (tensor.device().type() == device_) {
      outer_.try_emplace(storage_of(tensor), tensor);
    }
  }

  c10::DeviceType device_;
  std::thread::id thread_ = std::this_thread::get_id();
  std::atomic<bool> has_backward_begun_ = false;  // on a thread of LibTorch
  int depth_ = 0;
  std::vector<Step> steps_;
  std::unordered_map<const c10::TensorImpl*, WeakTensor> inner_;   // which ops have made
  std::unordered_map<const c10::StorageImpl*, WeakMemory> outer_;  // from before
};

}  // namespace TORCHAMP_NAMESPACE::detail
