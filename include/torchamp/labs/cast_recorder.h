// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. CastRecorder: which ops ran in which dtype, and what was cast for them.

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/extras/observe/observer.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/detail/extras/shared/stable_order.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {
class CastRecording;
}

/// The counts of a CastRecorder. A value that any thread may keep; operator<< prints it as a table.
class CastReport {
 public:
  /// The counts of one op in one module, in forward or backward.
  struct Row {
    /// Whether backward made the calls.
    bool backward = false;
    /// Dotted name, or empty where no module is known.
    std::string module;
    /// With its overload, like in a Policy: "add.Tensor". A cast that the program itself makes has
    /// its own row, "to.dtype"; the backward of a cast is "ToCopyBackward0".
    std::string op;
    /// Number of the program's calls, by the dtype of the first floating-point result.
    std::map<at::ScalarType, int64_t> calls;
    /// Number of autocast's conversions between floating-point dtypes for these calls.
    int64_t casts = 0;
    /// Bytes that they read and wrote: elements times the widths of both dtypes.
    int64_t cast_bytes = 0;
    /// Number of casts that returned values to the dtype from which an earlier cast had converted
    /// them: of the earlier cast's result, or of what its op (if that widened to fp32) and ops
    /// without a rule computed from it.
    int64_t undone = 0;
    /// Number of calls that ran in fp32 only because one input was fp32 and another 16-bit: by type
    /// promotion, not by a rule.
    int64_t fp32_by_input = 0;
    /// Number of calls in fp8: see torchamp/labs/fp8.h.
    int64_t fp8 = 0;
    /// Number of calls under the rule fp8 that ran as lower_precision, by reason.
    std::map<std::string, int64_t> not_fp8 = {};
    /// Number of casts of weights found in torchamp's own cache (see WeightCache).
    int64_t cache_hits = 0;
    /// Number of `casts` made by that cache.
    int64_t cache_misses = 0;
  };

  /// For CastRecorder: sorts the rows.
  explicit CastReport(std::vector<Row> rows) : rows_(std::move(rows)) {
    detail::sort_in_stable_order(rows_, [](const Row& row) { return -row.cast_bytes; });
  }

  /// Returns a row for each op, module and phase, in descending order of bytes moved by casts.
  const std::vector<Row>& rows() const { return rows_; }

  /// Returns the sums over all rows, with no op and no module.
  Row total() const;

  /// Returns a JSON object with "rows" (phase, module, op and the members of a Row by name; those
  /// about fp8 and torchamp's own cache only if used) and "total".
  std::string to_json() const;

 private:
  std::vector<Row> rows_;
};

/// Prints the report as a table, with a line per row and one for the sums.
std::ostream& operator<<(std::ostream& out, const CastReport& report);

/// While it lives, counts which ops ran in which dtype, forward and backward, and their casts:
///
///     torchamp::CastRecorder recorder(*model);
///     train_one_step();
///     std::cout << recorder.report();
///
/// Each op that the program or an autograd node calls counts once, with all casts that autocast
/// makes for it and for the ops that it calls. Views, copies and ops without floating-point tensors
/// do not count. Conversions inside LibTorch's kernels (type promotion on a CPU, an op's
/// temporaries) do not count as casts, nor do casts found in the weight cache.
///
/// An op belongs to the module that owns a parameter among its arguments, if a model is given, and
/// otherwise to the innermost user scope around it (RECORD_USER_SCOPE, or a module with a policy,
/// see ModulePolicies). In backward it belongs to the module of the forward op.
///
/// It records the calling thread, and other threads on which LibTorch works for it with its state
/// (autograd's workers, at::launch, at::wrapPropagateTLSState). Several may record at once. Without
/// a recorder no op executes one instruction more. Recording costs some microseconds per op, and
/// memory that grows with their number: record a few steps.
///
/// The thread that made a recorder must destroy it; another one warns and leaves the callback
/// registered. Never synchronises.
///
/// Errors: more than 32 recorders, searches (first_non_finite_op) and captures (CudaGraph) at once;
/// a static object's destructor, where the thread has recorded before.
class CastRecorder {
 public:
  /// Without modules: ops belong to user scopes alone.
  [[nodiscard]] CastRecorder() : CastRecorder(detail::NamedParameters{}) {}

  /// With the modules of `model`: a torch::nn::Module, or anything with named_parameters().
  /// Parameters that are replaced while it records (model->to(device)) are not recognised
  /// afterwards.
  template <class Model>
  requires requires(const Model& model) { model.named_parameters(); }
  [[nodiscard]] explicit CastRecorder(const Model& model)
      : CastRecorder(detail::parameters_by_name(model)) {}

  CastRecorder(const CastRecorder&) = delete;
  CastRecorder& operator=(const CastRecorder&) = delete;
  static void* operator new(std::size_t) = delete;
  static void* operator new[](std::size_t) = delete;

  /// Returns the counts so far. Any thread may call it.
  CastReport report() const;

 private:
  [[nodiscard]] explicit CastRecorder(const detail::NamedParameters& parameters);

  std::shared_ptr<detail::CastRecording> recording_;
  detail::Observation observation_;
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/labs/detail/observe/cast_recorder-inl.h"  // IWYU pragma: export
#include "torchamp/labs/detail/observe/cast_report-inl.h"    // IWYU pragma: export
