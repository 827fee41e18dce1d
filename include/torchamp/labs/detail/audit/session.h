// SPDX-License-Identifier: BSD-3-Clause
// Runs of a step under several policies, each from the same state.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/autocast.h"
#include "torchamp/cast_cache.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/extras/observe/observer.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/labs/audit_row.h"
#include "torchamp/labs/detail/audit/call_trial.h"
#include "torchamp/labs/detail/audit/model_state.h"
#include "torchamp/labs/detail/audit/processes.h"
#include "torchamp/labs/detail/audit/recording.h"
#include "torchamp/labs/detail/modules/sequential.h"
#include "torchamp/labs/module_policy.h"
#include "torchamp/policy.h"

namespace TORCHAMP_NAMESPACE::detail {

/// The effect of a thread's guards while an audit runs a step.
struct GuardTrial final : GuardOverride {
  /// For 16-bit guards on this device: the dtype that replaces theirs, if any.
  std::optional<at::DeviceType> device = std::nullopt;
  std::optional<at::ScalarType> dtype = std::nullopt;
  mutable std::atomic<int64_t> guards_made = 0;  ///< while the trial was active
  /// The dtype of the first such guard.
  mutable std::atomic<at::ScalarType> asked_dtype = at::ScalarType::Undefined;

  at::ScalarType dtype_of_guard(at::DeviceType on, at::ScalarType asked,
                                bool enabled) const override {
    ++guards_made;
    if (!enabled || on != device || !is_16_bit(asked)) return asked;
    at::ScalarType none = at::ScalarType::Undefined;
    asked_dtype.compare_exchange_strong(none, asked);
    return dtype.value_or(asked);
  }
};

/// The calling thread's state with a trial set.
inline std::shared_ptr<const ThreadPolicy> thread_policy_under(
    std::shared_ptr<const GuardTrial> trial) {
  auto inner = copy_of(thread_policy());
  inner->guards = std::move(trial);
  return inner;
}

/// The error of `gradients` relative to `exact`: the squared length of the difference over the
/// squared length of the exact gradient, averaged over all parameters with a gradient. If a
/// gradient is almost 0 (of a bias before a batch norm, for example), the mean square of its
/// elements counts as at least a thousandth of the mean square of all elements. An error counts as
/// at most 1: if attention does not depend on a bias, its gradient is only noise. Infinite if a
/// gradient is not finite.
inline double gradient_error(const std::vector<at::Tensor>& gradients,
                             const std::vector<at::Tensor>& exact) {
  const NotRecordedOps internal;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  double squares = 0., elements = 0.;
  for (const at::Tensor& gradient : exact) {
    if (!gradient.defined()) continue;
    squares += gradient.to(at::kDouble).square().sum().item<double>();
    elements += static_cast<double>(gradient.numel());
  }
  const double least = 1e-3 * squares / std::max(elements, 1.);
  double sum = 0.;
  int64_t count = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (!exact[i].defined()) continue;
    if (!gradients[i].defined()) return infinity;
    const at::Tensor wide = exact[i].to(at::kDouble);
    const double all =
        std::max(wide.square().sum().item<double>(), least * static_cast<double>(wide.numel()));
    const auto error = gradients[i].to(at::kDouble).sub(wide).square().sum().item<double>();
    if (!std::isfinite(error)) return infinity;
    if (all > 0.) sum += std::min(error / all, 1.);
    ++count;
  }
  return count == 0 ? 0. : sum / static_cast<double>(count);
}

/// Switches autocast off during backward, for a step entirely in one region.
class BackwardWithoutAutocast final : public Observer {
 public:
  explicit BackwardWithoutAutocast(at::DeviceType device) : device_(device) {}

  std::unique_ptr<Observer::Call> begin(const at::RecordFunction& call) override {
    if (!std::string_view(call.name()).starts_with("autograd::engine::")) return nullptr;
    auto before = std::make_unique<Before>(DeviceAutocastState::of(device_));
    at::autocast::set_autocast_enabled(device_, false);
    return before;
  }
  void end(const at::RecordFunction&, Observer::Call& begun) override {
    static_cast<Before&>(begun).state.apply();
  }

 private:
  struct Before final : Observer::Call {
    explicit Before(const DeviceAutocastState& now) : state(now) {}
    DeviceAutocastState state;
  };

  at::DeviceType device_;
};

/// Throws if the model is frozen as a whole or trained in 16 bits, and if grad mode is off.
inline void check_is_trained(const char* call, const torch::nn::Module& model) {
  TORCH_CHECK(at::GradMode::is_enabled(), call,
              ": grad mode is off on this thread (NoGradGuard, InferenceMode), and an audit "
              "measures errors by gradients. Call it outside that scope.");
  bool is_trained = false;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.defined() || !parameter.requires_grad()) continue;
    is_trained = true;
    TORCH_CHECK(
        !is_16_bit(parameter.scalar_type()), call, ": the parameter '", item.key(), "' is in ",
        parameter.scalar_type(),
        ", and errors are measured against a step in fp32. Audit the model before MasterWeights or "
        "to() casts it to 16 bits, or audit a copy after to(torch::kFloat).");
  }
  TORCH_CHECK(is_trained, call,
              ": no parameter of the model requires grad, and an audit measures errors by "
              "gradients. Call requires_grad_(true) on the trained ones.");
}

/// Runs a step of a model under several policies, each time from the same state, which is restored
/// at the end.
class AuditSession {
 public:
  AuditSession(const AuditedModel& audited, std::function<void()> step)
      : audited_(audited),
        step_(std::move(step)),
        sites_(*audited.model),
        policies_(sites_),
        state_(*audited.model) {}

  const ForwardSites& sites() const { return sites_; }

  /// The subject, with its dtype once run_exactly() was called.
  const AuditedModel& audited() const { return audited_; }

  /// Runs the step with guards off, and records its gradients as exact.
  void run_exactly() {
    const auto trial = std::make_shared<GuardTrial>();
    run_off(trial);
    exact_ = state_.gradients();
    has_guards_ = trial->guards_made > 0;
    const at::ScalarType asked = trial->asked_dtype;
    if (audited_.takes_dtype_of_guard && asked != at::ScalarType::Undefined) {
      audited_.dtype = asked;
    }
  }

  /// Why run_exactly() gave no reference gradients; empty if it did.
  std::string problem_of_gradients() const {
    const NotRecordedOps internal;
    bool has_gradient = false;
    for (std::size_t i = 0; i < exact_.size(); ++i) {
      has_gradient |= exact_[i].defined();
      if (is_finite_gradient(exact_[i])) continue;
      return "the step's gradient of '" + state_.name_of_parameter(i) + "' holds " +
             (exact_[i].isnan().any().item<bool>() ? "a NaN" : "an inf") +
             " in fp32 already, so that no error can be measured against it. Give the step data "
             "and parameters that are finite, and a loss that is small enough";
    }
    if (has_gradient) return {};
    return "the step gives no parameter of the model a gradient, so that there are none to "
           "compare. Let its loss depend on parameters that need one";
  }

  /// Runs the step with guards off, op by op. `extends`: see Note [Results without a gradient].
  /// Errors: see PrecisionAudit::run.
  std::shared_ptr<const AuditRecording> run_recorded(bool extends = false) {
    for (std::size_t i = 0; i < sites_.size(); ++i) sites_[i].put(unedited(BaseTable::torch));
    const auto recording = std::make_shared<AuditRecording>(
        parameters_by_name(*audited_.model), audited_.device.type(), audited_.dtype, extends);
    {
      const Observation observation("PrecisionAudit::run", recording);
      run_off(std::make_shared<GuardTrial>());
    }
    TORCH_CHECK(recording->problem().empty(), "PrecisionAudit::run: ", recording->problem());
    TORCH_CHECK(recording->ran_backward(),
                "PrecisionAudit::run: the step has not called backward(). Let it compute the loss "
                "and call loss.backward().");
    TORCH_CHECK(audited_.average || !recording->waits_for_others(),
                "PrecisionAudit::run: the step waits for other processes, which may choose another "
                "policy and then deadlock. Pass {.average = torchamp::average_over(group)}, so all "
                "choose the same.");
    check_same_gradients();
    return recording;
  }

  /// The errors of rows if results without a gradient also count. Empty if the step cannot run with
  /// such results, because an op has no derivative for one of them.
  std::vector<double> errors_of_all_results() {
    std::vector<double> errors;
    try {
      for (const AuditRow& row : run_recorded(/*extends=*/true)->rows())
        errors.push_back(row.error);
    } catch (const std::exception&) {
      errors.clear();
    }
    // Data that the step leaves in the model (a module's tables, for example) then comes from an
    // ordinary run.
    (void)us_exactly();
    return errors;
  }

  /// The error of the step's gradients under a policy and policies of modules, and the step's time.
  std::pair<double, double> run_under(const Policy& policy, const ModulePolicies& modules) {
    const auto trial = std::make_shared<GuardTrial>();
    trial->policy = policy.data();
    trial->module_policies = true;
    trial->device = audited_.device.type();
    trial->dtype = audited_.dtype;
    state_.begin_step();
    (void)modules.apply_to(*audited_.model);
    double seconds = 0.;
    {
      const EmptyCastCache own_casts;
      const PolicyScope scope(thread_policy_under(trial));
      // A step without a guard runs entirely in one region.
      std::optional<AutocastRegion> region;
      std::optional<Observation> backward;
      if (!has_guards_) {
        backward.emplace("PrecisionAudit::policy",
                         std::make_shared<BackwardWithoutAutocast>(audited_.device.type()));
        region.emplace(audited_.device.type(),
                       AutocastOptions{.dtype = audited_.dtype, .policy = policy});
      }
      seconds = seconds_on(audited_.device, step_);
    }
    return {gradient_error(state_.gradients(), exact_), seconds * 1e6};
  }

  /// The step's time with guards off, in microseconds.
  double us_exactly() { return run_off(std::make_shared<GuardTrial>()) * 1e6; }

 private:
  double run_off(const std::shared_ptr<GuardTrial>& trial) {
    trial->off = true;
    trial->device = audited_.device.type();
    state_.begin_step();
    const EmptyCastCache own_casts;
    const AutocastRegion off(audited_.device.type(), {.enabled = false});
    const PolicyScope scope(thread_policy_under(trial));
    const double seconds = seconds_on(audited_.device, step_);
    state_.check_parameters_unchanged();
    return seconds;
  }

  void check_same_gradients() const {
    const NotRecordedOps internal;
    constexpr double most = 1e-6;  // squared; sums on a GPU may come in any order
    const std::vector<at::Tensor> again = state_.gradients();
    for (std::size_t i = 0; i < exact_.size(); ++i) {
      const double error =
          exact_[i].defined() != again[i].defined() ? 1. : gradient_error({again[i]}, {exact_[i]});
      TORCH_CHECK(
          !(error > most) || !is_finite_gradient(exact_[i]),
          "PrecisionAudit::run: the step is not deterministic: run again from the same state, it "
          "gives another gradient of '",
          state_.name_of_parameter(i),
          "'. Let it use one batch, and LibTorch's default random generators.");
    }
  }

  static bool is_finite_gradient(const at::Tensor& gradient) {
    return !gradient.defined() || gradient.isfinite().all().item<bool>();
  }

  AuditedModel audited_;
  std::function<void()> step_;
  ForwardSites sites_;
  KeptModulePolicies policies_;
  ModelState state_;
  std::vector<at::Tensor> exact_;
  bool has_guards_ = false;
};

}  // namespace TORCHAMP_NAMESPACE::detail
