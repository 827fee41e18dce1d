// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief UnderflowMeter: how much of the 16-bit gradients is rounded to nothing.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/observe/report.h"
#include "torchamp/grad_scaler.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {
class UnderflowRecording;
struct UnderflowHistory;
}  // namespace detail

/// What an UnderflowMeter is made with.
struct UnderflowMeterOptions {
  /// The first step is metered, and from then on each that is so many steps later.
  int64_t every = 100;
};

/// What was lost of one module's 16-bit gradients of one kind.
struct UnderflowRow {
  std::string module{};     ///< dotted name; empty where no module is known
  bool of_weights = false;  ///< backward() adds them to parameters or other leaves
  int64_t elements = 0;     ///< looked at, in all metered steps
  /// Of these, that are zero although the op that made them gives something else in fp32 from the
  /// same inputs.
  int64_t lost = 0;
  /// Elements not looked at: of ops that cannot be run once more in fp32, or not without an effect.
  int64_t not_looked_at = 0;

  /// lost / elements; 0 without elements.
  double share() const {
    return elements == 0 ? 0. : static_cast<double>(lost) / static_cast<double>(elements);
  }
};

/// What was lost in one metered step.
struct UnderflowStep {
  int64_t step = 0;      ///< its number, from 0
  double scale = 1.;     ///< the scaler's at its begin; 1 without one
  int64_t elements = 0;  ///< as in UnderflowRow, of all modules
  int64_t lost = 0;      ///< likewise

  /// lost / elements; 0 without elements.
  double share() const {
    return elements == 0 ? 0. : static_cast<double>(lost) / static_cast<double>(elements);
  }
};

/// What an UnderflowMeter has counted.
struct UnderflowReport {
  std::vector<UnderflowRow> rows{};    ///< the largest share first
  std::vector<UnderflowStep> steps{};  ///< in order
  int64_t steps_in_all = 0;            ///< metered or not

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

/// Prints a line for each row, and the latest 20 steps with their scales; or that no 16-bit
/// gradient was made.
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
/// In a metered step each op that makes a 16-bit gradient in backward is run once more in fp32, on
/// the same inputs, and elements are counted that are zero only in 16 bits. Gradients are what they
/// are in the program: those of the scaled loss, of each backward() of a step. They belong to the
/// module of the op whose gradient it is: the owner of a parameter among its arguments, or the
/// innermost user scope around it (see CastRecorder). Where a gradient is only viewed, copied or
/// added up, which loses nothing, it counts once. Results, random numbers, hooks and guards of the
/// program are as without the meter; a metered step takes some times as long.
///
/// Never reads a device, but for report(). Between metered steps nothing is observed, and step()
/// does not look at its scaler. Each process of a data parallel training meters its own gradients.
///
/// Not looked at: ops of libraries other than ATen's and those that draw random numbers, counted
/// apart; sparse gradients; what a program computes without LibTorch's dispatcher; and what threads
/// run that have not taken over the calling thread's state, as autograd's do. Iterations that are
/// captured into a CudaGraph cannot be metered.
///
/// One thread at a time; several meters may run at once.
class UnderflowMeter {
 public:
  /// The step that is metered while this lives, if it is its turn. One that an exception ends
  /// counts as a step, but nothing of it is kept. The thread that made it must destroy it. It may
  /// outlive its meter.
  class [[nodiscard]] Step {
   public:
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;
    ~Step();

    /// Whether it is this step's turn.
    bool is_metered() const { return recording_ != nullptr; }

   private:
    friend class UnderflowMeter;
    Step(const UnderflowMeter& meter, const GradScaler* scaler);

    std::shared_ptr<detail::UnderflowHistory> history_;
    std::shared_ptr<detail::UnderflowRecording> recording_;
    std::optional<detail::Observation> observation_;
    at::Tensor scale_;  // undefined where the host knows it
    double known_scale_ = 1.;
    int exceptions_ = 0;
  };

  /// Knows the modules of `model`: a torch::nn::Module, or whatever else has named_parameters().
  /// Error: `every` below 1.
  template <class Model>
  requires requires(const Model& model) { model.named_parameters(); }
  explicit UnderflowMeter(const Model& model, const UnderflowMeterOptions& options = {})
      : UnderflowMeter(detail::parameters_by_name(model), options) {}
  UnderflowMeter(const UnderflowMeter&) = delete;
  UnderflowMeter& operator=(const UnderflowMeter&) = delete;
  ~UnderflowMeter();

  /// Begins a step, which ends with the result. Errors: the last step has not ended; more than 32
  /// recorders, searches, meters and captures at once.
  Step step() & { return {*this, nullptr}; }

  /// As step(), of a loss that `scaler` scales: keeps its scale, without reading it.
  Step step(const GradScaler& scaler) & { return {*this, &scaler}; }

  /// What was counted in the steps that have ended. Reads each device, for counts and for scales.
  UnderflowReport report() const;

 private:
  UnderflowMeter(detail::NamedParameters parameters, const UnderflowMeterOptions& options);

  detail::NamedParameters parameters_;
  int64_t every_;
  std::shared_ptr<detail::UnderflowHistory> history_;
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/observe/underflow_meter-inl.h"  // IWYU pragma: export
