// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. CastRecorder: which ops ran in which dtype, and which casts they needed.

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
    /// The module's dotted name; empty if no module is known.
    std::string module;
    /// The op's name with its overload, as in a Policy: "add.Tensor". A cast that the program
    /// itself makes has its own row, "to.dtype"; the backward of a cast is "ToCopyBackward0".
    std::string op;
    /// Number of the program's calls, by the dtype of the first floating-point result.
    std::map<at::ScalarType, int64_t> calls;
    /// Number of autocast's conversions between floating-point dtypes for these calls.
    int64_t casts = 0;
    /// Bytes that the casts read and wrote: elements times the widths of both dtypes.
    int64_t cast_bytes = 0;
    /// Number of casts that undo an earlier cast: they convert its result back to the dtype before
    /// that cast. If autocast has cast a 16-bit argument of an op to fp32, a cast of the op's fp32
    /// result back to 16 bits also counts. Between the two casts, there may be ops that take the
    /// dtype of their arguments.
    int64_t undone = 0;
    /// Number of calls that ran in fp32 by type promotion and not by a rule: one input was fp32,
    /// another was 16-bit.
    int64_t fp32_by_input = 0;
    /// Number of calls in fp8: see torchamp/labs/fp8.h.
    int64_t fp8 = 0;
    /// Number of calls under the rule fp8 that ran as lower_precision, by reason.
    std::map<std::string, int64_t> not_fp8 = {};
    /// Number of casts of weights that were found in torchamp's own cache (see WeightCache).
    int64_t cache_hits = 0;
    /// Number of `casts` that this cache made.
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

  /// Returns a JSON object with "total" and "rows" (phase, module, op and the members of a Row by
  /// name; members about fp8 and torchamp's own cache only if they are used).
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
/// temporaries) do not count as casts. Casts that were found in the weight cache do not count
/// either.
///
/// If you pass a model, an op belongs to the module that owns a parameter among its arguments.
/// Otherwise it belongs to the innermost user scope around it (RECORD_USER_SCOPE, or a module with
/// a policy, see ModulePolicies). In backward it belongs to the module of the forward op.
///
/// It records the calling thread, and other threads on which LibTorch works with this thread's
/// state (autograd's workers, at::launch, at::wrapPropagateTLSState). Several recorders may exist
/// at once. Without a recorder, ops have no extra cost. Recording costs some microseconds and some
/// memory per op: record a few steps only.
///
/// The thread that creates a recorder must destroy it. If another thread destroys it, it warns and
/// leaves the callback registered. Never synchronises.
///
/// Errors: more than 32 observers of ops at once; construction in a static object's destructor, if
/// the thread has recorded before. Observers are recorders, metered steps of an UnderflowMeter,
/// audits, searches (first_non_finite_op) and captures (CudaGraph).
class CastRecorder {
 public:
  /// Without modules: ops belong to user scopes only.
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
