// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "torchamp/version.h"

namespace torchamp::detail {

// Note [Slots of observers]
// LibTorch calls a plain function for each op, without a pointer to who is interested. So there is
// a function per slot of a small table, and the table leads to the observer. A thread that took
// over another's state may call the function after the observation has ended: the slot is then
// empty.

/// Is told of calls, from any thread.
class Observer {
 public:
  /// What is kept of a call from its begin to its end.
  struct Call : at::ObserverContext {
    std::shared_ptr<Observer> observer;
  };

  virtual ~Observer() = default;

  /// An op, a node of the backward pass or a user scope begins. Null if its end does not matter.
  virtual std::unique_ptr<Call> begin(const at::RecordFunction& call) = 0;

  /// It ends, on the same thread; without outputs if it threw.
  virtual void end(const at::RecordFunction& call, Call& begun) = 0;
};

/// The observers of the process.
class ObserverTable {
 public:
  static constexpr std::size_t size = 32;

  // Never destroyed: threads may run ops while the process ends.
  static ObserverTable& instance() {
    static auto& table = *new ObserverTable;
    return table;
  }

  /// Returns the slot. `who` is the public name that an error begins with.
  std::size_t add(const char* who, std::shared_ptr<Observer> observer) {
    const std::scoped_lock lock(mutex_);
    const auto free = std::find(observers_.begin(), observers_.end(), nullptr);
    TORCH_CHECK(free != observers_.end(), who, ": ", size,
                " are recording at once already. End one of them first.");
    *free = std::move(observer);
    return static_cast<std::size_t>(free - observers_.begin());
  }

  void remove(std::size_t slot) {
    const std::scoped_lock lock(mutex_);
    observers_[slot].reset();
  }

  static at::RecordFunctionCallback callback(std::size_t slot) {
    constexpr auto begins = []<std::size_t... slots>(std::index_sequence<slots...>) {
      return std::array{&begin_in<slots>...};
    }
    (std::make_index_sequence<size>());
    return at::RecordFunctionCallback(begins[slot], &end)
        .needsInputs(true)
        .needsOutputs(true)
        .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                 at::RecordScope::USER_SCOPE});
  }

 private:
  template <std::size_t slot>
  static std::unique_ptr<at::ObserverContext> begin_in(const at::RecordFunction& call) {
    return instance().begin(slot, call);
  }

  std::unique_ptr<at::ObserverContext> begin(std::size_t slot, const at::RecordFunction& call) {
    std::shared_ptr<Observer> observer;
    {
      const std::scoped_lock lock(mutex_);
      observer = observers_[slot];
    }
    if (!observer) return nullptr;
    std::unique_ptr<Observer::Call> begun = observer->begin(call);
    if (begun) begun->observer = std::move(observer);
    return begun;
  }

  static void end(const at::RecordFunction& call, at::ObserverContext* context) {
    if (context == nullptr) return;
    auto& begun = static_cast<Observer::Call&>(*context);
    begun.observer->end(call, begun);
  }

  std::mutex mutex_;
  std::array<std::shared_ptr<Observer>, size> observers_;
};

/// While it lives, an observer is told of what the calling thread runs, and of what LibTorch runs
/// for it on threads that take over its state. To be destroyed by the thread that made it: another
/// one ends the observation, warns, and leaves the callback behind.
class Observation {
 public:
  Observation(const char* who, std::shared_ptr<Observer> observer)
      : who_(who),
        slot_(ObserverTable::instance().add(who, std::move(observer))),
        callback_(at::addThreadLocalCallback(ObserverTable::callback(slot_))) {}
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

  ~Observation() {
    ObserverTable::instance().remove(slot_);
    if (thread_ != std::this_thread::get_id()) {
      TORCH_WARN("~", who_,
                 ": destroyed by another thread than the one that made it, whose ops keep calling "
                 "it without effect. Keep it in the scope that it observes.");
      return;
    }
    at::removeCallback(callback_);
  }

 private:
  const char* who_;
  std::size_t slot_;
  at::CallbackHandle callback_;
  std::thread::id thread_ = std::this_thread::get_id();
};

// Note [Inputs without NDEBUG]
// at::RecordFunction::inputs() checks, in a program compiled without NDEBUG, a flag that LibTorch's
// own build, which has NDEBUG, never sets: there it always throws. The flag lies in padding, so the
// layout is the same in both, and the inputs are there. Such programs read the member past the
// check; naming it is allowed in an explicit instantiation.
#ifdef NDEBUG

/// The arguments of the op that begins. In Observer::begin() only.
inline c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& op) {
  return op.inputs();
}

#else

c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& op);

template <auto member>
struct InputsOf {
  friend c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& op) {
    return op.*member;
  }
};
extern template struct InputsOf<&at::RecordFunction::inputs_>;

#endif

}  // namespace torchamp::detail
