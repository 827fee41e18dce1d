// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "torchamp/cast_report.h"
#include "torchamp/detail/observe/cast_recording.h"
#include "torchamp/detail/observe/recorder_slots.h"

namespace torchamp {

/// Counts, from construction to destruction, which ops ran in which dtype and what was cast for
/// them, forward and backward:
///
///     torchamp::CastRecorder recorder(*model);
///     train_one_step();
///     std::cout << recorder.report();
///
/// Counted are ops that the program or an autograd node calls, each once, with all casts that
/// autocast makes for them and for the ops that they call; views, copies and ops without
/// floating-point tensors are not. Conversions inside LibTorch's kernels (type promotion on a CPU,
/// an op's own temporaries) are no casts, and casts found in the weight cache are not made.
///
/// The module of an op is the one that owns a parameter among its arguments, if a model is given;
/// else the innermost user scope around it (RECORD_USER_SCOPE, or a module with a policy, see
/// ModulePolicies); in backward, the module of the op that made the node.
///
/// Records what the calling thread does, and what LibTorch does for it on other threads that take
/// over its state (autograd's workers, at::launch, at::wrapPropagateTLSState). Several may record
/// at once. While none does, nothing is paid: no op runs one instruction more. Recording costs some
/// microseconds per op and memory that grows with their number: record a few steps.
///
/// Must be destroyed by the thread that made it; another one leaves the recording running there and
/// warns. Error: more than eight at once. Never reads a device.
class CastRecorder {
 public:
  [[nodiscard]] CastRecorder() : CastRecorder(detail::CastRecording::Parameters{}) {}

  /// `model`: a torch::nn::Module, or whatever else has named_parameters(). Parameters that are
  /// replaced while recording (model->to(device)) are not recognised afterwards.
  template <class Model>
  requires requires(const Model& model) { model.named_parameters(); }
  [[nodiscard]] explicit CastRecorder(const Model& model) : CastRecorder(parameters_of(model)) {}

  CastRecorder(const CastRecorder&) = delete;
  CastRecorder(CastRecorder&&) = delete;
  CastRecorder& operator=(const CastRecorder&) = delete;
  CastRecorder& operator=(CastRecorder&&) = delete;
  static void* operator new(std::size_t) = delete;
  static void* operator new[](std::size_t) = delete;

  ~CastRecorder() {
    slot_.release();
    if (thread_ != std::this_thread::get_id()) {
      TORCH_WARN(
          "~CastRecorder: destroyed by another thread than the one that made it, whose ops go on "
          "calling it in vain. Keep a recorder in the scope that it records.");
      return;
    }
    at::removeCallback(handle_);
  }

  /// What was counted so far. Any thread.
  CastReport report() const { return CastReport(recording_->rows()); }

 private:
  [[nodiscard]] explicit CastRecorder(const detail::CastRecording::Parameters& parameters)
      : recording_(std::make_shared<detail::CastRecording>(parameters)),
        slot_(recording_),
        handle_(at::addThreadLocalCallback(slot_.callback())) {}

  template <class Model>
  static detail::CastRecording::Parameters parameters_of(const Model& model) {
    detail::CastRecording::Parameters parameters;
    for (const auto& item : model.named_parameters()) {
      const std::string& name = item.key();
      const auto dot = name.rfind('.');
      parameters.emplace_back(dot == std::string::npos ? "" : name.substr(0, dot), item.value());
    }
    return parameters;
  }

  std::shared_ptr<detail::CastRecording> recording_;
  detail::RecorderSlot slot_;
  at::CallbackHandle handle_;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace torchamp
