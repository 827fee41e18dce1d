// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief CastRecorder: which ops ran in which dtype, and what was cast for them.

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/observe/report.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {
class CastRecording;
}

/// What a CastRecorder counted. A value that any thread may keep; operator<< prints it as a table.
class CastReport {
 public:
  /// The numbers of one op in one module, forward or backward.
  struct Row {
    /// Whether the calls were backward's.
    bool backward = false;
    /// Dotted name, or empty where no module is known.
    std::string module;
    /// With its overload, as a Policy takes it: "add.Tensor". A cast that the program asks for
    /// itself is a row of its own, "to.dtype"; the backward of a cast is "ToCopyBackward0".
    std::string op;
    /// How often the program called it, by the dtype of the first floating-point result.
    std::map<at::ScalarType, int64_t> calls;
    /// Conversions between floating-point dtypes that autocast made for these calls.
    int64_t casts = 0;
    /// Bytes that they read and wrote: elements times the widths of both dtypes.
    int64_t cast_bytes = 0;
    /// How many of the casts took values back to the dtype that an earlier cast took them from: of
    /// the earlier cast's result, or of what was computed from it by the op that it was made for
    /// (if that widened them to fp32) and by ops without a rule of their own.
    int64_t undone = 0;
    /// How many of the calls ran in fp32 only because an input was fp32 while another had 16 bits:
    /// by type promotion, and not by a rule.
    int64_t fp32_by_input = 0;
    /// How many of the calls ran in fp8: see Policy::fp8.
    int64_t fp8 = 0;
    /// How many of the calls followed the rule fp8 and ran as lower_precision, by the reason.
    std::map<std::string, int64_t> not_fp8 = {};
    /// How many casts of weights were found in torchamp's own cache (see WeightCache), and not
    /// made.
    int64_t cache_hits = 0;
    /// How many of `casts` the cache made, and may have kept.
    int64_t cache_misses = 0;
  };

  /// For CastRecorder: sorts the rows.
  explicit CastReport(std::vector<Row> rows) : rows_(std::move(rows)) {
    std::stable_sort(rows_.begin(), rows_.end(),
                     [](const Row& a, const Row& b) { return a.cast_bytes > b.cast_bytes; });
  }

  /// Returns a row for each op, module and phase; those whose casts moved most bytes come first.
  const std::vector<Row>& rows() const { return rows_; }

  /// Returns the sums over all rows, with no op and no module.
  Row total() const;

  /// Returns a JSON object with "rows" (phase, module, op and the numbers of a Row, by the names of
  /// its members, those about fp8 and torchamp's own cache only where they were used) and "total".
  std::string to_json() const;

 private:
  std::vector<Row> rows_;
};

/// Prints the report as a table, a line for each row and one for the sums.
std::ostream& operator<<(std::ostream& out, const CastReport& report);

/// Counts, from construction to destruction, which ops ran in which dtype and what was cast for
/// them, forward and backward:
///
///     torchamp::CastRecorder recorder(*model);
///     train_one_step();
///     std::cout << recorder.report();
///
/// Each op that the program or an autograd node calls counts once, with all casts that autocast
/// makes for it and for the ops that it calls. Views, copies and ops without floating-point tensors
/// do not count. Conversions inside LibTorch's kernels (type promotion on a CPU, an op's own
/// temporaries) are no casts, and a cast that the weight cache already holds is not made.
///
/// An op belongs to the module that owns a parameter among its arguments, if a model is given, and
/// otherwise to the innermost user scope around it (RECORD_USER_SCOPE, or a module with a policy,
/// see ModulePolicies). In backward it belongs to the module of the op that made the node.
///
/// It records what the calling thread does, and what LibTorch does for it on other threads that
/// take over its state (autograd's workers, at::launch, at::wrapPropagateTLSState). Several may
/// record at once. While none does, no op runs one instruction more. Recording costs some
/// microseconds per op, and memory that grows with their number: record a few steps.
///
/// The thread that made a recorder must destroy it; another one warns and leaves the callback
/// behind. Never reads a device.
///
/// Errors: more than 32 recorders, searches (first_non_finite_op) and captures (CudaGraph) at once;
/// a static object's destructor, where the thread has recorded before.
class CastRecorder {
 public:
  /// Knows no modules: ops belong to user scopes alone.
  [[nodiscard]] CastRecorder() : CastRecorder(detail::NamedParameters{}) {}

  /// Knows the modules of `model`: a torch::nn::Module, or whatever else has named_parameters().
  /// Parameters that are replaced while it records (model->to(device)) are not recognised
  /// afterwards.
  template <class Model>
  requires requires(const Model& model) { model.named_parameters(); }
  [[nodiscard]] explicit CastRecorder(const Model& model)
      : CastRecorder(detail::parameters_by_name(model)) {}

  CastRecorder(const CastRecorder&) = delete;
  CastRecorder(CastRecorder&&) = delete;
  CastRecorder& operator=(const CastRecorder&) = delete;
  CastRecorder& operator=(CastRecorder&&) = delete;
  static void* operator new(std::size_t) = delete;
  static void* operator new[](std::size_t) = delete;
  ~CastRecorder() = default;

  /// Returns what was counted so far. Any thread may ask.
  CastReport report() const;

 private:
  [[nodiscard]] explicit CastRecorder(const detail::NamedParameters& parameters);

  std::shared_ptr<detail::CastRecording> recording_;
  detail::Observation observation_;
};

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/observe/cast_recorder-inl.h"  // IWYU pragma: export
