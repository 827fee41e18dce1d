// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief PrecisionAudit: which ops of a model may run in 16 bits, and whether it is worth it.

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

#include "torchamp/audit_row.h"  // IWYU pragma: export
#include "torchamp/module_policy.h"
#include "torchamp/policy.h"
#include "torchamp/policy_file.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {
namespace detail {
struct AuditData;
}

/// What a PrecisionAudit is made with.
struct PrecisionAuditOptions {
  /// fp16 or bf16, which the step's guards then have, too; unset: what its first guard in 16 bits
  /// asks for, or without one, the device's current autocast dtype.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// For a model that several processes train: replaces a 1-D tensor of numbers on the model's
  /// device by their means over all processes, as average_over() in distributed/data_parallel.h
  /// does. Then all processes call run(), read_times() and policy() alike, with steps of their own
  /// data; errors and times are means over them, and they all choose the same.
  std::function<void(at::Tensor&)> average = nullptr;
};

/// What PrecisionAudit::policy() keeps to.
struct AuditBudget {
  /// The most that the gradients may differ from those of fp32: the squared length of the
  /// difference over that of the gradient, the mean over all parameters. (A gradient that is nearly
  /// nothing beside the others counts as if its numbers had a thousandth of their mean square, and
  /// no parameter counts for more than 1.)
  /// Unset: what the step's gradients differ by under Policy::torch(), or, where they are not
  /// finite under it, 1: all finite gradients keep to that.
  std::optional<double> error_budget = std::nullopt;
  /// An op stays in fp32 if rounding the gradients that arrive at its results to 16 bits loses
  /// more than this share of them (AuditRow::gradient_loss).
  double gradient_loss_limit = 1e-3;
};

/// One op's rule in a chosen policy.
struct AuditDecision {
  std::string module{};  ///< whose policy has the rule; empty for the policy of all others
  std::string op{};      ///< as a Policy takes it
  bool lowered = false;  ///< lower_precision, or else fp32
  std::string reason{};  ///< in words
};

/// What PrecisionAudit::policy() chose, and how it measured.
struct AuditedPolicy {
  /// For the guards.
  Policy policy = Policy::torch();
  /// For the modules that can have a policy of their own: modules.apply_to(*model).
  ModulePolicies modules{};
  /// Every rule, with its reason.
  std::vector<AuditDecision> decisions{};
  double error = 0.;        ///< of the gradients, measured under it: see AuditBudget
  double budget = 0.;       ///< what it had to keep to
  double torch_error = 0.;  ///< that of Policy::torch(); infinite if the step throws under it
  /// Microseconds of a step: the median of as many runs as the audit's; and the largest distance
  /// between the quartiles of these three.
  double us = 0., torch_us = 0., fp32_us = 0., spread_us = 0.;
  /// Ops whose calls in several modules follow one rule, since these modules cannot be given
  /// policies of their own.
  std::vector<std::string> joined{};
};

/// Prints the totals, and every rule with its reason.
std::ostream& operator<<(std::ostream& out, const AuditedPolicy& audited);

/// Writes what an audit chose as text for load_policies() and TORCHAMP_POLICY=file:PATH (which
/// takes the part about ops): `policy` and `modules` as they are by now, a rule a line, those of
/// the audit with their reasons as comments. (Where `policy` has no edits, or `modules` not the
/// module of a decision, the decisions stand for it.) The file is replaced as a whole or not at
/// all. Errors: a rule that has no text (see to_text()), a module's name with '#' or white space;
/// they name the file where it is to blame.
void save_policy(const AuditedPolicy& audited, const std::string& path);

/// Measures which ops of a model may run in 16 bits, and what that saves.
///
///     torchamp::PrecisionAudit audit(*model);
///     audit.run([&] { loss_of(model, batch).backward(); }, 5);
///     std::cout << audit;                          // a row for each op and module
///     torchamp::AuditedPolicy best = audit.policy();
///     torchamp::save_policy(best, "model.policy");
///
/// A step computes the loss and calls backward(), with a guard where training has one, and has no
/// optimizer. It runs with guards off, in the precision of its tensors (audit a model in fp32,
/// before MasterWeights or to() narrow it); after each call in forward of an op that a policy can
/// cast, the call is made again in fp32 and in 16 bits on copies: see Note [What an audit
/// measures]. Reads the device for each op, and takes several times the time and memory of a step.
/// Regions of at::autocast without torchamp are not switched off.
///
/// Whatever happens, the model's parameters, gradients, buffers and module policies, the default
/// random generators and the thread's autocast state are afterwards as before, bit for bit.
///
/// A copy has rows of its own, of the same model and step. One thread at a time; the model must
/// outlive the audit.
class PrecisionAudit {
 public:
  /// Error: a dtype that is not fp16 or bf16; a model without parameters on a device with autocast.
  explicit PrecisionAudit(torch::nn::Module& model, const PrecisionAuditOptions& options = {});
  /// Of a module holder.
  template <class Contained>
  explicit PrecisionAudit(const torch::nn::ModuleHolder<Contained>& model,
                          const PrecisionAuditOptions& options = {})
      : PrecisionAudit(static_cast<torch::nn::Module&>(*model.ptr()), options) {}
  /// A copy has rows of its own.
  PrecisionAudit(const PrecisionAudit& other);
  /// As the copy constructor.
  PrecisionAudit& operator=(const PrecisionAudit& other);
  ~PrecisionAudit() = default;

  /// Runs `step` once as it is and `n` times measuring it, each time from the same state. A further
  /// call replaces what was measured. Errors, after which the audit is as before: `step` changes a
  /// parameter, does not call backward(), calls other ops or gives other shapes or gradients from
  /// one run to the next, calls no op that can be cast, waits for other processes though
  /// PrecisionAuditOptions::average is unset, or is another one there, or gives no parameter a
  /// gradient, or one that is not finite in fp32; a model whose parameters are all frozen, or one
  /// of which is trained in 16 bits; gradients that are off on the thread; n below 1; and whatever
  /// `step` throws.
  void run(const std::function<void()>& step, int64_t n = 5);

  /// A row for each op and module. First those that lose gradients, are infinite or cannot run in
  /// 16 bits, then in descending order of error. Times are medians over the runs.
  const std::vector<AuditRow>& rows() const;

  /// The sums over all rows, with no op and no module.
  AuditRow total() const;

  /// All rows as CSV, with a line of names.
  std::string to_csv() const;
  /// Writes to_csv() to a file, which is replaced as a whole or not at all.
  void write_csv(const std::string& path) const;
  /// Takes the times from a file of write_csv(), from this machine or another; the rest stays as
  /// measured. Errors, without any change: a file that cannot be read or is not one; one whose
  /// modules and ops are others.
  void read_times(const std::string& path);

  /// Chooses what to lower: by error for each microsecond saved, casts between neighbours counted,
  /// measured again as a whole and taken back until within the budget. See
  /// Note [How an audit chooses]. Calls the step given to run() again: what it refers to must still
  /// exist. Where times were measured here, a choice that is slower than Policy::torch() gives way
  /// to that one, if it keeps to the budget. Gradients that are not finite keep to no budget.
  /// Errors: nothing has been measured; a budget or limit below 0; gradients that are off on the
  /// thread; a model that is frozen or in 16 bits, or gradients that are not finite in fp32, by
  /// now; and whatever the step throws.
  AuditedPolicy policy(const AuditBudget& budget = {}) const;

 private:
  std::shared_ptr<detail::AuditData> data_;
};

/// Prints the rows as a table, the most harmful first, the totals, and what the columns mean (see
/// AuditRow); or that nothing has been measured.
std::ostream& operator<<(std::ostream& out, const PrecisionAudit& audit);

}  // namespace TORCHAMP_NAMESPACE

#include "torchamp/detail/audit/precision_audit-inl.h"  // IWYU pragma: export
#include "torchamp/detail/audit/saved_policy-inl.h"     // IWYU pragma: export
