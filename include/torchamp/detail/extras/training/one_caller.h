// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <thread>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The thread that is in a call of a TrainingStep.
class OneCaller {
 public:
  enum class Nested { allowed, refused };

  /// A call of the current thread, while it lives.
  class Call {
   public:
    /// Throws while another thread is in a call. Throws for a call that cannot be nested while this
    /// thread is in a call. `name` is the name of the call.
    Call(OneCaller& caller, const char* name, Nested nested = Nested::allowed) : caller_(caller) {
      std::thread::id found;  // no thread
      is_first_ = caller_.thread_.compare_exchange_strong(found, std::this_thread::get_id());
      TORCH_CHECK(is_first_ || found == std::this_thread::get_id(), name,
                  ": another thread is in a call of this TrainingStep, which serves one thread at "
                  "a time. Lock a std::mutex around its calls, or give each thread its own model, "
                  "optimizer and TrainingStep.");
      TORCH_CHECK(is_first_ || nested == Nested::allowed, name,
                  ": called by the function that this TrainingStep is running. Return the sum of "
                  "the losses from one function, or make the calls one after the other.");
    }
    ~Call() {
      if (is_first_) caller_.thread_ = std::thread::id();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    OneCaller& caller_;
    bool is_first_;
  };

 private:
  std::atomic<std::thread::id> thread_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
