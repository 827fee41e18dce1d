// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// Note [What a function reads]
// Autograd's graph does not know of frozen weights and buffers, and of other tensors not how often
// they were written to. So the ops of the function's first run are looked at: what one of them
// takes, and none of them has given, was there before. It is remembered with its version, unless
// the function itself writes to it, as to a count of batches, which belongs to each run. Tensors
// that are gone after the run were the function's own.

/// The tensors from outside that a function has read, and their versions then.
class ReadTensors {
 public:
  /// Throws if one was written to since.
  void check_unchanged() const {
    for (const Read& read : reads_) {
      const auto tensor = read.tensor.lock();
      if (!tensor || tensor->version_counter().current_version() == read.version) continue;
      TORCH_CHECK(false, "checkpoint: a parameter, buffer or other tensor of shape ",
                  tensor->sizes(),
                  " that the function reads was changed in place after the forward pass, so that "
                  "backward cannot run the function again. Step and write to weights after "
                  "backward().");
    }
  }

 private:
  friend class ReadRecorder;
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Read {
    Weak tensor;  // keeps the address from being used again
    uint32_t version;
  };
  std::vector<Read> reads_;
};

/// Looks at the ops that the calling thread runs while it lives. Nests.
class ReadRecorder {
 public:
  ReadRecorder() : outer_(std::exchange(innermost(), this)) {
    if (outer_ != nullptr) return;  // whose callback tells all
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }
  ReadRecorder(const ReadRecorder&) = delete;
  ReadRecorder& operator=(const ReadRecorder&) = delete;
  ~ReadRecorder() {
    innermost() = outer_;
    if (outer_ == nullptr) at::removeCallback(callback_);
  }

  /// What was read and is still there.
  ReadTensors take() {
    ReadTensors result;
    for (const auto& [tensor, seen] : seen_) {
      if (seen.is_own) continue;
      const auto alive = seen.tensor.lock();
      if (!alive || alive->version_counter().current_version() != seen.version) continue;
      result.reads_.push_back({seen.tensor, seen.version});
    }
    return result;
  }

 private:
  struct Seen : ReadTensors::Read {
    std::size_t number;  // of what was seen before
    bool is_own;         // made by an op of the function
  };

  static ReadRecorder*& innermost() {
    static thread_local ReadRecorder* recorder = nullptr;
    return recorder;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& op) {
    for (auto* recorder = innermost(); recorder != nullptr; recorder = recorder->outer_) {
      for (const c10::IValue& input : inputs_of(op)) {
        for_each_tensor_of(input, [&](const at::Tensor& tensor) { recorder->see(tensor, false); });
      }
      recorder->seen_at_begin_.push_back(recorder->seen_.size());
    }
    return nullptr;
  }

  static void end(const at::RecordFunction& op, at::ObserverContext*) {
    for (auto* recorder = innermost(); recorder != nullptr; recorder = recorder->outer_) {
      for (const c10::IValue& output : op.outputs()) {
        for_each_tensor_of(output, [&](const at::Tensor& tensor) { recorder->see(tensor, true); });
      }
      recorder->seen_at_begin_.pop_back();
    }
  }

  /// An output that was seen since its op began, as an argument of an inner op, was made there.
  void see(const at::Tensor& tensor, bool is_output) {
    if (!tensor.defined() || tensor.is_inference()) return;
    const auto known = seen_.find(tensor.unsafeGetTensorImpl());
    if (known == seen_.end()) {
      const ReadTensors::Read read{ReadTensors::Weak(tensor.getIntrusivePtr()), version_of(tensor)};
      seen_.emplace(tensor.unsafeGetTensorImpl(), Seen{read, seen_.size(), is_output});
    } else if (is_output && known->second.number >= seen_at_begin_.back()) {
      known->second.is_own = true;
    }
  }

  ReadRecorder* outer_;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  std::unordered_map<const c10::TensorImpl*, Seen> seen_;
  std::vector<std::size_t> seen_at_begin_;  // of each op that has not ended
};

}  // namespace torchamp::detail
