// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/audit/audit_recording.h"
#include "torchamp/detail/audit/guard_trial.h"
#include "torchamp/detail/audit/model_state.h"
#include "torchamp/detail/audit/op_trial.h"
#include "torchamp/detail/modules/sequential.h"
#include "torchamp/detail/observe/named_parameters.h"
#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/overlay/autocast_region.h"
#include "torchamp/detail/overlay/weight_casts.h"
#include "torchamp/detail/policy/data.h"
#include "torchamp/module_policy.h"
#include "torchamp/policy.h"

namespace torchamp::detail {

/// What a PrecisionAudit is of.
struct AuditedModel {
  torch::nn::Module* model;
  at::Device device;
  at::ScalarType dtype;
  bool takes_dtype_of_guard = false;           // of the step's first; `dtype` is for steps without
  std::function<void(at::Tensor&)> average{};  // over processes; empty: there is one
};

/// Switches autocast off while backward runs, for a step that is all in one region.
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

/// Runs a step of a model under several policies, each time from the same state, which is put back
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

  /// What is audited, with the dtype that it is audited in, once run_exactly() was called.
  const AuditedModel& audited() const { return audited_; }

  /// Runs the step with guards off, and takes its gradients for exact.
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

  /// Why run_exactly() has given nothing to compare other gradients with; empty if it has.
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

  /// Runs the step with guards off, looked at op by op. Errors: see PrecisionAudit::run.
  std::shared_ptr<const AuditRecording> run_recorded() {
    for (std::size_t i = 0; i < sites_.size(); ++i) sites_[i].put(unedited(BaseTable::torch));
    const auto recording = std::make_shared<AuditRecording>(parameters_by_name(*audited_.model),
                                                            audited_.device.type(), audited_.dtype);
    {
      const Observation observation("PrecisionAudit::run", recording);
      run_off(std::make_shared<GuardTrial>());
    }
    TORCH_CHECK(recording->problem().empty(), "PrecisionAudit::run: ", recording->problem());
    TORCH_CHECK(recording->ran_backward(),
                "PrecisionAudit::run: the step has not called backward(). It computes the loss and "
                "calls loss.backward().");
    TORCH_CHECK(audited_.average || !recording->waits_for_others(),
                "PrecisionAudit::run: the step waits for other processes, which may choose another "
                "policy and then wait for good. Let them choose alike: give the audit the option "
                "average, torchamp::average_over(group).");
    check_same_gradients();
    return recording;
  }

  /// The error of the step's gradients under a policy and those of modules, and how long it took.
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
      const TrialScope scope(trial);
      // A step without a guard is all in one.
      std::optional<AutocastRegion> region;
      std::optional<Observation> backward;
      if (!has_guards_) {
        backward.emplace("PrecisionAudit::policy",
                         std::make_shared<BackwardWithoutAutocast>(audited_.device.type()));
        region.emplace(audited_.device.type(), audited_.dtype, true, std::nullopt, std::nullopt,
                       policy.data());
      }
      seconds = seconds_on(audited_.device, step_);
    }
    return {gradient_error(state_.gradients(), exact_), seconds * 1e6};
  }

  /// How long the step takes with guards off, in microseconds.
  double us_exactly() { return run_off(std::make_shared<GuardTrial>()) * 1e6; }

 private:
  double run_off(const std::shared_ptr<GuardTrial>& trial) {
    trial->off = true;
    trial->device = audited_.device.type();
    state_.begin_step();
    const EmptyCastCache own_casts;
    const TrialScope scope(trial);
    const AutocastRegion off(audited_.device.type(), std::nullopt, false, std::nullopt,
                             std::nullopt, nullptr);
    trial->forget_guards();
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

}  // namespace torchamp::detail
