// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/audit_row.h"
#include "torchamp/autocast.h"
#include "torchamp/detail/core/autocast/empty_cast_cache.h"
#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/gradients/attached.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/thread_policy.h"
#include "torchamp/detail/extras/audit/recording.h"
#include "torchamp/detail/extras/modules/sequential.h"
#include "torchamp/detail/extras/modules/with_policy.h"
#include "torchamp/detail/extras/observe/observer.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/detail/extras/shared/kept_tensors.h"
#include "torchamp/detail/extras/shared/rng_state.h"
#include "torchamp/module_policy.h"
#include "torchamp/policy.h"

namespace torchamp::detail {

/// The effect of a thread's guards while an audit runs a step.
struct GuardTrial final : GuardOverride {
  /// For 16-bit guards on this device: the dtype that replaces theirs, if any.
  std::optional<at::DeviceType> device = std::nullopt;
  std::optional<at::ScalarType> dtype = std::nullopt;
  mutable std::atomic<int64_t> guards_made = 0;  ///< while it was in force
  /// The dtype that the first such guard asked for.
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

/// The state of a model and of random generators that a step may change, restored bit for bit at
/// the end.
class ModelState {
 public:
  explicit ModelState(const torch::nn::Module& model) : model_(model), random_(RngState::now()) {
    const NotRecordedOps internal;
    for (const auto& item : model.named_parameters()) {
      if (!item.value().defined()) continue;
      names_.push_back(item.key());
      gradients_.push_back(item.value().grad());
      before_.add(item.value(), WriteBack::Copies::beside);
    }
    for (const at::Tensor& buffer : model.buffers()) {
      before_.add(buffer, WriteBack::Copies::beside);
    }
    for (const auto& item : model.named_modules("", /*include_self=*/true)) {
      trains_.emplace_back(item.value(), item.value()->is_training());
    }
  }
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;
  ~ModelState() {
    try {
      begin_step();
    } catch (const std::exception& error) {
      TORCH_WARN("PrecisionAudit: cannot put the model back as it was: ", error.what());
    }
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      parameter(i).tensor.mutable_grad() = gradients_[i];
    }
  }

  /// Restores the initial state, without gradients.
  void begin_step() const {
    const NotRecordedOps internal;
    const DropWeightCasts drop_casts;
    before_.put_back();
    for (std::size_t i = 0; i < gradients_.size(); ++i) parameter(i).tensor.mutable_grad().reset();
    for (const auto& [module, trains] : trains_) {
      if (module->is_training() != trains) module->train(trains);
    }
    random_.apply();
  }

  void check_parameters_unchanged() const {
    const NotRecordedOps internal;
    std::set<const at::TensorImpl*> known;
    for (const auto& kept : before_.all()) known.insert(kept.tensor.unsafeGetTensorImpl());
    for (const auto& items : {model_.named_parameters(), model_.named_buffers()}) {
      for (const auto& item : items) {
        TORCH_CHECK(!item.value().defined() || known.contains(item.value().unsafeGetTensorImpl()),
                    "PrecisionAudit::run: the step has registered '", item.key(),
                    "' in the model. Run it once before the audit.");
      }
    }
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      TORCH_CHECK(is_unchanged(parameter(i)),
                  "PrecisionAudit::run: the step has changed the parameter '", names_[i],
                  "'. Let it compute the loss and call backward(), without the optimizer.");
    }
  }

  /// Copies of the gradients in fp32, in order of the parameters; undefined if missing.
  std::vector<at::Tensor> gradients() const {
    const NotRecordedOps internal;
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      at::Tensor gradient = parameter(i).tensor.grad();
      if (gradient.defined()) {
        gradient = dense(gradient.detach());
        if (gradient.is_complex()) gradient = at::view_as_real(gradient);
        gradient = gradient.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      }
      all.push_back(gradient);
    }
    return all;
  }

  const std::string& name_of_parameter(std::size_t index) const { return names_[index]; }

 private:
  static at::Tensor dense(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided ? tensor : tensor.to_dense();
  }

  /// Bit for bit, since NaN differs from itself.
  static bool is_unchanged(const WriteBack::Kept& kept) {
    if (!is_alike(kept.tensor, kept.values)) return false;
    const at::Tensor now = kept.tensor.detach();
    const auto bits = [](const at::Tensor& tensor) {
      return dense(tensor).reshape({-1}).contiguous().view(at::kByte);
    };
    return same_numbers(now, kept.values) || at::equal(bits(now), bits(kept.values));
  }

  const WriteBack::Kept& parameter(std::size_t i) const { return before_.all()[i]; }

  const torch::nn::Module& model_;
  RngState random_;
  WriteBack before_;  // the parameters, and then the buffers
  std::vector<std::string> names_;
  std::vector<at::Tensor> gradients_;  // of the parameters
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> trains_;
};

/// The error of `gradients` relative to `exact`: the squared length of the difference over that of
/// the exact one, averaged over all parameters that have one. The elements of an almost vanishing
/// gradient (of a bias before a batch norm, say) count as if they had a thousandth of the others'
/// mean square, and an entirely wrong one counts as 1 (for a bias that attention does not depend
/// on, all is noise). Infinite if not finite.
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

/// The policies of a model's modules, restored at the end.
class KeptModulePolicies {
 public:
  explicit KeptModulePolicies(const ForwardSites& sites) {
    for (std::size_t i = 0; i < sites.size(); ++i) {
      if (sites[i].holder != nullptr) {
        holders_.emplace_back(sites[i].holder, sites[i].holder->shared_module_policy());
      } else {
        for (torch::nn::AnyModule* entry : sites[i].entries) entries_.emplace_back(entry, *entry);
      }
    }
  }
  KeptModulePolicies(const KeptModulePolicies&) = delete;
  KeptModulePolicies& operator=(const KeptModulePolicies&) = delete;
  ~KeptModulePolicies() {
    for (auto& [holder, policy] : holders_) holder->set_module_policy(policy);
    for (auto& [entry, former] : entries_) *entry = former;
  }

 private:
  std::vector<std::pair<PolicyHolder*, std::shared_ptr<const ModulePolicy>>> holders_;
  std::vector<std::pair<torch::nn::AnyModule*, torch::nn::AnyModule>> entries_;
};

/// The subject of a PrecisionAudit.
struct AuditedModel {
  torch::nn::Module* model;
  at::Device device;
  at::ScalarType dtype;
  bool takes_dtype_of_guard = false;           // of the step's first; `dtype` is for steps without
  std::function<void(at::Tensor&)> average{};  // over processes; empty: there is one
};

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

  /// The errors of rows where results without a gradient count as well; empty if the step cannot
  /// run so (an op may have no derivative for what it now would need one for).
  std::vector<double> errors_of_all_results() {
    std::vector<double> errors;
    try {
      for (const AuditRow& row : run_recorded(/*extends=*/true)->rows())
        errors.push_back(row.error);
    } catch (const std::exception&) {
      errors.clear();
    }
    // What the step leaves behind (a module's tables, say) is then of a run like all others.
    (void)us_exactly();
    return errors;
  }

  /// The error of the step's gradients under a policy and those of modules, and the step's time.
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
      // A step without a guard is entirely in one.
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

// Note [Processes that choose alike]
// A choice, and the number of tried choices, depends on times, which differ between processes. If a
// step waits for other processes, all must try the same ones. So all inputs of a choice are
// averaged over the processes as soon as they are measured.

/// Averages the numbers over the processes that audit together.
inline void average_numbers(const AuditedModel& audited, const std::vector<double*>& numbers) {
  if (!audited.average || numbers.empty()) return;
  const NotRecordedOps internal;
  const bool lacks_fp64 = facts_of(audited.device.type()).fp64 == Fp64::no;
  std::vector<double> values;
  values.reserve(numbers.size());
  for (const double* const number : numbers) values.push_back(*number);
  at::Tensor averaged =
      at::tensor(values, at::kDouble).to(audited.device, lacks_fp64 ? at::kFloat : at::kDouble);
  audited.average(averaged);
  averaged = averaged.to(at::kCPU, at::kDouble).contiguous();
  TORCH_CHECK(averaged.dim() == 1 && averaged.numel() == std::ssize(values),
              "PrecisionAudit: the option average made ", averaged.sizes(), " numbers of [",
              values.size(), "]. It must keep the shape.");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    *numbers[i] = averaged.const_data_ptr<double>()[i];
  }
}

/// Throws on all processes that audit together if any has a problem.
inline void check_no_problem(const char* call, const AuditedModel& audited,
                             const std::string& problem) {
  double problems = problem.empty() ? 0. : 1.;
  average_numbers(audited, {&problems});
  TORCH_CHECK(problems == 0., call, ": ",
              problem.empty() ? "the step of another process has failed; see its error" : problem,
              ".");
}

/// Averages, over the processes, the inputs of a choice in rows and edges. Error: the rows differ
/// between processes.
inline void agree(const AuditedModel& audited, std::vector<AuditRow>& rows,
                  std::vector<AuditEdge>& edges) {
  if (!audited.average) return;
  std::string text;
  for (const AuditRow& row : rows) text += row.module + '|' + row.op + '\n';
  for (const AuditEdge& edge : edges) {
    text += std::to_string(edge.producer.value_or(rows.size())) + '>' +
            std::to_string(edge.consumer) + '\n';
  }
  // 20 bits, so that sums are exact in fp32, too.
  const auto own = static_cast<double>(std::hash<std::string>{}(text)&0xFFFFFU);
  double common = own;
  average_numbers(audited, {&common});
  TORCH_CHECK(own == common,
              "PrecisionAudit: the steps of the processes do not call the same ops. Give all of "
              "them the same model and step.");
  std::vector<double> has_problem;
  has_problem.reserve(rows.size());
  for (const AuditRow& row : rows) has_problem.push_back(row.problem.empty() ? 0. : 1.);
  std::vector<double*> numbers;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    AuditRow& row = rows[i];
    numbers.insert(numbers.end(),
                   {&row.error, &row.gradient_loss, &row.underflow, &row.overflow, &row.vanished,
                    &row.fp32_us, &row.low_us, &row.cast_us, &has_problem[i]});
  }
  for (AuditEdge& edge : edges) numbers.push_back(&edge.us);
  average_numbers(audited, numbers);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (has_problem[i] > 0. && rows[i].problem.empty()) {
      rows[i].problem = "it cannot run in 16 bits on another process";
    }
  }
}

}  // namespace torchamp::detail
