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

namespace TORCHAMP_NAMESPACE::detail {

// Note [Slots of observers]
// LibTorch calls a plain function for each op, without user data. So each slot of a small table has
// a function, which finds its observer there. A thread may call the function after the observation
// has ended, when the slot is empty or reused: either it has an old state of the observed thread,
// or another thread has ended the observation. So an observer gets only calls of threads with its
// own callback, which LibTorch's number identifies.
//
// Note [Callbacks at a program's end]
// LibTorch stores a thread's callbacks in a thread_local object. Static objects are destroyed after
// the thread_local objects of the main thread. They must not use the callbacks, whose memory is
// freed.

/// Receives calls, from any thread.
class Observer {
 public:
  /// The data of a call from its beginning to its end.
  struct Call : at::ObserverContext {
    std::shared_ptr<Observer> observer;
  };

  virtual ~Observer() = default;

  /// An op, a node of the backward pass or a user scope begins. Returns null if its end does not
  /// matter.
  virtual std::unique_ptr<Call> begin(const at::RecordFunction& call) = 0;

  /// The call ends, on the same thread; without outputs if it threw.
  virtual void end(const at::RecordFunction& call, Call& begun) = 0;
};

/// Whether the calling thread still has a list of callbacks: see
/// Note [Callbacks at a program's end]. True if this is the thread's first call.
inline bool has_callbacks() {
  static thread_local bool gone = false;
  struct End {
    ~End() { gone = true; }
  };
  if (gone) return false;
  (void)at::get_record_function_tls_();  // makes the list, so that `end` is destroyed before it
  static thread_local const End end;
  (void)end;
  return true;
}

/// The calls that an observer gets. An observer of backward nodes holds their gradients meanwhile,
/// so LibTorch copies gradients that it would otherwise take over.
enum class Watched { ops_and_nodes, ops };

class ObserverTable {
 public:
  static constexpr std::size_t size = 32;

  // Never destroyed: threads may run ops while the process ends.
  static ObserverTable& instance() {
    static auto& table = *new ObserverTable;
    return table;
  }

  /// Returns the slot. `who` is the public name in errors.
  std::size_t add(const char* who, std::shared_ptr<Observer> observer) {
    TORCH_CHECK(has_callbacks(), who,
                ": cannot record in the destructor of a static object, after LibTorch's "
                "thread-local state is destroyed. Record before the program ends.");
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
    callbacks_[slot] = at::INVALID_CALLBACK_HANDLE;
  }

  /// Starts to report the calling thread's calls to the observer in `slot`, and removes callbacks
  /// of observations that have ended.
  at::CallbackHandle listen(std::size_t slot, Watched watched) {
    const std::scoped_lock lock(mutex_);
    const auto begins = functions();
    const at::RecordFunctionCallbacks here = at::get_record_function_tls_().sorted_tls_callbacks_;
    for (const at::RecordFunctionCallbacksEntry& entry : here) {
      const auto own = std::ranges::find(begins, entry.callback_.start());
      if (own != begins.end() &&
          callbacks_[static_cast<std::size_t>(own - begins.begin())] != entry.handle_) {
        at::removeCallback(entry.handle_);
      }
    }
    at::RecordFunctionCallback callback(begins[slot], &end);
    callback.needsInputs(true).needsOutputs(true);
    if (watched == Watched::ops) {
      callback.scopes({at::RecordScope::FUNCTION});
    } else {
      callback.scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                       at::RecordScope::USER_SCOPE});
    }
    return callbacks_[slot] = at::addThreadLocalCallback(callback);
  }

 private:
  template <std::size_t slot>
  static std::unique_ptr<at::ObserverContext> begin_in(const at::RecordFunction& call) {
    return instance().begin(slot, call);
  }

  static constexpr std::array<at::RecordFunctionCallback::StartCallback, size> functions() {
    return []<std::size_t... slots>(std::index_sequence<slots...>) {
      return std::array{&begin_in<slots>...};
    }
    (std::make_index_sequence<size>());
  }

  static bool has_callback(at::CallbackHandle callback) {
    const auto& here = at::get_record_function_tls_().sorted_tls_callbacks_;
    return std::ranges::any_of(here, [&](const auto& entry) { return entry.handle_ == callback; });
  }

  std::unique_ptr<at::ObserverContext> begin(std::size_t slot, const at::RecordFunction& call) {
    std::shared_ptr<Observer> observer;
    {
      const std::scoped_lock lock(mutex_);
      if (has_callback(callbacks_[slot])) observer = observers_[slot];
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
  std::array<at::CallbackHandle, size> callbacks_{};  // LibTorch's numbers, of the observers
};

/// While it lives, an observer receives the calls of the calling thread, and of LibTorch's threads
/// with its state. The same thread must destroy it. If another thread destroys it, the observation
/// ends, it warns, and the callback stays registered.
class Observation {
 public:
  Observation(const char* who, std::shared_ptr<Observer> observer,
              Watched watched = Watched::ops_and_nodes)
      : who_(who),
        slot_(ObserverTable::instance().add(who, std::move(observer))),
        callback_(ObserverTable::instance().listen(slot_, watched)) {}
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

  ~Observation() {
    ObserverTable::instance().remove(slot_);
    if (thread_ != std::this_thread::get_id()) {
      TORCH_WARN("~", who_,
                 ": destroyed by another thread than the thread that made it, whose ops still call "
                 "it, without effect. Make it a local variable.");
      return;
    }
    if (has_callbacks()) at::removeCallback(callback_);
  }

 private:
  const char* who_;
  std::size_t slot_;
  at::CallbackHandle callback_;
  std::thread::id thread_ = std::this_thread::get_id();
};

// Note [Inputs without NDEBUG]
// at::RecordFunction::inputs() checks, in a program compiled without NDEBUG, a flag that LibTorch's
// own build with NDEBUG never sets, so it always throws there. The flag lies in padding, so the
// layout is the same, and the inputs are there. Such programs read the member without the check; an
// explicit instantiation may name it.
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

}  // namespace TORCHAMP_NAMESPACE::detail
