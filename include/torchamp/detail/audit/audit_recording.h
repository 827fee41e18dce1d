// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "torchamp/audit_row.h"
#include "torchamp/detail/audit/op_trial.h"
#include "torchamp/detail/observe/named_parameters.h"
#include "torchamp/detail/observe/observer.h"
#include "torchamp/detail/observe/parameter_owners.h"
#include "torchamp/detail/observe/recorded_op.h"
#include "torchamp/detail/observe/storage_map.h"
#include "torchamp/detail/policy/castable.h"
#include "torchamp/detail/tensors.h"

namespace torchamp::detail {

// Note [What an audit measures]
// LibTorch tells an observer of every call through its dispatcher, see Note [What a cast recording
// sees]. An audit looks at the outermost calls of the forward pass that a policy can cast: these
// are what a policy's rule reaches. After each, it makes the call twice more, with all arguments in
// fp32 and in 16 bits as an overlay would cast them, on copies that share no graph with the
// program's. A hook on the program's own result is told the gradient that arrives there.
//
// The step runs with all guards off, so that arguments and gradients are those of fp32, and an op's
// error is its own and not what came in. Of activations that backward computes again (checkpoint())
// the second computation is a forward pass as well, and the one whose results get gradients.

/// Which row's result a row takes, and what a cast of it costs a step. No producer: the program's
/// own tensors and those of ops that no policy casts.
struct AuditEdge {
  std::optional<std::size_t> producer;
  std::size_t consumer;
  double us = 0.;

  bool operator==(const AuditEdge&) const = default;
};

/// Sums of squares, of what arrives at one result.
struct GradientSums {
  std::mutex mutex;
  at::Tensor squares;  // of the result's errors; undefined once the run has ended
  double error = 0., lost = 0., all = 0.;
};

/// One run of a step, looked at op by op.
class AuditRecording final : public Observer {
 public:
  AuditRecording(const NamedParameters& parameters, at::DeviceType device, at::ScalarType low)
      : device_(device), low_(low), owners_(owners_of(parameters)) {}
  AuditRecording(const AuditRecording&) = delete;
  AuditRecording& operator=(const AuditRecording&) = delete;
  /// Takes its hooks off what outlives the run.
  ~AuditRecording() override {
    for (const auto& [leaf, hook] : hooks_of_leaves_) leaf.remove_hook(hook);
    for (const Sums& sums : rows_) {
      for (const auto& gradient : sums.gradients) {
        const std::scoped_lock lock(gradient->mutex);
        gradient->squares = at::Tensor();
      }
    }
  }

  std::unique_ptr<Observer::Call> begin(const at::RecordFunction& call) override {
    const std::scoped_lock lock(mutex_);
    Thread& thread = threads_[std::this_thread::get_id()];
    auto frame = std::make_unique<Frame>();
    if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      ran_backward_ = true;
      frame->kind = Frame::Kind::backward;
      thread.backward.push_back(at::GradMode::is_enabled());
      return frame;
    }
    if (call.scope() == at::RecordScope::USER_SCOPE) {
      frame->kind = Frame::Kind::module;
      thread.modules.emplace_back(call.name());
      return frame;
    }
    if (std::string_view(call.name()).starts_with("autograd::engine::")) {
      frame->kind = Frame::Kind::backward;
      thread.backward.push_back(at::GradMode::is_enabled());
      return frame;
    }
    if (std::string_view(call.name()).starts_with("c10d::")) waits_for_others_ = true;
    if (thread.is_in_backward() || thread.audited > 0) return nullptr;
    const auto name = call.operator_name();
    if (!name || !problem_.empty()) return nullptr;
    try {
      return begin_op(call, *name, thread, std::move(frame));
    } catch (const std::exception& error) {  // LibTorch would only log it
      problem_ = error.what();
      return nullptr;
    }
  }

  void end(const at::RecordFunction& call, Observer::Call& base) override {
    auto& frame = static_cast<Frame&>(base);
    const std::scoped_lock lock(mutex_);
    Thread& thread = threads_[std::this_thread::get_id()];
    switch (frame.kind) {
      case Frame::Kind::backward:
        thread.backward.pop_back();
        return;
      case Frame::Kind::module:
        thread.modules.pop_back();
        return;
      case Frame::Kind::op:
        --thread.audited;
        if (call.outputs().empty()) return;  // it threw
        try {
          end_op(call, frame);
        } catch (const std::exception& error) {
          problem_ = error.what();
        }
    }
  }

  bool ran_backward() const { return ran_backward_; }
  /// Whether it called a collective of c10d.
  bool waits_for_others() const { return waits_for_others_; }
  /// What went wrong in looking; empty if nothing.
  const std::string& problem() const { return problem_; }
  /// The calls with their modules and shapes, in order.
  const std::vector<std::string>& calls() const { return calls_; }
  const std::vector<AuditEdge>& edges() const { return edges_; }

  std::vector<AuditRow> rows() const {
    const std::scoped_lock lock(mutex_);
    std::vector<AuditRow> rows;
    for (const Sums& sums : rows_) {
      AuditRow row = sums.row;
      const auto elements = static_cast<double>(std::max<int64_t>(row.elements, 1));
      row.underflow /= elements;
      row.overflow /= elements;
      row.vanished /= elements;
      for (const auto& gradient : sums.gradients) {
        const std::scoped_lock gradient_lock(gradient->mutex);
        row.error += gradient->error;
        if (gradient->all == 0.) continue;
        row.gradient_loss = std::max(row.gradient_loss, gradient->lost / gradient->all);
      }
      if (std::isnan(row.error)) row.error = std::numeric_limits<double>::infinity();
      if (!row.problem.empty()) row.error = std::numeric_limits<double>::infinity();
      rows.push_back(std::move(row));
    }
    return rows;
  }

 private:
  struct Frame final : Observer::Call {
    enum class Kind { op, module, backward };
    Kind kind = Kind::op;
    std::size_t row = 0;
    std::optional<CallTrial> trial;
    std::vector<at::Tensor> inputs;
    at::Device device = at::kCPU;
  };
  struct Thread {
    std::vector<bool> backward;  // its nodes: whether gradients were recorded at their begin
    int audited = 0;
    std::vector<std::string> modules;

    /// Not where a node computes activations again, with gradients: that is a forward pass.
    bool is_in_backward() const {
      return !backward.empty() && (backward.back() || !at::GradMode::is_enabled());
    }
  };
  struct Sums {
    AuditRow row;
    std::vector<std::shared_ptr<GradientSums>> gradients;
  };
  /// What there is to know of an op; nothing if no policy casts it.
  struct Op {
    RecordedOp recorded;
    bool audited;
  };

  static bool only_copies(std::string_view label) {
    return label == "clone" || label == "_unsafe_view" || label.starts_with("contiguous");
  }
  static bool gives_tensors(const c10::FunctionSchema& schema) {
    for (const auto& result : schema.returns()) {
      if (holds_tensors(*result.type())) return true;
    }
    return false;
  }

  const Op* op_of(const c10::OperatorName& name) {
    const std::string full = c10::toString(name);
    const auto [found, is_new] = ops_.try_emplace(full);
    if (is_new) {
      if (auto recorded = RecordedOp::of(name)) {
        const bool audited = recorded->computes && !recorded->is_conversion && !recorded->is_copy &&
                             !recorded->is_mutable && !only_copies(recorded->label) &&
                             gives_tensors(recorded->handle.schema()) &&
                             why_not_castable(recorded->handle.schema()).empty();
        found->second = Op{std::move(*recorded), audited};
      }
    }
    return found->second && found->second->audited ? &*found->second : nullptr;
  }

  std::unique_ptr<Observer::Call> begin_op(const at::RecordFunction& call,
                                           const c10::OperatorName& name, Thread& thread,
                                           std::unique_ptr<Frame> frame) {
    const Op* const op = op_of(name);
    if (op == nullptr) return nullptr;
    const bool records = at::GradMode::is_enabled();
    const at::DisableRecordFunctionGuard not_recorded;
    const InternalOps internal;
    const auto arguments = inputs_of(call);
    std::string module = thread.modules.empty() ? "" : thread.modules.back();
    const std::string* owner = nullptr;
    std::string shapes;
    for_each_floating_tensor(arguments, [&](const at::Tensor& tensor) {
      if (tensor.device().type() != device_ || !at::autocast::is_eligible(tensor, device_)) return;
      if (owner == nullptr) owner = owners_.find(storage_of(tensor));
      frame->inputs.push_back(tensor);
      frame->device = tensor.device();
      shapes += c10::str(tensor.sizes());
    });
    if (frame->inputs.empty()) return nullptr;
    if (owner != nullptr) module = *owner;
    const std::string& label = op->recorded.label;
    const auto [found, is_new] = index_.try_emplace({module, label}, rows_.size());
    if (is_new) rows_.push_back({{.module = module, .op = label}, {}});
    frame->row = found->second;
    calls_.push_back(module + '|' + label + '|' + shapes);
    frame->trial.emplace(op->recorded.handle, arguments, frame->device, op->recorded.promotes,
                         records);
    ++thread.audited;
    return frame;
  }

  void end_op(const at::RecordFunction& call, Frame& frame) {
    const at::DisableRecordFunctionGuard not_recorded;
    AuditRow& row = rows_[frame.row].row;
    ++row.calls;
    // The first call of a kind pays for what LibTorch prepares once.
    if (row.calls == 1) {
      (void)frame.trial->run(Cast::lower_precision, low_);
      (void)frame.trial->run(Cast::fp32, low_);
    }
    const CallTrial::Result wide = frame.trial->run(Cast::fp32, low_);
    const CallTrial::Result low = frame.trial->run(Cast::lower_precision, low_);
    TORCH_CHECK(wide.problem.empty(), "the op '", row.op,
                "' cannot run once more in fp32: ", wide.problem);
    row.fp32_us += wide.seconds * 1e6;
    row.low_us += low.seconds * 1e6;
    if (!low.problem.empty()) row.problem = low.problem;

    const InternalOps internal;
    for (const at::Tensor& input : frame.inputs) add_edge(input, frame, row);
    std::size_t place = 0;
    for_each_floating_tensor(call.outputs(), [&](const at::Tensor& output) {
      made_by_.set(output, frame.row);
      const std::size_t i = place++;
      if (i >= wide.outputs.size()) return;
      const at::Tensor exact = wide.outputs[i].to(at::kFloat);
      const at::Tensor rounded =
          i < low.outputs.size() ? low.outputs[i].to(at::kFloat) : at::zeros_like(exact);
      if (!exact.sizes().equals(rounded.sizes()) || !exact.sizes().equals(output.sizes())) return;
      add_values(row, exact, rounded);
      if (!output.requires_grad()) return;
      const at::Tensor difference = exact.sub(rounded);
      // Where fp32 is not finite either, 16 bits are not to blame.
      watch(output, frame.row, difference.square().masked_fill(exact.isfinite().logical_not(), 0.));
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
    const double infinity = std::numeric_limits<double>::infinity();
    const auto smallest =
        magnitude.masked_fill(not_zero.logical_not(), infinity).amin().item<double>();
    if (std::isfinite(smallest) && (row.smallest == 0. || smallest < row.smallest)) {
      row.smallest = smallest;
    }
  }

  /// Weighs `squares`, of the errors of `output`, by the gradients that arrive there.
  void watch(const at::Tensor& output, std::size_t row, at::Tensor squares) {
    auto sums = std::make_shared<GradientSums>();
    sums->squares = std::move(squares);
    rows_[row].gradients.push_back(sums);
    const unsigned hook = output.register_hook([sums, low = low_](const at::Tensor& gradient) {
      const at::DisableRecordFunctionGuard not_recorded;
      const InternalOps internal;
      const std::scoped_lock lock(sums->mutex);
      const at::Tensor& of_result = sums->squares;
      if (!of_result.defined() || !gradient.defined() ||
          !gradient.sizes().equals(of_result.sizes())) {
        return gradient;
      }
      const at::Tensor wide = gradient.to(at::kFloat).to(at::kDouble);
      const at::Tensor square = wide.square();
      const at::Tensor lost = wide.sub(gradient.to(low).to(at::kDouble)).square();
      sums->error += square.mul(of_result).masked_fill(square == 0., 0.).sum().item<double>();
      sums->lost += lost.sum().item<double>();
      sums->all += square.sum().item<double>();
      return gradient;
    });
    // An op may give back its argument, as dropout() does that drops nothing, and that may be a
    // parameter.
    if (output.is_leaf()) hooks_of_leaves_.emplace_back(output, hook);
  }

  void add_edge(const at::Tensor& input, const Frame& frame, AuditRow& row) {
    if (input.dim() == 0) return;
    const at::ScalarType other = is_16_bit(input.scalar_type()) ? at::kFloat : low_;
    const at::Tensor values = input.detach();
    const double once = seconds_on(frame.device, [&] { (void)values.to(other); });
    const double us = once * 1e6 * (input.requires_grad() ? 2. : 1.);
    row.cast_us += us;
    const std::size_t* made_by = made_by_.find(storage_of(input));
    const std::optional<std::size_t> producer =
        made_by == nullptr ? std::nullopt : std::optional(*made_by);
    const auto [found, is_new] = edge_index_.try_emplace({producer, frame.row}, edges_.size());
    if (is_new) edges_.push_back({producer, frame.row, 0.});
    edges_[found->second].us += us;
  }

  at::DeviceType device_;
  at::ScalarType low_;
  mutable std::mutex mutex_;
  std::map<std::thread::id, Thread> threads_;
  std::map<std::string, std::optional<Op>> ops_;
  StorageMap<std::string> owners_;   // modules by their parameters
  StorageMap<std::size_t> made_by_;  // rows by their results
  std::map<std::pair<std::string, std::string>, std::size_t> index_;
  std::vector<Sums> rows_;
  std::map<std::pair<std::optional<std::size_t>, std::size_t>, std::size_t> edge_index_;
  std::vector<AuditEdge> edges_;
  std::vector<std::pair<at::Tensor, unsigned>> hooks_of_leaves_;
  std::vector<std::string> calls_;
  bool ran_backward_ = false, waits_for_others_ = false;
  std::string problem_;
};

}  // namespace torchamp::detail
