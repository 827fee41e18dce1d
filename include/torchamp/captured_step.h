// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// What an optimizer implements, beside ScaledStep, so that a CUDA graph that holds its step
/// follows what the host changes. CudaGraph finds it with dynamic_cast.
class CapturedStep {
 public:
  virtual ~CapturedStep() = default;

  /// Called outside of the graph: before each eager step that precedes a capture, before the
  /// capture, and before each replay. From the first call on, steps read from the device what may
  /// change from one to the next (learning rates), and each call writes it there.
  ///
  /// Returns whether the next step will be like the last one since the first call, if there was
  /// one, in all else, and makes nothing that outlives it: false when state was loaded or an option
  /// changed.
  virtual bool prepare_captured_step() = 0;

  /// Whether prepare_captured_step() has been called: graphs may replay steps and what comes with
  /// them.
  virtual bool may_be_captured() const = 0;

  /// Takes note that a graph's replay has made a step of which the host learns nothing else. Not
  /// for the first replay after a capture, for the capture counts as a step.
  virtual void note_replayed_step() = 0;
};

}  // namespace TORCHAMP_NAMESPACE
