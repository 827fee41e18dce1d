// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <ATen/ops/stack.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <map>
#include <unordered_map>
#include <utility>

#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/detail/extras/shared/stable_order.h"
#include "torchamp/labs/underflow_meter.h"

namespace TORCHAMP_NAMESPACE::detail {

/// Whether the argument is, or may be, a dtype.
inline bool takes_dtype(const c10::Argument& argument) {
  const c10::Type* type = argument.real_type().get();
  if (type->kind() == c10::TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType().get();
  }
  return type->kind() == c10::TypeKind::ScalarTypeType;
}

// Note [Which calls are made twice]
// An ATen call can be repeated, on copies of the tensors that it writes, without other effects than
// its results. Exception: ops that draw random numbers. For other libraries' ops this is not known:
// if one process calls a c10d collective twice, it waits for the others forever.

/// Whether a call of this op can be repeated without an effect on the program.
inline bool can_be_made_twice(const c10::OperatorHandle& op) {
  return op.operator_name().name.starts_with("aten::") &&
         !op.hasTag(at::Tag::nondeterministic_seeded);
}

/// The op's results in fp32 for the same arguments, which are unchanged: 16-bit arguments, and
/// requested 16-bit results, become fp32. Floating-point results in order; none if it fails.
inline std::optional<std::vector<at::Tensor>> results_in_fp32(
    const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> arguments) {
  try {
    const c10::FunctionSchema& schema = op.schema();
    torch::jit::Stack stack;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      const bool is_written = schema.is_mutable() || is_running_statistic(argument);
      stack.push_back(with_tensors_changed(arguments[i], [&](const at::Tensor& tensor) {
        if (is_16_bit(tensor.scalar_type())) return tensor.to(at::kFloat);
        return is_written ? tensor.clone() : tensor;
      }));
      if (stack.back().isInt() && takes_dtype(argument) &&
          is_16_bit(static_cast<at::ScalarType>(stack.back().toInt()))) {
        stack.back() = at::kFloat;
      }
    }
    op.callBoxed(stack);
    std::vector<at::Tensor> results;
    for_each_floating_tensor(stack, [&](const at::Tensor& tensor) { results.push_back(tensor); });
    return results;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Note [What a gradient is]
// LibTorch reports the calls in backward, and their node, but not the node's results. If the memory
// of a call's result outlives the node, the result is a gradient, and not a temporary. Calls of the
// engine between nodes also compute gradients: the engine sums over broadcast dimensions, and
// casts. The engine also adds the gradients of several nodes for one tensor. This loses nothing,
// because a sum of two 16-bit numbers is a multiple of the smallest number; the same holds for the
// accumulation in a parameter. Such sums, copies and casts have the kind of their inputs: if
// AccumulateGrad takes one, the inputs are gradients of weights.

/// A 16-bit gradient that an op made.
struct MadeGradient {
  std::string module;
  bool of_weights = false;
  int64_t elements = 0;
  at::Tensor lost{};  // 0-dim, how many; undefined if it was not examined
};

/// A user of gradients: an op's call, or a node.
struct UnderflowCall final : RecordedCall<UnderflowCall> {
  // For an op:
  bool carries_on = false;                             // a view, copy or sum of its inputs
  std::vector<std::shared_ptr<MadeGradient>> taken{};  // from which its arguments come
  std::vector<const c10::StorageImpl*> sources{};      // of its floating-point arguments
  std::optional<std::vector<at::Tensor>> exact{};      // its results in fp32

  // For a node:
  bool accumulates = false;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, std::shared_ptr<MadeGradient>>>
      made{};
};

/// The observations of one step.
class UnderflowRecording final : public Recording<UnderflowCall> {
 public:
  explicit UnderflowRecording(const NamedParameters& parameters) : Recording(parameters) {}

  /// The gradients of the step, in order of creation.
  const std::vector<std::shared_ptr<MadeGradient>>& gradients() const { return gradients_; }

 private:
  using Call = UnderflowCall;
  using Made = std::shared_ptr<MadeGradient>;

  void begin_node(const at::RecordFunction& call, Call& node) override {
    node.accumulates = node.node.ends_with("AccumulateGrad");
    if (!node.accumulates) return;
    for_each_floating_tensor(inputs_of(call), [&](const at::Tensor& gradient) {
      const std::vector<Made>* const parts = made_of_.find(storage_of(gradient));
      if (parts == nullptr) return;
      for (const Made& part : *parts) part->of_weights = true;
    });
  }

  void end_node(Call& node) override {
    for (auto& [storage, made] : node.made) {
      if (!storage.expired()) gradients_.push_back(std::move(made));
    }
  }

  static bool only_copies(const RecordedOp& op) {
    return op.is_copy || op.label == "clone" || op.label.starts_with("contiguous");
  }
  /// The node that makes the call; null if the engine does.
  static Call* node_of(const Call& call) {
    Call* const outer = call.outer;
    return outer != nullptr && outer->kind == Call::Kind::node ? outer : nullptr;
  }

  void begin_op(const at::RecordFunction& function, Call& call) override {
    if (!call.in_backward || call.caller != nullptr) return;
    const RecordedOp& op = *call.op;
    const Call* const node = node_of(call);
    const bool adds = op.label == "add.Tensor" || op.label == "add_.Tensor";
    call.carries_on = only_copies(op) || (node != nullptr ? node->accumulates : adds);
    const c10::ArrayRef<const c10::IValue> arguments = inputs_of(function);
    for_each_floating_tensor(arguments, [&](const at::Tensor& tensor) {
      call.sources.push_back(storage_of(tensor));
      const std::vector<Made>* const parts = made_of_.find(storage_of(tensor));
      if (parts == nullptr || !(call.carries_on || op.is_conversion)) return;
      call.taken.insert(call.taken.end(), parts->begin(), parts->end());
    });
    if (call.carries_on || call.sources.empty()) return;
    if (!(op.computes || op.is_conversion) || !can_be_made_twice(op.handle)) return;
    const NotRecordedOps internal;
    // Before the op runs, since it may write to its arguments.
    call.exact = results_in_fp32(op.handle, arguments);
  }

  void end_op(const at::RecordFunction& function, Call& call) override {
    if (!call.in_backward || call.caller != nullptr) return;
    const NotRecordedOps internal;
    const RecordedOp& op = *call.op;
    std::size_t place = 0;
    for_each_floating_tensor(function.outputs(), [&](const at::Tensor& result) {
      const std::size_t i = place++;
      if (!result.has_storage() || result.layout() != at::kStrided) return;
      const bool is_argument =
          std::ranges::find(call.sources, storage_of(result)) != call.sources.end();
      const bool is_made = op.is_conversion ? !is_argument : op.computes && !call.carries_on;
      if (!is_16_bit(result.scalar_type()) || !is_made || call.sources.empty()) {
        if (!call.taken.empty()) made_of_.set(result, call.taken);
        return;
      }
      auto made = std::make_shared<MadeGradient>(
          MadeGradient{.module = call.module, .elements = result.numel()});
      if (call.exact && i < call.exact->size() && (*call.exact)[i].sizes().equals(result.sizes())) {
        made->lost = result.eq(0.).logical_and_((*call.exact)[i].ne(0.)).sum();
      }
      made_of_.set(result, {made});
      Call* const node = node_of(call);
      if (node == nullptr) {
        gradients_.push_back(std::move(made));
        return;
      }
      // An op in place replaces the earlier gradient.
      std::erase_if(node->made, [&](const auto& earlier) {
        return earlier.first._unsafe_get_target() == storage_of(result);
      });
      node->made.emplace_back(result.storage().getWeakStorageImpl(), std::move(made));
    });
  }

  StorageMap<std::vector<Made>> made_of_;
  std::vector<Made> gradients_;
};

/// The counts of all metered steps. A device's counts stay there until queried.
struct UnderflowHistory {
  struct Counts {
    std::size_t step = 0;             // index in `steps`
    std::vector<std::size_t> rows{};  // indices in `rows`
    at::Tensor lost{};                // for each of these
  };
  int64_t steps_in_all = 0;  // steps that have begun
  bool in_step = false;
  std::vector<UnderflowRow> rows;
  std::map<std::pair<std::string, bool>, std::size_t> row_index;
  std::vector<UnderflowStep> steps;
  std::vector<std::pair<std::size_t, at::Tensor>> scales_of;  // steps whose scale is on a device
  std::vector<Counts> counts;

  void add(UnderflowStep step, const at::Tensor& scale, const UnderflowRecording& seen) {
    std::unordered_map<at::Device, std::map<std::size_t, std::vector<at::Tensor>>> lost;
    for (const auto& gradient : seen.gradients()) {
      const auto [found, is_new] =
          row_index.try_emplace({gradient->module, gradient->of_weights}, rows.size());
      if (is_new) rows.push_back({.module = gradient->module, .of_weights = gradient->of_weights});
      if (gradient->lost.defined()) {
        lost[gradient->lost.device()][found->second].push_back(gradient->lost);
      }
    }
    std::vector<Counts> added;
    for (const auto& [device, lost_of] : lost) {
      Counts& one = added.emplace_back(Counts{.step = steps.size()});
      std::vector<at::Tensor> sums;
      for (const auto& [row, numbers] : lost_of) {
        one.rows.push_back(row);
        sums.push_back(numbers.size() == 1 ? numbers.front() : at::stack(numbers).sum());
      }
      one.lost = at::stack(sums);
    }
    // Nothing fails from here on.
    for (const auto& gradient : seen.gradients()) {
      UnderflowRow& row = rows[row_index.at({gradient->module, gradient->of_weights})];
      (gradient->lost.defined() ? row.elements : row.not_looked_at) += gradient->elements;
      if (gradient->lost.defined()) step.elements += gradient->elements;
    }
    for (Counts& one : added) counts.push_back(std::move(one));
    if (scale.defined()) scales_of.emplace_back(steps.size(), scale);
    steps.push_back(step);
  }

  UnderflowReport read() const {
    UnderflowReport report{.rows = rows, .steps = steps};
    std::vector<at::Tensor> lost, scales;
    for (const Counts& one : counts) lost.push_back(one.lost);
    for (const auto& [step, scale] : scales_of) scales.push_back(scale);
    lost = read_together(lost);
    scales = read_together(scales);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const auto* number = lost[i].const_data_ptr<int64_t>();
      for (const std::size_t row : counts[i].rows) {
        report.rows[row].lost += *number;
        report.steps[counts[i].step].lost += *number++;
      }
    }
    for (std::size_t i = 0; i < scales.size(); ++i) {
      report.steps[scales_of[i].first].scale = *scales[i].const_data_ptr<float>();
    }
    std::erase_if(report.rows, [](const UnderflowRow& row) {
      return row.elements + row.not_looked_at == 0;  // of a step that was not kept
    });
    sort_in_stable_order(report.rows, [](const UnderflowRow& row) { return -row.share(); });
    return report;
  }
};

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

inline UnderflowMeter::UnderflowMeter(detail::NamedParameters parameters,
                                      const UnderflowMeterOptions& options)
    : parameters_(std::move(parameters)),
      every_(options.every),
      history_(std::make_shared<detail::UnderflowHistory>()) {
  TORCH_CHECK_VALUE(every_ >= 1, "UnderflowMeter: every is ", every_, ". It must be 1 or more.");
}

inline UnderflowReport UnderflowMeter::report() const {
  const detail::InternalOps internal;
  UnderflowReport report = history_->read();
  report.steps_in_all = history_->steps_in_all - (history_->in_step ? 1 : 0);
  return report;
}

inline UnderflowMeter::Step::Step(const UnderflowMeter& meter, const GradScaler* scaler)
    : history_(meter.history_) {
  TORCH_CHECK(!history_->in_step,
              "UnderflowMeter::step: the last step has not ended. First destroy the object that "
              "step() returned: it ends the step.");
  if (history_->steps_in_all % meter.every_ == 0) {
    auto recording = std::make_shared<detail::UnderflowRecording>(meter.parameters_);
    if (scaler != nullptr) {
      const detail::InternalOps internal;
      const at::Tensor scale = scaler->scale_tensor();
      scale_ = scale.defined() ? scale.clone() : at::Tensor();
      if (!scale.defined()) known_scale_ = scaler->get_scale();  // the scale is on the host
    }
    observation_.emplace("UnderflowMeter", recording);
    recording_ = std::move(recording);
    exceptions_ = std::uncaught_exceptions();
  }
  ++history_->steps_in_all;
  history_->in_step = true;
}

inline UnderflowMeter::Step::~Step() {
  observation_.reset();
  history_->in_step = false;
  if (!recording_ || std::uncaught_exceptions() > exceptions_) return;
  try {
    const detail::NotRecordedOps internal;
    history_->add({.step = history_->steps_in_all - 1, .scale = known_scale_}, scale_, *recording_);
  } catch (const std::exception& error) {
    TORCH_WARN("UnderflowMeter: the counts of step ", history_->steps_in_all - 1,
               " are lost: ", error.what());
  }
}

inline std::ostream& operator<<(std::ostream& out, const UnderflowReport& report) {
  const auto percent = [](double share) { return detail::fixed_text(100. * share, 2) + " %"; };
  out << report.steps.size() << " of " << report.steps_in_all << " steps metered";
  if (report.steps.empty()) {
    out << '\n';
    return out;
  }
  if (report.rows.empty()) {
    out << ": no 16-bit gradient was made in them (are forward, under a guard, and backward within "
           "the step?)\n";
  } else {
    out << ": " << percent(report.total().share())
        << " of the elements of 16-bit gradients underflow\n";
  }
  std::vector<std::vector<std::string>> lines{
      {"module", "gradients", "elements", "zero", "share", "not looked at"}};
  for (const UnderflowRow& row : report.rows) {
    lines.push_back({row.module, row.of_weights ? "of weights" : "of inputs",
                     std::to_string(row.elements), std::to_string(row.lost), percent(row.share()),
                     row.not_looked_at == 0 ? "-" : std::to_string(row.not_looked_at)});
  }
  if (!report.rows.empty()) detail::print_columns(out, lines, 2);
  constexpr std::size_t most = 20;
  lines = {{"step", "scale", "share"}};
  for (std::size_t i = report.steps.size() - std::min(most, report.steps.size());
       i < report.steps.size(); ++i) {
    const UnderflowStep& step = report.steps[i];
    lines.push_back({std::to_string(step.step), detail::number_text(step.scale),
                     step.elements == 0 ? "-" : percent(step.share())});
  }
  detail::print_columns(out, lines, 0);
  return out;
}

}  // namespace TORCHAMP_NAMESPACE
