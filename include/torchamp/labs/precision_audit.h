// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. PrecisionAudit: which ops of a model may run in 16 bits, and how much time this
/// saves.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "torchamp/labs/audit_row.h"  // IWYU pragma: export
#include "torchamp/labs/module_policy.h"
#include "torchamp/labs/policy_file.h"
#include "torchamp/policy.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {
struct AuditData;
}

/// Options of a PrecisionAudit.
struct PrecisionAuditOptions {
  /// The 16-bit dtype: fp16 or bf16. While policy() measures a step, 16-bit guards in the step also
  /// use this dtype. Unset: the dtype of the step's first 16-bit guard; without such a guard, the
  /// device's current autocast dtype.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// For a model that several processes train: a function that replaces the elements of a 1-D
  /// tensor on the model's device by their means over all processes, such as average_over() in
  /// distributed/data_parallel.h. All processes then call run(), read_times() and policy()
  /// together, with steps on their own data. Errors and times are means over all processes, and all
  /// choose the same policy.
  std::function<void(at::Tensor&)> average = nullptr;
};

/// Limits for PrecisionAudit::policy().
struct AuditBudget {
  /// The largest allowed error of the gradients, relative to the gradients in fp32. The error of a
  /// gradient is the squared length of its difference from the fp32 gradient, divided by the
  /// squared length of the fp32 gradient, and at most 1. The errors of all parameters are averaged.
  /// If an fp32 gradient is almost 0, the divisor is larger: it is computed as if the mean square
  /// of the gradient's elements were a thousandth of the mean square over all gradients. Unset: the
  /// error under Policy::torch(), but at most most_by_default.
  std::optional<double> error_budget = std::nullopt;
  /// The largest default of error_budget. If Policy::torch() has a larger error for a model
  /// (positions in 16 bits, for example), this number is the default. An error of 0.05 means that
  /// gradients differ by 22 % of their length.
  static constexpr double most_by_default = 0.05;
  /// An op stays in fp32 if rounding the gradients of its results to 16 bits loses more than this
  /// share (AuditRow::gradient_loss).
  double gradient_loss_limit = 1e-3;
};

/// One op's rule in a chosen policy.
struct AuditDecision {
  std::string module{};  ///< the module whose policy has the rule; empty: the guards' policy
  std::string op{};      ///< the op, as in a Policy
  bool lowered = false;  ///< true: lower_precision; false: fp32
  std::string reason{};  ///< in words
};

/// The result of PrecisionAudit::policy(), with its measurements.
struct AuditedPolicy {
  /// The policy for the guards.
  Policy policy = Policy::torch();
  /// The policies for modules that accept a policy: modules.apply_to(*model).
  ModulePolicies modules{};
  /// Every rule, with its reason.
  std::vector<AuditDecision> decisions{};
  double error = 0.;        ///< of the gradients under these policies: see AuditBudget
  double budget = 0.;       ///< the limit of the error
  double torch_error = 0.;  ///< under Policy::torch(); infinite if the step throws
  /// Microseconds of a step under these policies, under Policy::torch() and in fp32: medians over
  /// as many runs as the audit had. spread_us is the largest interquartile range of the three.
  double us = 0., torch_us = 0., fp32_us = 0., spread_us = 0.;
  /// Ops with one rule for several modules, because these modules do not accept policies.
  std::vector<std::string> joined{};
};

/// Prints the totals, and all rules with their reasons.
std::ostream& operator<<(std::ostream& out, const AuditedPolicy& audited);

/// Writes an audit's policies as text for load_policies() and TORCHAMP_POLICY=file:PATH (which uses
/// only the rules for ops). The text is the present `policy` and `modules`, which the program may
/// have edited, one rule per line; rules that the audit chose have their reasons as comments.
/// Exception: if `policy` is Policy::torch() without edits, its rules in the text are the rules of
/// `decisions` that have an empty `module`. If `decisions` has rules for a module that `modules`
/// lacks, the text has these rules. The file is replaced completely or not at all. Errors, which
/// name the file if the file is the cause: a rule without a text form (see to_text()); a module
/// name with '#' or white space.
void save_policy(const AuditedPolicy& audited, const std::string& path);

/// Measures which ops of a model may run in 16 bits, and how much time this saves.
///
///     torchamp::PrecisionAudit audit(*model);
///     audit.run([&] { loss_of(model, batch).backward(); }, 5);
///     std::cout << audit;                          // a row for each op and module
///     torchamp::AuditedPolicy best = audit.policy();
///     torchamp::save_policy(best, "model.policy");
///
/// The step that you pass computes the loss and calls backward(), with a guard as in training and
/// without an optimizer. The audit switches guards off, so the step runs in the precision of its
/// tensors: audit a model in fp32, before MasterWeights or to() narrow it. After each forward call
/// of an op that a policy can cast, the audit repeats the call on copies, in fp32 and in 16 bits:
/// see Note [What an audit measures]. It synchronises for each op, and takes several times the time
/// and memory of a step. Regions of at::autocast without torchamp stay on.
///
/// Afterwards, even after an exception, the model's parameters, gradients, buffers and module
/// policies, the default random generators and the thread's autocast state are restored exactly.
///
/// A copy has its own rows, for the same model and step. One thread at a time; the model must
/// outlive the audit.
class PrecisionAudit {
 public:
  /// Errors: a dtype that is not fp16 or bf16; a model without parameters on a device with
  /// autocast.
  explicit PrecisionAudit(torch::nn::Module& model, const PrecisionAuditOptions& options = {});
  /// For a module holder.
  template <class Contained>
  explicit PrecisionAudit(const torch::nn::ModuleHolder<Contained>& model,
                          const PrecisionAuditOptions& options = {})
      : PrecisionAudit(static_cast<torch::nn::Module&>(*model.ptr()), options) {}
  /// A copy has its own rows.
  PrecisionAudit(const PrecisionAudit& other);
  /// Like the copy constructor.
  PrecisionAudit& operator=(const PrecisionAudit& other);
  ~PrecisionAudit() = default;

  /// Runs `step` once unmeasured and `n` times measured, each time from the same state; twice more
  /// if an op's result depends on no parameter. A further call replaces the measurements.
  ///
  /// Errors, after which the audit is unchanged:
  ///  - `step` changes a parameter, does not call backward(), or calls no op that can be cast;
  ///  - `step` calls other ops, or has other shapes or gradients, from run to run;
  ///  - `step` computes no gradient, or a gradient that is not finite in fp32;
  ///  - `step` waits for other processes without PrecisionAuditOptions::average, or differs between
  ///    processes;
  ///  - all parameters of the model are frozen, or one is trained in 16 bits;
  ///  - grad mode is off; n is below 1; `step` throws.
  void run(const std::function<void()>& step, int64_t n = 5);

  /// A row for each op and module. Ops that lose gradients, have infinite results or cannot run in
  /// 16 bits come first; then rows are in descending order of error. Times are medians over the
  /// runs.
  const std::vector<AuditRow>& rows() const;

  /// The sums over all rows, with no op and no module.
  AuditRow total() const;

  /// All rows as CSV, with a header line.
  std::string to_csv() const;
  /// Writes to_csv() to a file, which is replaced completely or not at all.
  void write_csv(const std::string& path) const;
  /// Replaces the times by the times in a file of write_csv(), from this machine or another; other
  /// measurements are unchanged. Errors, without any change: a file that cannot be read, or that is
  /// no such file; a file with other modules or ops.
  void read_times(const std::string& path);

  /// Chooses the ops for 16 bits by error per saved microsecond. The saved time allows for casts
  /// between an op and the ops that take its result. Then it measures the whole choice and reverts
  /// rules until the error is within the budget. It tries up to 12 further ops, and adds each that
  /// keeps the error within the budget. Gradients that are not finite exceed every budget. See the
  /// Note in choose.h. Calls the step of run() again: objects that the step refers to must still
  /// exist. It returns Policy::torch() instead if three conditions hold: the choice is slower,
  /// Policy::torch() is within the budget, and the times were not loaded by read_times().
  ///
  /// Errors: nothing has been measured; a budget or limit below 0; grad mode off; a model that is
  /// now frozen or in 16 bits, or has gradients that are not finite in fp32; a step that throws. If
  /// the step throws under Policy::torch(), this is no error: AuditedPolicy::torch_error is
  /// infinite.
  AuditedPolicy policy(const AuditBudget& budget = {}) const;

 private:
  std::shared_ptr<detail::AuditData> data_;
};

/// Prints the rows as a table (the most harmful first), the totals and a legend (see AuditRow).
/// Without measurements it prints that there are none.
std::ostream& operator<<(std::ostream& out, const PrecisionAudit& audit);

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/labs/detail/audit/policy_choice-inl.h"    // IWYU pragma: export
#include "torchamp/labs/detail/audit/precision_audit-inl.h"  // IWYU pragma: export
#include "torchamp/labs/detail/audit/saved_policy-inl.h"     // IWYU pragma: export
