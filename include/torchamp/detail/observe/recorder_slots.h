// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "torchamp/detail/observe/cast_recording.h"

namespace torchamp::detail {

// Note [Slots of recorders]
// LibTorch calls a plain function for each op, without a pointer to what is recording. So there is
// a function per slot of a small table, and the table leads to the recording. A thread that took
// over another's state may call the function after its recorder has ended: the slot is then empty.
class RecorderSlots {
 public:
  static constexpr std::size_t count = 8;

  // Never destroyed: threads may run ops while the process ends.
  static RecorderSlots& instance() {
    static auto& slots = *new RecorderSlots;
    return slots;
  }

  std::size_t take(std::shared_ptr<CastRecording> recording) {
    const std::scoped_lock lock(mutex_);
    const auto free = std::find(recordings_.begin(), recordings_.end(), nullptr);
    TORCH_CHECK(free != recordings_.end(), "CastRecorder: ", count,
                " are recording at once already. End one of them first.");
    *free = std::move(recording);
    return static_cast<std::size_t>(free - recordings_.begin());
  }

  void release(std::size_t slot) {
    const std::scoped_lock lock(mutex_);
    recordings_[slot].reset();
  }

  std::shared_ptr<CastRecording> at(std::size_t slot) {
    const std::scoped_lock lock(mutex_);
    return recordings_[slot];
  }

 private:
  std::mutex mutex_;
  std::array<std::shared_ptr<CastRecording>, count> recordings_;
};

template <std::size_t slot>
std::unique_ptr<at::ObserverContext> start_recorded_call(const at::RecordFunction& call) {
  const auto recording = RecorderSlots::instance().at(slot);
  return recording ? recording->start(call) : nullptr;
}

inline void end_recorded_call(const at::RecordFunction& call, at::ObserverContext* context) {
  if (context == nullptr) return;
  auto& frame = static_cast<RecordedFrame&>(*context);
  frame.recording->end(call, frame);
}

/// A recorder's place in the table.
class RecorderSlot {
 public:
  explicit RecorderSlot(std::shared_ptr<CastRecording> recording)
      : slot_(RecorderSlots::instance().take(std::move(recording))) {}

  at::RecordFunctionCallback callback() const {
    constexpr auto starts = []<std::size_t... slot>(std::index_sequence<slot...>) {
      return std::array{&start_recorded_call<slot>...};
    }
    (std::make_index_sequence<RecorderSlots::count>());
    return at::RecordFunctionCallback(starts[slot_], &end_recorded_call)
        .needsInputs(true)
        .needsOutputs(true)
        .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                 at::RecordScope::USER_SCOPE});
  }

  void release() { RecorderSlots::instance().release(slot_); }

 private:
  std::size_t slot_;
};

}  // namespace torchamp::detail
