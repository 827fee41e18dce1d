// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Labs. PrecisionAudit: which ops of a model may run in 16 bits, and whether it is worth
/// it.

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
  /// fp16 or bf16, also for the step's guards. Unset: the dtype of the step's first 16-bit guard,
  /// or without one, the device's current autocast dtype.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// For a model that several processes train: replaces the elements of a 1-D tensor on the model's
  /// device by their means over all processes, as average_over() in distributed/data_parallel.h
  /// does. All processes then call run(), read_times() and policy() together, with steps on their
  /// own data; errors and times are means over them, and they all choose the same policy.
  std::function<void(at::Tensor&)> average = nullptr;
};

/// Limits for PrecisionAudit::policy().
struct AuditBudget {
  /// The largest error of the gradients relative to those in fp32: the squared length of the
  /// difference over that of the gradient, averaged over all parameters. The elements of an almost
  /// vanishing gradient count as if they had a thousandth of the others' mean square, and no
  /// parameter counts for more than 1. Unset: the error under Policy::torch(), and at most
  /// most_by_default.
  std::optional<double> error_budget = std::nullopt;
  /// The largest budget that an audit sets by itself, since Policy::torch() may be wrong for a
  /// model (positions in 16 bits, say). Gradients that are off by their own length have an error
  /// of 1.
  static constexpr double most_by_default = 0.05;
  /// An op stays in fp32 if rounding the gradients of its results to 16 bits loses more than this
  /// share of them (AuditRow::gradient_loss).
  double gradient_loss_limit = 1e-3;
};

/// One op's rule in a chosen policy.
struct AuditDecision {
  std::string module{};  ///< whose policy has the rule; empty for the guards' policy
  std::string op{};      ///< like in a Policy
  bool lowered = false;  ///< lower_precision, otherwise fp32
  std::string reason{};  ///< in words
};

/// The result of PrecisionAudit::policy(), with its measurements.
struct AuditedPolicy {
  /// For the guards.
  Policy policy = Policy::torch();
  /// For modules that accept their own policy: modules.apply_to(*model).
  ModulePolicies modules{};
  /// Every rule, with its reason.
  std::vector<AuditDecision> decisions{};
  double error = 0.;        ///< of the gradients under it: see AuditBudget
  double budget = 0.;       ///< the limit of the error
  double torch_error = 0.;  ///< under Policy::torch(); infinite if the step throws
  /// Microseconds of a step: medians over as many runs as the audit's, and the largest
  /// interquartile range of the three.
  double us = 0., torch_us = 0., fp32_us = 0., spread_us = 0.;
  /// Ops with one rule for several modules, since these do not accept policies.
  std::vector<std::string> joined{};
};

/// Prints the totals, and all rules with their reasons.
std::ostream& operator<<(std::ostream& out, const AuditedPolicy& audited);

/// Writes an audit's policies as text for load_policies() and TORCHAMP_POLICY=file:PATH (which uses
/// the rules for ops): the present `policy` and `modules`, one rule per line, those of the audit
/// with their reasons as comments. If `policy` has no edits, or `modules` lacks the module of a
/// decision, the decisions are written instead. The file is replaced as a whole or not at all.
/// Errors, which name the file if it is the cause: a rule without a text form (see to_text()); a
/// module name with '#' or white space.
void save_policy(const AuditedPolicy& audited, const std::string& path);

/// Measures which ops of a model may run in 16 bits, and the time that saves.
///
///     torchamp::PrecisionAudit audit(*model);
///     audit.run([&] { loss_of(model, batch).backward(); }, 5);
///     std::cout << audit;                          // a row for each op and module
///     torchamp::AuditedPolicy best = audit.policy();
///     torchamp::save_policy(best, "model.policy");
///
/// A step computes the loss and calls backward(), with a guard like in training and without an
/// optimizer. It runs with guards off, in the precision of its tensors (audit a model in fp32,
/// before MasterWeights or to() narrow it); after each forward call of an op that a policy can
/// cast, the call is repeated in fp32 and in 16 bits on copies: see Note [What an audit measures].
/// Synchronises for each op, and takes several times the time and memory of a step. Regions of
/// at::autocast without torchamp stay on.
///
/// In any case the model's parameters, gradients, buffers and module policies, the default random
/// generators and the thread's autocast state are restored exactly.
///
/// A copy has its own rows, for the same model and step. One thread at a time; the model must
/// outlive the audit.
class PrecisionAudit {
 public:
  /// Error: a dtype that is not fp16 or bf16; a model without parameters on a device with autocast.
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

  /// Runs `step` once unmeasured and `n` times measured, and once more if results depend on no
  /// parameter, each time from the same state. A further call replaces the measurements. Errors,
  /// after which the audit is unchanged: `step` changes a parameter; does not call backward();
  /// calls other ops, or has other shapes or gradients, from run to run; calls no op that can be
  /// cast; waits for other processes without PrecisionAuditOptions::average, or differs between
  /// processes; gives no parameter a gradient, or one that is not finite in fp32. A model whose
  /// parameters are all frozen, or one of which is trained in 16 bits; grad mode off; n below 1;
  /// and whatever `step` throws.
  void run(const std::function<void()>& step, int64_t n = 5);

  /// A row for each op and module: first those that lose gradients, are infinite or cannot run in
  /// 16 bits, then in descending order of error. Times are medians over the runs.
  const std::vector<AuditRow>& rows() const;

  /// The sums over all rows, with no op and no module.
  AuditRow total() const;

  /// All rows as CSV, with a header line.
  std::string to_csv() const;
  /// Writes to_csv() to a file, which is replaced as a whole or not at all.
  void write_csv(const std::string& path) const;
  /// Takes the times from a file of write_csv(), from this machine or another; all else stays as
  /// measured. Errors, without any change: a file that cannot be read or is no such file; one with
  /// other modules or ops.
  void read_times(const std::string& path);

  /// Chooses the ops for 16 bits by error per microsecond saved, including casts between
  /// neighbours; measures the result as a whole, and reverts rules until within the budget. See
  /// Note [How an audit chooses]. Calls the step of run() again: what it refers to must still
  /// exist. If times were measured here and the choice is slower than Policy::torch(), it returns
  /// the latter if that is within the budget. Gradients that are not finite are never within it.
  /// Errors: nothing has been measured; a budget or limit below 0; grad mode off; a model that is
  /// by now frozen or in 16 bits, or has gradients that are not finite in fp32; and whatever the
  /// step throws. (If it throws under Policy::torch(), that policy's error is infinite instead.)
  AuditedPolicy policy(const AuditBudget& budget = {}) const;

 private:
  std::shared_ptr<detail::AuditData> data_;
};

/// Prints the rows as a table, the most harmful first, the totals, and a legend (see AuditRow); or
/// that nothing has been measured.
std::ostream& operator<<(std::ostream& out, const PrecisionAudit& audit);

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/labs/detail/audit/policy_choice-inl.h"    // IWYU pragma: export
#include "torchamp/labs/detail/audit/precision_audit-inl.h"  // IWYU pragma: export
#include "torchamp/labs/detail/audit/saved_policy-inl.h"     // IWYU pragma: export
