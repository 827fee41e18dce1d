// SPDX-License-Identifier: BSD-3-Clause
// CastRecorder: counts calls by dtype, and detects the casts that autocast made for them.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <sstream>
#include <string_view>
#include <tuple>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/rules.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/detail/extras/observe/recording.h"
#include "torchamp/detail/extras/policy_text/print.h"
#include "torchamp/detail/extras/weights/cast.h"
#include "torchamp/labs/cast_recorder.h"
#include "torchamp/labs/detail/observe/rule_of_call.h"
#include "torchamp/ops.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Calls that a cast recording counts]
// LibTorch reports every call through its dispatcher to a recording, with arguments and results;
// calls made by an op are nested in it. A redispatch is not a call: a kernel of autograd, or of
// torchamp, is part of the op. LibTorch's own autocast kernels call their op again, nested
// in the first call. So the program's calls are the calls outside of other ops; each counts once,
// by the dtype of its result.
//
// A cast is a call of aten::_to_copy that changes the dtype. It is autocast's if
//  - it comes before any other call that its op makes,
//  - it takes one of the op's own arguments,
//  - the device's autocast key has been excluded since the op was called, and
//  - autograd has not been: kernels that convert for themselves (type promotion on a CPU, say) lie
//    below it. (In inference mode it is excluded all along; but there only additions convert again
//    after autocast did, and those get one cast, see Note [One cast for an addition].)
// This includes the conversion with which softmax begins if autocast sets its dtype to fp32. A cast
// that no op makes is the program's own, or, in backward, autograd's.

struct DtypeChange {
  at::ScalarType from, to;
  DtypeChange reversed() const { return {to, from}; }
  bool operator==(const DtypeChange&) const = default;

  /// The bytes that a cast of so many elements reads and writes.
  int64_t bytes(int64_t elements) const {
    return elements * static_cast<int64_t>(c10::elementSize(from) + c10::elementSize(to));
  }
};

struct CastCall final : RecordedCall<CastCall> {
  /// A floating-point argument of the op.
  struct Argument {
    const c10::TensorImpl* tensor;
    const c10::StorageImpl* storage;  // null if it has none
    at::ScalarType dtype;
    at::DeviceType device;
    bool has_dims;
  };
  c10::DispatchKeySet excluded;
  std::vector<Argument> arguments;
  bool calls_others = false;  // whether it has called an op that is no conversion
  bool comes_first = false;   // whether its caller had called no such op
  int casts_made = 0;         // for this op and not for the ops that it calls

  // The outermost op around it.
  CastCall* root = nullptr;
  struct CastMade {
    DtypeChange change;
    int64_t bytes;
    bool undone;
  };
  std::vector<CastMade> casts;
  int64_t cache_hits = 0;
  int64_t cache_misses = 0;
  std::optional<Cast> choice;      // see Note [Reports of a choice]
  std::optional<std::string> fp8;  // under the rule fp8: empty, or why it did not run in fp8
  std::optional<DtypeChange> origin;

  /// Whether only some arguments cause a promotion to fp32, since others are 16-bit. Tensors with
  /// dimensions take precedence over those without, except where autocast itself promotes.
  bool has_16_bit_and_fp32(bool all_decide) const {
    const bool dims = std::ranges::any_of(arguments, &Argument::has_dims);
    bool narrow = false;
    bool wide = false;
    for (const Argument& argument : arguments) {
      if (dims && !argument.has_dims && !all_decide) continue;
      narrow = narrow || is_16_bit(argument.dtype);
      wide = wide || argument.dtype == at::kFloat;
    }
    return narrow && wide;
  }
};

/// The counts of a CastRecorder.
class CastRecording final : public Recording<CastCall> {
 public:
  explicit CastRecording(const NamedParameters& parameters) : Recording(parameters) {}

  std::vector<CastReport::Row> rows() const {
    const std::scoped_lock lock(mutex_);
    return rows_;
  }

 private:
  void take_report(std::string_view report, CastCall& call) override {
    if (report.starts_with(choice_scope)) {
      const CastRow* const row = row_named(report.substr(choice_scope.size()));
      if (row != nullptr) call.choice = row->cast;
    } else if (report.starts_with(fp8_scope)) {
      call.fp8 = report.substr(fp8_scope.size());
    } else if (call.root != nullptr) {
      count_weight_cast(std::string(report.substr(weight_cast_scope.size())), *call.root);
    }
  }

  /// Takes the report of WeightCastNote::tell().
  static void count_weight_cast(const std::string& report, CastCall& root) {
    ++(report == "kept" ? root.cache_hits : root.cache_misses);
    std::istringstream words(report);
    std::string made;
    int from = 0;
    int to = 0;
    int64_t numel = 0;
    if (!(words >> made >> from >> to >> numel) || made != "made") return;
    const DtypeChange change{static_cast<at::ScalarType>(from), static_cast<at::ScalarType>(to)};
    root.casts.push_back({change, change.bytes(numel), false});
  }

  void begin_op(const at::RecordFunction& call, CastCall& begun) override {
    begun.excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
    for_each_floating_tensor(inputs_of(call), [&](const at::Tensor& tensor) {
      begun.arguments.push_back({tensor.unsafeGetTensorImpl(), storage_of(tensor),
                                 tensor.scalar_type(), tensor.device().type(), tensor.dim() > 0});
    });
    if (begun.caller != nullptr) {
      begun.root = begun.caller->root;
      begun.comes_first = !begun.caller->calls_others;
      if (!begun.op->is_conversion) begun.caller->calls_others = true;
      return;
    }
    begun.root = &begun;
    for (const CastCall::Argument& argument : begun.arguments) {
      const DtypeChange* const origin = origins_.find(argument.storage);
      if (origin != nullptr && origin->to == at::kFloat && is_16_bit(origin->from)) {
        begun.origin = *origin;
      }
    }
  }

  void end_op(const at::RecordFunction& call, CastCall& begun) override {
    if (call.outputs().empty()) return;
    if (begun.op->full_name == "aten::_to_copy") end_cast(call.outputs(), begun);
    if (begun.root == &begun) end_root(call.outputs(), begun);
  }

  /// Whether autocast made the conversion `cast` for `op`, which called it: see
  /// Note [Calls that a cast recording counts].
  static bool is_autocasts(const CastCall& cast, const CastCall& op) {
    const CastCall::Argument& from = cast.arguments.front();
    if (!cast.comes_first || !at::autocast::is_autocast_available(from.device)) return false;
    const c10::DispatchKey key = autocast_key(from.device);
    if (op.excluded.has(key) || !cast.excluded.has(key)) return false;
    constexpr auto autograd = c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    if ((cast.excluded & autograd) != (op.excluded & autograd)) return false;
    if (op.op->promotes && op.casts_made > 0) return false;
    return std::ranges::find(op.arguments, from.tensor, &CastCall::Argument::tensor) !=
           op.arguments.end();
  }

  void end_cast(const std::vector<c10::IValue>& outputs, const CastCall& cast) {
    const at::Tensor& result = outputs.front().toTensor();
    if (cast.arguments.empty() || !result.is_floating_point()) return;
    const CastCall::Argument& source = cast.arguments.front();
    const DtypeChange change{source.dtype, result.scalar_type()};
    if (change.from == change.to) return;
    const CastCall* conversion = &cast;
    while (conversion->caller != nullptr && conversion->caller->op->is_conversion) {
      conversion = conversion->caller;
    }
    if (CastCall* const op = conversion->caller) {
      if (!is_autocasts(*conversion, *op)) return;
      ++op->casts_made;
    }
    const DtypeChange* const origin = origins_.find(source.storage);
    cast.root->casts.push_back(
        {change, change.bytes(result.numel()), origin != nullptr && *origin == change.reversed()});
    origins_.set(result, change);
  }

  CastReport::Row& row_of(const CastCall& call) {
    const bool is_cast_in_reverse =
        call.op->is_conversion && call.node.starts_with("ToCopyBackward");
    const std::string& label = is_cast_in_reverse ? call.node : call.op->label;
    const auto [found, is_new] =
        index_.try_emplace({call.in_backward, call.module, label}, rows_.size());
    if (is_new) {
      CastReport::Row& row = rows_.emplace_back();
      std::tie(row.backward, row.module, row.op) = found->first;
    }
    return rows_[found->second];
  }

  void end_root(const std::vector<c10::IValue>& outputs, const CastCall& call) {
    const RecordedOp& op = *call.op;
    std::vector<at::Tensor> results;
    for_each_floating_tensor(outputs, [&](const at::Tensor& tensor) { results.push_back(tensor); });
    if (op.is_copy) {
      for (const at::Tensor& result : results) origins_.erase(storage_of(result));
      return;
    }
    if (op.is_conversion ? call.casts.empty() : !op.computes) return;
    const bool gives_tensors = std::ranges::any_of(
        outputs, [](const c10::IValue& value) { return value.isTensor() || value.isTensorList(); });
    if (call.arguments.empty() || !gives_tensors) return;

    at::ScalarType dtype = call.arguments.front().dtype;
    if (!results.empty()) {
      dtype = results.front().scalar_type();
    } else if (!call.casts.empty()) {
      dtype = call.casts.back().change.to;
    } else {
      for (const auto& argument : call.arguments) dtype = c10::promoteTypes(dtype, argument.dtype);
    }
    CastReport::Row& row = row_of(call);
    ++row.calls[dtype];
    if (call.fp8) ++(call.fp8->empty() ? row.fp8 : row.not_fp8[*call.fp8]);
    for (const auto& cast : call.casts) {
      ++row.casts;
      row.cast_bytes += cast.bytes;
      row.undone += cast.undone ? 1 : 0;
    }
    row.cache_hits += call.cache_hits;
    row.cache_misses += call.cache_misses;
    if (op.is_conversion || dtype != at::kFloat) return;

    bool mixed = call.has_16_bit_and_fp32(/*all_decide=*/true);
    bool takes_what_it_gets = false;
    if (mixed || call.origin) {
      const Cast rule = rule_of_call(op.handle, call.arguments.front().device, call.choice);
      takes_what_it_gets = detail::row_of(rule)->follows_input;
      mixed = mixed && (rule == Cast::promote || call.has_16_bit_and_fp32(/*all_decide=*/false));
    }
    if (mixed && takes_what_it_gets && !op.is_mutable) ++row.fp32_by_input;
    const auto widening = std::ranges::find_if(call.casts, [](const auto& cast) {
      return is_16_bit(cast.change.from) && cast.change.to == at::kFloat;
    });
    if (widening != call.casts.end()) {
      for (const at::Tensor& result : results) origins_.set(result, widening->change);
    } else if (call.casts.empty() && call.origin && takes_what_it_gets) {
      for (const at::Tensor& result : results) origins_.set(result, *call.origin);
    }
  }

  StorageMap<DtypeChange> origins_;  // of tensors that were cast, or computed from cast tensors
  std::vector<CastReport::Row> rows_;
  std::map<std::tuple<bool, std::string, std::string>, std::size_t> index_;  // in rows_
};

}  // namespace TORCHAMP_NAMESPACE::detail

namespace TORCHAMP_NAMESPACE {

inline CastRecorder::CastRecorder(const detail::NamedParameters& parameters)
    : recording_(std::make_shared<detail::CastRecording>(parameters)),
      observation_("CastRecorder", recording_) {}

inline CastReport CastRecorder::report() const {
  return CastReport(recording_->rows());
}

}  // namespace TORCHAMP_NAMESPACE
