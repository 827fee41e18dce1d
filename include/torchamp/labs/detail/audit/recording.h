// SPDX-License-Identifier: BSD-3-Clause
// One run of a step: repeats each op, and weights its errors by the gradients of its results.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/autograd_node.h"
#include "torchamp/detail/core/base/tensors.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/detail/extras/observe/report.h"
#include "torchamp/labs/audit_row.h"
#include "torchamp/labs/detail/audit/call_trial.h"
#include "torchamp/labs/detail/audit/choose.h"
#include "torchamp/ops.h"

namespace TORCHAMP_NAMESPACE::detail {

/// A hook on a leaf, and whether LibTorch made a list for it.
struct HookOfLeaf {
  at::Tensor leaf;
  bool had_list;  // of hooks, before
  unsigned place = 0;

  template <class Hook>
  HookOfLeaf(at::Tensor of, const Hook& hook)
      : leaf(std::move(of)), had_list(list_of(leaf) != nullptr), place(leaf.register_hook(hook)) {}

  /// LibTorch's own removal keeps the list, with an empty place in it.
  void remove() const {
    leaf.remove_hook(place);
    const auto& list = list_of(leaf);
    if (place + 1 == list->size()) list->pop_back();
    if (had_list || !list->empty() || torch::autograd::impl::hooks(leaf).size() != 1) return;
    torch::autograd::impl::clear_hooks(leaf);
    torch::autograd::impl::get_autograd_meta(leaf)->cpp_hooks_list_.reset();
  }

 private:
  static std::shared_ptr<torch::autograd::hooks_list> list_of(const at::Tensor& tensor) {
    return torch::autograd::impl::get_autograd_meta(tensor)->cpp_hooks_list_;
  }
};

// Note [What an audit measures]
// LibTorch reports every call through its dispatcher to an observer, see
// Note [Calls that a cast recording counts]. An audit examines the outermost calls of the forward
// pass that a policy can cast. After each, it repeats
// the call twice, with all arguments in fp32 and in 16 bits as an autocast kernel would cast them,
// on copies outside the program's graph. A hook on the program's own result receives its gradient.
//
// The step runs with all guards off, so arguments and gradients are in fp32, and an op's error does
// not include errors of earlier ops. If backward recomputes activations (checkpoint()), the second
// computation also counts as forward; its results get the gradients.

// Note [Results without a gradient]
// A result that depends on no parameter (positions, masks, a table of cosines) has no gradient in
// the step, but its errors reach the loss. So if a run has such results, one more run is made, in
// which each of them gets a node at the end of the graph. Then their gradients show how the loss
// depends on them. Only AuditRow::error is taken from that run, because its ops have more work in
// backward.

/// The end of the graph for a result that has no graph.
struct BranchEnd final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
    return {};
  }
};

/// Sums of squares of the gradients of one result.
struct GradientSums {
  std::mutex mutex;
  at::Tensor squares;  // of the result's errors
  double error = 0., lost = 0., all = 0.;
};

struct AuditCall final : RecordedCall<AuditCall> {
  std::size_t row = 0;
  std::optional<CallTrial> trial;  // if it is audited, like the next two
  std::vector<at::Tensor> inputs;
  at::Device device = at::kCPU;
  bool records = false;  // whether autograd does
};

/// One run of a step, examined op by op.
class AuditRecording final : public Recording<AuditCall> {
 public:
  /// `extends`: results without a gradient get one: see Note [Results without a gradient].
  AuditRecording(const NamedParameters& parameters, at::DeviceType device, at::ScalarType low,
                 bool extends)
      : Recording(parameters), device_(device), low_(low), extends_(extends) {}
  /// Removes its hooks from leaves, and its ends from results, where these outlive the run.
  ~AuditRecording() override {
    for (; !hooks_of_leaves_.empty(); hooks_of_leaves_.pop_back()) hooks_of_leaves_.back().remove();
    for (const auto& result : ended_) {
      const at::Tensor tensor(result.lock());
      if (!tensor.defined()) continue;
      const bool has_ours = dynamic_cast<const BranchEnd*>(tensor.grad_fn().get()) != nullptr;
      if (has_ours) torch::autograd::impl::set_gradient_edge(tensor, {});
    }
  }

  /// Whether results that LibTorch could differentiate had no gradient.
  bool lacks_gradients() const { return lacks_gradients_; }

  bool ran_backward() const { return ran_backward_; }
  /// Whether it called a collective of c10d.
  bool waits_for_others() const { return waits_for_others_; }
  /// The problem of the recording; empty if none.
  const std::string& problem() const { return problem_; }
  /// The calls with their modules and shapes, in order.
  const std::vector<std::string>& calls() const { return calls_; }
  const std::vector<AuditEdge>& edges() const { return edges_; }

  std::vector<AuditRow> rows() const {
    const std::scoped_lock lock(mutex_);
    std::vector<AuditRow> rows;
    for (const Sums& sums : rows_) {
      AuditRow row = sums.row;
      for (double* const share : {&row.underflow, &row.overflow, &row.vanished}) {
        *share /= static_cast<double>(std::max<int64_t>(row.elements, 1));
      }
      for (const auto& gradient : sums.gradients) {
        const std::scoped_lock gradient_lock(gradient->mutex);
        row.error += gradient->error;
        if (gradient->all == 0.) continue;
        row.gradient_loss = std::max(row.gradient_loss, gradient->lost / gradient->all);
      }
      if (std::isnan(row.error) || !row.problem.empty()) row.error = infinity;
      rows.push_back(std::move(row));
    }
    return rows;
  }

 private:
  static constexpr double infinity = std::numeric_limits<double>::infinity();

  struct Sums {
    AuditRow row;
    std::vector<std::shared_ptr<GradientSums>> gradients;
  };
  static bool only_copies(std::string_view label) {
    return label == "clone" || label == "_unsafe_view" || label.starts_with("contiguous");
  }

  bool is_audited(const RecordedOp& op) {
    const auto [found, is_new] = audited_.try_emplace(&op);
    if (is_new) {
      const c10::FunctionSchema& schema = op.handle.schema();
      found->second = op.computes && !op.is_conversion && !op.is_copy && !op.is_mutable &&
                      !only_copies(op.label) && why_not_castable(schema).empty() &&
                      std::ranges::any_of(schema.returns(), [](const c10::Argument& result) {
                        return holds_tensors(*result.type());
                      });
    }
    return found->second;
  }

  void begin_node(const at::RecordFunction&, AuditCall&) override { ran_backward_ = true; }

  void begin_op(const at::RecordFunction& function, AuditCall& call) override {
    const RecordedOp& op = *call.op;
    if (op.full_name.starts_with("c10d::")) waits_for_others_ = true;
    if (call.is_of_backward() || !problem_.empty() || !is_audited(op)) return;
    for (auto* caller = call.caller; caller != nullptr; caller = caller->caller) {
      if (caller->trial) return;
    }
    try {  // LibTorch would only log an error
      begin_trial(inputs_of(function), call);
    } catch (const std::exception& error) {
      problem_ = error.what();
    }
  }

  void begin_trial(c10::ArrayRef<const c10::IValue> arguments, AuditCall& call) {
    const bool records = call.records = at::GradMode::is_enabled();
    const NotRecordedOps internal;
    std::string shapes;
    for_each_floating_tensor(arguments, [&](const at::Tensor& tensor) {
      if (tensor.device().type() != device_ || !at::autocast::is_eligible(tensor, device_)) return;
      call.inputs.push_back(tensor);
      call.device = tensor.device();
      shapes += c10::str(tensor.sizes());
    });
    if (call.inputs.empty()) return;
    const std::string& label = call.op->label;
    const auto [found, is_new] = index_.try_emplace({call.module, label}, rows_.size());
    if (is_new) rows_.push_back({{.module = call.module, .op = label}, {}});
    call.row = found->second;
    calls_.push_back(call.module + '|' + label + '|' + shapes);
    call.trial.emplace(call.op->handle, arguments, call.device, call.op->promotes, records);
  }

  void end_op(const at::RecordFunction& function, AuditCall& call) override {
    if (!call.trial || function.outputs().empty()) return;  // it threw
    try {
      end_trial(function.outputs(), call);
    } catch (const std::exception& error) {
      problem_ = error.what();
    }
  }

  void end_trial(const std::vector<c10::IValue>& outputs, AuditCall& call) {
    const at::DisableRecordFunctionGuard not_recorded;
    AuditRow& row = rows_[call.row].row;
    ++row.calls;
    // The first call of a kind includes LibTorch's one-time preparations.
    if (row.calls == 1) {
      (void)call.trial->run(Cast::lower_precision, low_);
      (void)call.trial->run(Cast::fp32, low_);
    }
    const CallTrial::Result wide = call.trial->run(Cast::fp32, low_);
    const CallTrial::Result low = call.trial->run(Cast::lower_precision, low_);
    TORCH_CHECK(wide.problem.empty(), "the op '", row.op,
                "' cannot run once more in fp32: ", wide.problem);
    row.fp32_us += wide.seconds * 1e6;
    row.low_us += low.seconds * 1e6;
    if (!low.problem.empty()) row.problem = low.problem;

    const InternalOps internal;
    for (const at::Tensor& input : call.inputs) add_edge(input, call, row);
    std::size_t place = 0;
    for_each_floating_tensor(outputs, [&](const at::Tensor& output) {
      made_by_.set(output, call.row);
      const std::size_t i = place++;
      if (i >= wide.outputs.size()) return;
      const at::Tensor exact = wide.outputs[i].to(at::kFloat);
      const at::Tensor rounded =
          i < low.outputs.size() ? low.outputs[i].to(at::kFloat) : at::zeros_like(exact);
      if (!exact.sizes().equals(rounded.sizes()) || !exact.sizes().equals(output.sizes())) return;
      add_values(row, exact, rounded);
      if (!output.requires_grad() && !end_branch(output, call)) return;
      const at::Tensor difference = exact.sub(rounded);
      // If fp32 is not finite either, 16 bits are not the cause.
      watch(output, call.row, difference.square().masked_fill(exact.isfinite().logical_not(), 0.));
    });
  }

  void add_values(AuditRow& row, const at::Tensor& exact, const at::Tensor& rounded) const {
    const auto count = [](const at::Tensor& mask) {
      return static_cast<double>(mask.sum().item<int64_t>());
    };
    const double tiny = low_ == at::kHalf ? 0x1p-14 : 0x1p-126;
    const at::Tensor magnitude = exact.abs();
    const at::Tensor not_zero = magnitude > 0.;
    row.elements += exact.numel();
    row.underflow += count(not_zero.logical_and(rounded.abs() < tiny));
    row.vanished += count(not_zero.logical_and(rounded == 0.));
    row.overflow += count(exact.isfinite().logical_and(rounded.isfinite().logical_not()));
    if (exact.numel() == 0) return;
    row.largest = std::max(row.largest, magnitude.amax().item<double>());
    const auto smallest =
        magnitude.masked_fill(not_zero.logical_not(), infinity).amin().item<double>();
    if (std::isfinite(smallest) && (row.smallest == 0. || smallest < row.smallest)) {
      row.smallest = smallest;
    }
  }

  /// If the run extends the graph, gives a result without a gradient an end of the graph. Not if
  /// the result is an argument of the op: it may be the program's own tensor.
  bool end_branch(const at::Tensor& output, const AuditCall& call) {
    if (!call.records || output.is_inference() ||
        std::ranges::any_of(call.inputs, [&](const at::Tensor& input) {
          return storage_of(input) == storage_of(output);
        })) {
      return false;
    }
    lacks_gradients_ = true;
    if (!extends_) return false;
    const NodePtr end = make_node<BranchEnd>();
    const std::uint32_t place = end->add_input_metadata(output);
    torch::autograd::impl::set_gradient_edge(output, {end, place});
    ended_.emplace_back(output.getIntrusivePtr());
    return true;
  }

  /// Weights `squares`, the squared errors of `output`, by the gradients of `output`.
  void watch(const at::Tensor& output, std::size_t row, at::Tensor squares) {
    const auto& its_sums = rows_[row].gradients.emplace_back(std::make_shared<GradientSums>());
    its_sums->squares = std::move(squares);
    const auto look = [weak = std::weak_ptr(its_sums), low = low_](const at::Tensor& gradient) {
      const auto sums = weak.lock();  // null once the run has ended
      if (!sums || !gradient.defined() || !gradient.sizes().equals(sums->squares.sizes())) {
        return gradient;
      }
      const NotRecordedOps internal;
      const std::scoped_lock lock(sums->mutex);
      const at::Tensor wide = gradient.to(at::kFloat).to(at::kDouble);
      const at::Tensor square = wide.square();
      const at::Tensor lost = wide.sub(gradient.to(low).to(at::kDouble)).square();
      sums->error += square.mul(sums->squares).masked_fill(square == 0., 0.).sum().item<double>();
      sums->lost += lost.sum().item<double>();
      sums->all += square.sum().item<double>();
      return gradient;
    };
    // An op may return its argument, as dropout() does if it drops nothing; that may be a
    // parameter.
    if (output.is_leaf()) {
      hooks_of_leaves_.emplace_back(output, look);
    } else {
      output.register_hook(look);
    }
  }

  void add_edge(const at::Tensor& input, const AuditCall& call, AuditRow& row) {
    if (input.dim() == 0) return;
    const at::ScalarType other = is_16_bit(input.scalar_type()) ? at::kFloat : low_;
    const at::Tensor values = input.detach();
    const double once = seconds_on(call.device, [&] { (void)values.to(other); });
    const double us = once * 1e6 * (input.requires_grad() ? 2. : 1.);
    row.cast_us += us;
    const std::size_t* made_by = made_by_.find(storage_of(input));
    const std::optional<std::size_t> producer =
        made_by == nullptr ? std::nullopt : std::optional(*made_by);
    const auto [found, is_new] = edge_index_.try_emplace({producer, call.row}, edges_.size());
    if (is_new) edges_.push_back({producer, call.row, 0.});
    edges_[found->second].us += us;
  }

  at::DeviceType device_;
  at::ScalarType low_;
  bool extends_;
  bool lacks_gradients_ = false;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>
      ended_;  // results with an end of ours
  std::map<const RecordedOp*, bool> audited_;
  StorageMap<std::size_t> made_by_;  // rows by their results
  std::map<std::pair<std::string, std::string>, std::size_t> index_;
  std::vector<Sums> rows_;
  std::map<std::pair<std::optional<std::size_t>, std::size_t>, std::size_t> edge_index_;
  std::vector<AuditEdge> edges_;
  std::vector<HookOfLeaf> hooks_of_leaves_;
  std::vector<std::string> calls_;
  bool ran_backward_ = false, waits_for_others_ = false;
  std::string problem_;
};

}  // namespace TORCHAMP_NAMESPACE::detail
