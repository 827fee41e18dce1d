// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. UnderflowMeter: how many 16-bit gradients underflow.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "torchamp/detail/extras/observe/observer.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {
class UnderflowRecording;
struct UnderflowHistory;
}  // namespace detail

/// Options of an UnderflowMeter.
struct UnderflowMeterOptions {
  /// A step is metered if its number, from 0, is a multiple of this number.
  int64_t every = 100;
};

/// The underflow of one module's 16-bit gradients, of inputs or of weights.
struct UnderflowRow {
  std::string module{};     ///< dotted name; empty if no module is known
  bool of_weights = false;  ///< true: gradients of parameters or other leaves
  int64_t elements = 0;     ///< elements examined in all metered steps
  /// Elements that are zero, although the same op with the same inputs in fp32 gives a non-zero
  /// one.
  int64_t lost = 0;
  /// Elements that were not examined: the op cannot be repeated in fp32, or not without side
  /// effects.
  int64_t not_looked_at = 0;

  /// lost / elements; 0 without elements.
  double share() const {
    return elements == 0 ? 0. : static_cast<double>(lost) / static_cast<double>(elements);
  }
};

/// The underflow in one metered step.
struct UnderflowStep {
  int64_t step = 0;      ///< the step's number, from 0
  double scale = 1.;     ///< the scale at the step's beginning; 1 without a scaler
  int64_t elements = 0;  ///< elements examined in all modules
  int64_t lost = 0;      ///< like UnderflowRow::lost

  /// lost / elements; 0 without elements.
  double share() const {
    return elements == 0 ? 0. : static_cast<double>(lost) / static_cast<double>(elements);
  }
};

/// The counts of an UnderflowMeter.
struct UnderflowReport {
  std::vector<UnderflowRow> rows{};    ///< the largest share first
  std::vector<UnderflowStep> steps{};  ///< in order
  int64_t steps_in_all = 0;            ///< all steps, metered or not

  /// The sums over all rows, with no module.
  UnderflowRow total() const {
    UnderflowRow sum;
    for (const UnderflowRow& row : rows) {
      sum.elements += row.elements;
      sum.lost += row.lost;
      sum.not_looked_at += row.not_looked_at;
    }
    return sum;
  }
};

/// Prints a line per row, and the latest 20 steps with their scales. If there was no 16-bit
/// gradient, it prints so.
std::ostream& operator<<(std::ostream& out, const UnderflowReport& report);

/// Counts, every so many steps, the elements of 16-bit gradients that underflow:
///
///     torchamp::UnderflowMeter meter(*model, {.every = 100});
///     for (auto& batch : *loader) {
///       const auto metered = meter.step(scaler);
///       …  // forward, backward, step, update
///     }
///     std::cout << meter.report();
///
/// In a metered step, each op of backward that computes a 16-bit gradient is repeated in fp32 with
/// the same inputs, and elements that are zero only in 16 bits are counted. This covers each
/// backward() of the step; gradients are scaled if the loss is. A gradient belongs to the module of
/// the forward op: the owner of a parameter among its arguments, or the innermost user scope around
/// it (see CastRecorder). Views, copies and sums of a gradient lose nothing, so they do not count
/// again. Results, random numbers, hooks and guards of the program are unchanged; a metered step
/// takes several times as long.
///
/// Only report() synchronises. Between metered steps nothing is observed, and step() does not read
/// the scaler. Each process of data-parallel training meters its own gradients.
///
/// Not examined: ops of libraries other than ATen and ops that draw random numbers (counted
/// separately); sparse gradients; computations outside LibTorch's dispatcher; threads without the
/// calling thread's state (autograd's have it). Iterations captured in a CudaGraph cannot be
/// metered.
///
/// One thread at a time; several meters may run at once.
class UnderflowMeter {
 public:
  /// A step of training, which lasts as long as this object. If an exception ends it, the step
  /// counts, but its measurements are dropped. The thread that creates it must destroy it. It may
  /// outlive its meter.
  class [[nodiscard]] Step {
   public:
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;
    ~Step();

    /// Whether this step is metered.
    bool is_metered() const { return recording_ != nullptr; }

   private:
    friend class UnderflowMeter;
    Step(const UnderflowMeter& meter, const GradScaler* scaler);

    std::shared_ptr<detail::UnderflowHistory> history_;
    std::shared_ptr<detail::UnderflowRecording> recording_;
    std::optional<detail::Observation> observation_;
    at::Tensor scale_;  // undefined if the host has the value
    double known_scale_ = 1.;
    int exceptions_ = 0;
  };

  /// With the modules of `model`: a torch::nn::Module, or anything with named_parameters(). Error:
  /// `every` below 1.
  template <class Model>
  requires requires(const Model& model) { model.named_parameters(); }
  explicit UnderflowMeter(const Model& model, const UnderflowMeterOptions& options = {})
      : UnderflowMeter(detail::parameters_by_name(model), options) {}
  UnderflowMeter(const UnderflowMeter&) = delete;
  UnderflowMeter& operator=(const UnderflowMeter&) = delete;

  /// Begins a step, which ends when the result is destroyed. Errors: the previous step has not
  /// ended; more than 32 observers at once (see CastRecorder).
  Step step() & { return {*this, nullptr}; }

  /// Like step(), for a loss scaled by `scaler`: records its scale, without synchronising.
  Step step(const GradScaler& scaler) & { return {*this, &scaler}; }

  /// The counts of the steps that have ended. Synchronises with each device.
  UnderflowReport report() const;

 private:
  UnderflowMeter(detail::NamedParameters parameters, const UnderflowMeterOptions& options);

  detail::NamedParameters parameters_;
  int64_t every_;
  std::shared_ptr<detail::UnderflowHistory> history_;
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/labs/detail/observe/underflow_meter-inl.h"  // IWYU pragma: export
