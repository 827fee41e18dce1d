// SPDX-License-Identifier: BSD-3-Clause
// What a policy holds, the policy in force on a thread, and LibTorch's ops, lists and rules.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/frontend/edit_distance.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/base/text.h"
#include "torchamp/detail/core/runtime/runtime.h"
#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace torchamp::detail {

class PolicyData;

/// "aten::add.Tensor", as c10::toString() writes it through a stream, ten times as slowly.
inline std::string full_name(const c10::OperatorName& op) {
  return op.overload_name.empty() ? op.name : op.name + '.' + op.overload_name;
}

/// Warns the first time for `is_known`, or always where LibTorch was asked to always warn.
inline void warn_once(std::atomic<bool>& is_known, Pieces pieces) {
  if (c10::WarningUtils::get_warnAlways() || !is_known.exchange(true)) warn(pieces);
}

/// The number of single-character edits between two names; for long ones, between their beginnings.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  const std::string from(a.substr(0, longest_shown)), to(b.substr(0, longest_shown));
  return torch::jit::ComputeEditDistance(from.c_str(), to.c_str(), /*maxEditDistance=*/0);
}

// ---- Rules that an extra carries out ------------------------------------------------------------

/// What becomes of the calls in a region whose policy has an OpRule. For several threads.
class OpRuleUsage {
 public:
  virtual ~OpRuleUsage() = default;
  /// An op with an overlay is called that the rule does not reach.
  virtual void passed_by(const c10::OperatorName& op) = 0;
  /// At the region's end.
  virtual void warn_if_unused() const = 0;
};

/// How torchamp/fp8.h carries out the rule fp8 of a policy, options included. Immutable.
class OpRule {
 public:
  virtual ~OpRule() = default;

  /// Before a 16-bit region of a device whose policy has the rule. Error, of `call`: the region
  /// cannot follow a rule that it has to.
  virtual void prepare(const char* call, const PolicyData& policy, at::DeviceType device,
                       at::ScalarType dtype) const = 0;
  /// Runs a call: takes the arguments off the stack and leaves the result. False if it cannot: the
  /// stack is as it was. Autocast is off. `usage` may be null.
  virtual bool run(const c10::OperatorHandle& op, at::DeviceType device, torch::jit::Stack& stack,
                   OpRuleUsage* usage) const = 0;
  /// Why an overload cannot follow the rule; empty if it can.
  virtual std::string why_not_op(std::string_view full_name) const = 0;
  /// As in a policy's text: "fp8(recipe=rowwise strict)". Rules with one text are the same.
  virtual std::string text() const = 0;
  /// For a new region; `outer`: of the region around it, or null.
  virtual std::shared_ptr<OpRuleUsage> make_usage(
      const std::shared_ptr<OpRuleUsage>& outer) const = 0;
};

/// The rule of Cast::fp8 without options, which torchamp/fp8.h registers; or null.
using MakeOpRule = std::shared_ptr<const OpRule> (*)();
inline MakeOpRule fp8_rule_maker = nullptr;

// ---- A policy's contents ------------------------------------------------------------------------

enum class BaseTable : std::uint8_t { standard, torch };

/// One call of an edit, as the user wrote it.
struct Edit {
  Cast cast;
  std::vector<std::string> names;
  std::string family;  // instead of `names`, if not empty
  When when;
  std::shared_ptr<const OpRule> op_rule = nullptr;  // of the rule fp8, and not null then
};

// Rules that only tables have.
/// See Note [Recurrent layers].
inline constexpr Cast fp32_where_lacking = static_cast<Cast>(0x81);
/// fp32 where the op's value does not fit into what it fills: see Note [What LibTorch refuses].
inline constexpr Cast fp32_where_it_must = static_cast<Cast>(0x82);

/// What edits made of one overload.
struct OverloadRules {
  bool has_cast = false;  // whether an edit has set `cast`, which always holds
  Cast cast = Cast::native;
  std::vector<std::size_t> conditional = {};  // edits that hold sometimes, the later on top
  std::size_t edit = 0;                       // that set `cast`
};

/// By full_name().
using RuleMap = std::map<std::string, OverloadRules, std::less<>>;

// Note [A choice is told once]
// A predicate is called once for each call of its op, and only the overlay knows what it said. For
// whoever records (a CastRecorder, LibTorch's profiler) the overlay opens and closes an empty user
// scope of this name and the rule's within the op.
inline constexpr std::string_view choice_scope = "torchamp rule: ";
/// Under the rule fp8; then why a call did not run in fp8, nothing if it did.
inline constexpr std::string_view fp8_scope = "torchamp fp8: ";

inline void announce(std::string_view kind, std::string_view what) {
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    at::RecordFunction scope(std::move(*callbacks));
    scope.before(std::string(kind).append(what));
  }
}

/// What an overlay does to a call.
struct OverlayRule {
  Cast cast = Cast::native;
  const OpRule* op_rule = nullptr;  // of Cast::fp8, and not null then
  bool is_chosen = false;           // for this call, by a condition
};

/// A policy's rules for one overlay.
struct OverlayEntry : OverlayRule {
  /// Indices of PolicyData::edits that hold only sometimes, tried first. Null if there are none and
  /// the rule itself holds always. Lives as long as PolicyData::rules.
  const std::vector<std::size_t>* conditional = nullptr;
};

/// By an overlay's index; later overlays are none that the policy asked for.
using OverlayTable = std::vector<OverlayEntry>;

/// The contents of a Policy: a base table and edits. Immutable once shared.
class PolicyData {
 public:
  explicit PolicyData(BaseTable base_table) : base(base_table) {}
  /// A copy to edit; it starts without compiled tables.
  PolicyData(const PolicyData& other) : base(other.base), edits(other.edits), rules(other.rules) {}
  PolicyData& operator=(const PolicyData&) = delete;

  /// What the edits made of one overload; null if they do not reach it.
  const OverloadRules* edited(const c10::OperatorHandle& op) const {
    if (rules.empty()) return nullptr;
    const auto found = rules.find(full_name(op.operator_name()));
    return found == rules.end() ? nullptr : &found->second;
  }

  /// An edit's OpRule, which later ones may have replaced; null if there is none.
  const OpRule* op_rule() const {
    for (const Edit& edit : edits) {
      if (edit.op_rule != nullptr) return edit.op_rule.get();
    }
    return nullptr;
  }

  /// Makes the policy ready for use on a device. Any thread.
  void compile_once(at::DeviceType device) const {
    const auto& ready = compiled_[device_index(device, "Policy")].ready;
    if (!ready.load(std::memory_order_acquire)) compile(device);
  }

  /// The rule of overlay `overlay` on a device, whose table has been made, for one call.
  OverlayRule rule(std::size_t device_index, std::size_t overlay, at::DeviceType device,
                   const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> stack) const {
    const OverlayTable& table = compiled_[device_index].table;
    if (overlay >= table.size()) return {};
    const OverlayEntry& entry = table[overlay];
    if (entry.conditional == nullptr) return entry;
    return choose(entry, device, OpCall(op.schema(), stack));
  }

  BaseTable base;
  std::vector<Edit> edits;
  RuleMap rules;  // what the edits made of each overload that they reached

 private:
  /// Installs the overlays that the policy needs on a device. Defined in overlay/kernel.h.
  void compile(at::DeviceType device) const;
  /// The rule of an entry with conditions.
  OverlayRule choose(const OverlayEntry& entry, at::DeviceType device, const OpCall& call) const;

  struct Compiled {
    std::atomic<bool> ready = false;
    OverlayTable table;
  };
  mutable std::mutex mutex_;
  mutable std::array<Compiled, device_count> compiled_;
};

/// The contents of Policy::standard() and Policy::torch(), which all copies share.
inline const std::shared_ptr<const PolicyData>& unedited(BaseTable base) {
  // Never destroyed: static objects' destructors may use guards.
  static const auto& tables = *new std::array<std::shared_ptr<const PolicyData>, 2>{
      std::make_shared<PolicyData>(BaseTable::standard),
      std::make_shared<PolicyData>(BaseTable::torch)};
  return tables[static_cast<std::size_t>(base)];
}

// ---- What is in force on a thread ---------------------------------------------------------------

/// What guards do whatever they are given: because of the environment variable TORCHAMP_POLICY, or
/// on a thread for the time of an extra's trial.
struct GuardOverride {
  virtual ~GuardOverride() = default;

  /// The dtype of a guard that is made now, and asks for `asked` and to be `enabled` or not.
  virtual at::ScalarType dtype_of_guard(at::DeviceType /*on*/, at::ScalarType asked,
                                        bool /*enabled*/) const {
    return asked;
  }

  bool off = false;                          ///< guards run disabled
  std::shared_ptr<const PolicyData> policy;  ///< in place of any other; or null
  bool module_policies = false;              ///< whether those of modules hold all the same
};

/// What a guard puts into the thread's slot. Immutable: LibTorch shares it with other threads.
struct ThreadPolicy final : c10::DebugInfoBase, std::enable_shared_from_this<ThreadPolicy> {
  [[gnu::noinline]] ~ThreadPolicy() override = default;
  std::shared_ptr<const PolicyData> inherited;  // for a nested guard that names no policy
  /// By device, with its table compiled; null outside guards and where they are disabled.
  std::array<std::shared_ptr<const PolicyData>, device_count> in_force;
  bool is_in_guard = false;
  WeightKeep keep;                              // of what is made of weights
  const WeightCasts* casts = nullptr;           // of weights; null: LibTorch's
  std::shared_ptr<OpRuleUsage> op_rule_usage;   // of the innermost region with an OpRule
  std::shared_ptr<const GuardOverride> guards;  // of the guards inside; null but for a trial
  /// In which a scope put it in force: see Note [Sums of gradients].
  int backward_pass = no_backward_pass;
  std::shared_ptr<const ThreadPolicy> outside;  // of which it is a copy for the backward pass
  static constexpr int no_backward_pass = -1;
};

/// A copy to change, for a scope inside of the policy's, if there is one.
inline std::shared_ptr<ThreadPolicy> copy_of(const ThreadPolicy* policy) {
  auto copy = policy == nullptr ? std::make_shared<ThreadPolicy>()
                                : std::make_shared<ThreadPolicy>(*policy);
  copy->backward_pass = ThreadPolicy::no_backward_pass;
  copy->outside = nullptr;
  return copy;
}

/// The calling thread's policy, or null outside every guard.
inline const ThreadPolicy* thread_policy() {
  return static_cast<const ThreadPolicy*>(c10::ThreadLocalDebugInfo::get(policy_slot()));
}

// Note [Sums of gradients]
// If a tensor was used twice, autograd adds its two gradients by `add`, and the next node accepts
// only the gradients' dtype. A backward pass that began in a region runs in its state, so the
// policy sees these additions, which cannot be told from a node's own. But a forward pass within
// backward (a recomputation, a custom function) has its own scope: so scopes that begin in a
// backward pass record its number, and additions in the pass outside these are left to LibTorch, as
// are sums of AccumulateGrad and of hooks.

/// The number of the backward pass that the calling thread works for, or no_backward_pass.
inline int this_backward_pass() {
  return torch::autograd::get_current_graph_task_id();
}

/// Whether autograd adds up gradients by this op.
inline bool adds_gradients(const c10::OperatorName& op) {
  return op.name == "aten::add" && op.overload_name == "Tensor";
}

/// Whether what is added now is left to LibTorch: see Note [Sums of gradients].
inline bool leaves_sums_alone(const ThreadPolicy& policy) {
  const int pass = this_backward_pass();
  return pass != ThreadPolicy::no_backward_pass && pass != policy.backward_pass;
}

// ---- Ops ----------------------------------------------------------------------------------------

/// Handles of the overloads that `text` names, by their names. Without any: an error naming `call`,
/// the op and the nearest known name; or nothing, if `missing_ok`. Any thread.
std::vector<c10::OperatorHandle> find_ops(std::string_view text, std::string_view call,
                                          bool missing_ok = false);

/// Whether `type` is `Tensor`, `Tensor?`, `Tensor[]`, `Tensor[]?` or `Tensor?[]`.
inline bool holds_tensors(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return true;
    case c10::TypeKind::OptionalType:
      return holds_tensors(*type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType: {
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      return element.kind() != c10::TypeKind::ListType && holds_tensors(element);
    }
    default:
      return false;
  }
}

/// Whether `argument` is `ScalarType dtype`, or, if `optional`, `ScalarType? dtype`.
inline bool is_dtype(const c10::Argument& argument, bool optional) {
  if (argument.name() != "dtype"sv) return false;
  const c10::Type* type = argument.real_type().get();
  const bool is_optional = type->kind() == c10::TypeKind::OptionalType;
  if (is_optional) type = type->castRaw<c10::OptionalType>()->getElementType().get();
  return is_optional == optional && type->kind() == c10::TypeKind::ScalarTypeType;
}

/// Whether the op takes named dimensions, which newer LibTorchs do not have. Tables do not cast it.
inline bool takes_named_dimensions(const c10::FunctionSchema& schema) {
  const std::string_view overload = schema.overload_name();
  return overload.find("imname"sv) != overload.npos || overload.find("names"sv) != overload.npos;
}

/// Calls `function` with each tensor that an argument or result of an op holds (`Tensor`,
/// `Tensor[]`, `Tensor?[]`), undefined ones included.
template <class Function>
void for_each_tensor_of(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) function(element.toTensor());
    }
  }
}

// Note [Ops that write to what they do not declare]
// A schema marks what its op writes to (`Tensor(a!)`), but not every op keeps to that. Known, and
// looked for in every schema of the running LibTorch by tests/policy/undeclared_writes_test.cpp:
//  - Batch and instance norms update their running statistics: see CastArguments.
//  - Ops whose name ends in an underscore (c10d's collectives), ops that return nothing, and those
//    with `dst` (of a copy) or `qaccum` (oneDNN's fused convolutions). None of these can be cast.

/// Whether an op updates the argument without saying so.
inline bool is_running_statistic(const c10::Argument& argument) {
  return argument.name().starts_with("running_") || argument.name().starts_with("moving_");
}

/// Why the tensor arguments of an op cannot be cast; empty if they can.
std::string_view why_not_castable(const c10::FunctionSchema& schema);

/// Whether there is a kernel for the op under a device's autocast key.
inline bool has_autocast_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  const c10::DispatchKey key = autocast_key(device);
  return op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key);
}

/// The same, overlays left out of account.
inline bool has_native_kernel(const c10::OperatorHandle& op, at::DeviceType device) {
  if (!has_autocast_kernel(op, device)) return false;
  SharedRuntime& runtime = shared_runtime();
  const auto& overlays = runtime.overlays[device_index(device, "has_native_kernel")];
  const std::scoped_lock lock(runtime.mutex);
  const auto overlay = overlays.find(op.operator_name());
  return overlay == overlays.end() || overlay->second.has_native;
}

// ---- Lists --------------------------------------------------------------------------------------

// Note [What LibTorch refuses]
// A 16-bit product may come to an op that has no kernel for 16 bits, or that wants all its
// arguments in one dtype. These rows of the standard table are for such ops, and change no call
// that LibTorch takes:
//  - decompositions take their arguments in fp32, where LibTorch has no kernel that sees to it;
//  - ops that want one dtype take the widest;
//  - in place, and with out=, what they read takes the dtype of what they write to;
//  - masked_fill with a value beyond the dtype of what it fills (-1e9 in fp16) fills in fp32.

// clang-format off
/// Ops without 16-bit kernels on any device.
inline constexpr std::string_view decomposition_ops[] = {
    "det"sv, "logdet"sv, "slogdet"sv, "linalg_det"sv, "linalg_slogdet"sv, "inverse"sv,
    "linalg_inv"sv, "linalg_inv_ex"sv, "pinverse"sv, "linalg_pinv"sv, "matrix_exp"sv,
    "linalg_matrix_exp"sv, "linalg_solve"sv, "linalg_solve_ex"sv, "linalg_solve_triangular"sv,
    "triangular_solve"sv, "linalg_lu"sv, "linalg_lu_factor"sv, "linalg_lu_factor_ex"sv,
    "linalg_lu_solve"sv, "lu_solve"sv, "_lu_with_info"sv, "linalg_ldl_factor"sv,
    "linalg_ldl_factor_ex"sv, "linalg_ldl_solve"sv, "cholesky"sv, "cholesky_inverse"sv,
    "cholesky_solve"sv, "linalg_cholesky"sv, "linalg_cholesky_ex"sv, "linalg_eig"sv,
    "linalg_eigh"sv, "linalg_eigvals"sv, "linalg_eigvalsh"sv, "linalg_qr"sv, "qr"sv,
    "linalg_svd"sv, "svd"sv, "linalg_svdvals"sv, "linalg_lstsq"sv, "linalg_matrix_rank"sv,
    "linalg_cond"sv, "linalg_tensorinv"sv, "linalg_tensorsolve"sv,
    "linalg_householder_product"sv, "geqrf"sv, "orgqr"sv, "ormqr"sv};
inline constexpr std::string_view one_dtype_ops[] = {
    "lerp"sv, "index_add"sv, "index_copy"sv, "index_reduce"sv, "scatter"sv, "scatter_reduce"sv,
    "masked_scatter"sv, "put"sv, "linalg_cross"sv, "heaviside"sv, "isclose"sv, "allclose"sv};
inline constexpr std::string_view one_dtype_in_place_ops[] = {
    "lerp_"sv, "index_add_"sv, "index_copy_"sv, "index_put_"sv, "index_reduce_"sv, "scatter_"sv,
    "scatter_add_"sv, "scatter_reduce_"sv, "masked_scatter_"sv, "put_"sv, "addmm_"sv, "addmv_"sv,
    "addbmm_"sv, "baddbmm_"sv, "mm.out"sv, "bmm.out"sv, "mv.out"sv, "matmul.out"sv, "addmm.out"sv,
    "addmv.out"sv, "addbmm.out"sv, "baddbmm.out"sv, "linear.out"sv};
// clang-format on

inline constexpr std::string_view fill_ops[] = {"masked_fill.Scalar"};
/// See Note [Binary cross entropy].
inline constexpr std::string_view probability_loss_ops[] = {"binary_cross_entropy"};
/// See Note [Recurrent layers].
inline constexpr std::string_view recurrent_layer_ops[] = {"lstm", "gru", "rnn_tanh", "rnn_relu"};

inline constexpr OpFamily decomposition("decomposition", decomposition_ops);
inline constexpr OpFamily one_dtype("one_dtype", one_dtype_ops);
inline constexpr OpFamily one_dtype_in_place("one_dtype_in_place", one_dtype_in_place_ops);
inline constexpr OpFamily fill("fill", fill_ops);
inline constexpr OpFamily probability_loss("probability_loss", probability_loss_ops);
inline constexpr OpFamily recurrent_layer("recurrent_layer", recurrent_layer_ops);

/// What Policy::standard() says of an op.
struct StandardRule {
  Cast cast = Cast::native;
  Cast cast_on_cpu = cast;     // and on other devices that do not follow CUDA's lists
  bool unless_native = false;  // where LibTorch has no kernel of its own
  bool writes = false;         // for ops that write to an argument
};

/// Its rows that LibTorch's lists do not have; they come before those.
struct StandardRow {
  OpFamily family;
  StandardRule rule;
};
inline constexpr StandardRow standard_rows[] = {
    {ops::addition, {Cast::fp32}},
    {ops::reduction, {Cast::fp32}},
    {ops::order_statistic, {Cast::unchanged}},
    {probability_loss, {Cast::fp32}},
    {recurrent_layer, {Cast::lower_precision, /*cast_on_cpu=*/fp32_where_lacking}},
    {decomposition, {.cast = Cast::fp32, .unless_native = true}},
    {one_dtype, {.cast = Cast::promote, .unless_native = true}},
    {one_dtype_in_place, {.cast = Cast::promote, .writes = true}},
    {fill, {fp32_where_it_must}},
};

/// A rule on LibTorch's lists, of the op in an entry of theirs: "pow, Tensor_Scalar".
struct ListedRule {
  const char* entry;
  Cast cast;
  std::uint8_t op_size = 0;

  constexpr ListedRule(const char* of_entry, Cast rule) : entry(of_entry), cast(rule) {
    while (entry[op_size] != '\0' && entry[op_size] != ',' && entry[op_size] != '.') ++op_size;
  }
  /// "pow".
  constexpr std::string_view op() const { return {entry, op_size}; }
  /// "Tensor_Scalar".
  constexpr std::string_view overload() const {
    const char* rest = entry + op_size;
    while (*rest == ',' || *rest == '.' || *rest == ' ') ++rest;
    return rest;
  }
};

/// LibTorch's own CUDA lists, from its macros, so that a newer LibTorch's are followed.
inline constexpr ListedRule libtorch_cuda_lists[] = {
#define TORCHAMP_LOWER(...) {#__VA_ARGS__, Cast::lower_precision},
#define TORCHAMP_FP32(...) {#__VA_ARGS__, Cast::fp32},
#define TORCHAMP_PROMOTE(...) {#__VA_ARGS__, Cast::promote},
#define TORCHAMP_APPEND_DTYPE(function, name, ...) {name, Cast::fp32},
    AT_FORALL_LOWER_PRECISION_FP(TORCHAMP_LOWER) AT_FORALL_FP32(TORCHAMP_FP32)
        AT_FORALL_FP32_SET_OPT_DTYPE(TORCHAMP_FP32)
            AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(TORCHAMP_APPEND_DTYPE)
                AT_FORALL_PROMOTE(TORCHAMP_PROMOTE)
#undef TORCHAMP_LOWER
#undef TORCHAMP_FP32
#undef TORCHAMP_PROMOTE
#undef TORCHAMP_APPEND_DTYPE
};

// clang-format off
/// The ops that have an autocast kernel of their own on a CPU, by what it does. LibTorch's headers
/// do not have these lists; tests/policy/lists_test.cpp calls every kernel and compares.
inline constexpr std::string_view cpu_lower_precision_ops[] = {
    "_addmm_activation"sv, "_convolution"sv, "_native_multi_head_attention"sv, "addbmm"sv,
    "addmm"sv, "baddbmm"sv, "bmm"sv, "conv1d"sv, "conv2d"sv, "conv3d"sv, "conv_tbc"sv,
    "conv_transpose1d"sv, "conv_transpose2d"sv, "conv_transpose3d"sv, "linalg_vecdot"sv, "linear"sv,
    "matmul"sv, "mkldnn_rnn_layer"sv, "mm"sv, "prelu"sv, "scaled_dot_product_attention"sv};
inline constexpr std::string_view cpu_fp32_ops[] = {
    "_grid_sampler_2d_cpu_fallback"sv, "_lu_with_info"sv, "adaptive_avg_pool3d"sv,
    "adaptive_max_pool3d"sv, "avg_pool3d"sv, "binary_cross_entropy"sv,
    "binary_cross_entropy_with_logits"sv, "cdist"sv, "cholesky"sv, "cholesky_inverse"sv,
    "cholesky_solve"sv, "cosine_embedding_loss"sv, "cross_entropy_loss"sv, "ctc_loss"sv,
    "fake_quantize_per_tensor_affine"sv, "fft_fft"sv, "fft_fft2"sv, "fft_fftn"sv, "fft_hfft"sv,
    "fft_ifft"sv, "fft_ifft2"sv, "fft_ifftn"sv, "fft_ihfft"sv, "fft_irfft"sv, "fft_irfft2"sv,
    "fft_irfftn"sv, "fft_rfft"sv, "fft_rfft2"sv, "fft_rfftn"sv, "fractional_max_pool2d"sv,
    "fractional_max_pool3d"sv, "geqrf"sv, "grid_sampler"sv, "grid_sampler_2d"sv,
    "grid_sampler_3d"sv, "hinge_embedding_loss"sv, "huber_loss"sv, "inverse"sv, "kl_div"sv,
    "l1_loss"sv, "linalg_cholesky"sv, "linalg_cholesky_ex"sv, "linalg_cond"sv, "linalg_eig"sv,
    "linalg_eigh"sv, "linalg_eigvals"sv, "linalg_eigvalsh"sv, "linalg_householder_product"sv,
    "linalg_inv"sv, "linalg_inv_ex"sv, "linalg_lstsq"sv, "linalg_matrix_rank"sv,
    "linalg_matrix_sqrth"sv, "linalg_qr"sv, "linalg_solve"sv, "linalg_svd"sv, "linalg_svdvals"sv,
    "linalg_tensorinv"sv, "linalg_tensorsolve"sv, "lu_solve"sv, "margin_ranking_loss"sv,
    "max_pool3d"sv, "max_unpool2d"sv, "max_unpool3d"sv, "mse_loss"sv, "multi_margin_loss"sv,
    "multilabel_margin_loss"sv, "multilabel_margin_loss_forward"sv, "nanquantile"sv, "nll_loss"sv,
    "nll_loss2d"sv, "orgqr"sv, "ormqr"sv, "pinverse"sv, "poisson_nll_loss"sv, "polar"sv, "prod"sv,
    "qr"sv, "quantile"sv, "reflection_pad1d"sv, "reflection_pad2d"sv, "replication_pad1d"sv,
    "replication_pad2d"sv, "replication_pad3d"sv, "smooth_l1_loss"sv, "soft_margin_loss"sv,
    "stft"sv, "svd"sv, "trace"sv, "triangular_solve"sv, "triplet_margin_loss"sv,
    "view_as_complex"sv};
inline constexpr std::string_view cpu_promote_ops[] = {
    "cat"sv, "stack"sv, "index_copy"sv};
/// Ops with a kernel on CUDA that the lists in the headers lack.
inline constexpr std::string_view cuda_lower_precision_ops[] = {
    "cudnn_convolution"sv, "cudnn_convolution_transpose"sv};
// clang-format on

/// "add" of "aten::add"; empty for ops that are not LibTorch's.
inline std::string_view base_of(const c10::OperatorName& op) {
  const std::string_view name = op.name;
  return name.starts_with("aten::") ? name.substr(6) : std::string_view();
}

/// (std::find compares four names at a time, in four times the code.)
inline bool is_among(const auto& names, std::string_view name) {
  for (const std::string_view one : names) {
    if (one == name) return true;
  }
  return false;
}

/// Whether the family has the op, whatever its overload.
inline bool contains(const OpFamily& family, const c10::OperatorName& op) {
  return is_among(family, base_of(op));
}

/// The row of an op, by its own name or its overload's; null if it has none.
const StandardRow* standard_row(const c10::OperatorName& op);

/// The rule on LibTorch's own CUDA lists; native if there is none.
inline Cast listed_cast(const c10::OperatorName& op) {
  const std::string_view base = base_of(op);
  for (const ListedRule& rule : libtorch_cuda_lists) {
    if (rule.op() == base && rule.overload() == op.overload_name) return rule.cast;
  }
  return Cast::native;
}

/// Whether LibTorch's own autocast kernel for the device casts to 16 bits.
inline bool kernel_lowers(const c10::OperatorName& op, at::DeviceType device) {
  if (!facts_of(device).follows_cuda_lists) return is_among(cpu_lower_precision_ops, base_of(op));
  return is_among(cuda_lower_precision_ops, base_of(op)) ||
         listed_cast(op) == Cast::lower_precision;
}

/// What that kernel does; native if this is not known.
Cast kernel_rule(const c10::OperatorName& op, at::DeviceType device);

// ---- Rules --------------------------------------------------------------------------------------

/// The rule in force for one overload, in regions of the calling thread's dtype for the device,
/// conditional rules left out.
Cast rule_in_force(const PolicyData& policy, const c10::OperatorHandle& op, at::DeviceType device);

/// The same, but what LibTorch's own kernel does instead of native, if that is known.
inline Cast effect_of_rule(const PolicyData& policy, const c10::OperatorHandle& op,
                           at::DeviceType device) {
  const Cast cast = rule_in_force(policy, op, device);
  return cast == Cast::native ? kernel_rule(op.operator_name(), device) : cast;
}

/// An overload, and what Policy::standard() says of it; native if nothing, or if the overload
/// cannot be cast. `row`: its row of the standard table, if known.
struct TabledOp {
  c10::OperatorHandle op;
  StandardRule standard;

  explicit TabledOp(c10::OperatorHandle overload, const StandardRow* row = nullptr);
};

/// What the overlay of an op has to do under `policy`; native if LibTorch alone does it.
OverlayEntry overlay_entry(const PolicyData& policy, const TabledOp& op, at::DeviceType device);

/// Calls `function` with the ops that a policy speaks of, LibTorch's kernels aside; with some more
/// than once.
void for_each_candidate(const PolicyData& policy,
                        c10::function_ref<void(const TabledOp&)> function);

/// Adds an edit: see Policy::set. Where it throws, `policy` is as it was. `op_rule`: of the rule
/// fp8, whose own by default.
void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
              std::shared_ptr<const OpRule> op_rule = nullptr);

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/core/policy/policy-inl.h"  // IWYU pragma: export
#endif
