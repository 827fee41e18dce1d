// SPDX-License-Identifier: BSD-3-Clause
// What LibTorch has registered and listed, the standard table's own rows, and the rules that
// policies have for it.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torchamp/detail/policy/data.h"
#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace torchamp::detail {

// ---- Ops ----------------------------------------------------------------------------------------

/// Handles of the overloads that `text` names, by their names. Without any: an error naming `call`,
/// the op and the nearest known name; or nothing, if `missing_ok`. Any thread.
std::vector<c10::OperatorHandle> find_ops(std::string_view text, std::string_view call,
                                          bool missing_ok = false);

/// Whether `type` is `Tensor`, `Tensor?`, `Tensor[]`, `Tensor[]?` or `Tensor?[]`.
bool holds_tensors(const c10::Type& type);

/// Whether `argument` is `ScalarType dtype`, or, if `optional`, `ScalarType? dtype`.
bool is_dtype(const c10::Argument& argument, bool optional);

/// Whether the op takes named dimensions, which newer LibTorchs do not have. It can be covered, as
/// LibTorch boxes names as strings, but the table does not cast it.
bool takes_named_dimensions(const c10::FunctionSchema& schema);

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

/// Whether an op updates the argument without saying so: see
/// Note [Ops that write to what they do not declare].
bool is_running_statistic(const c10::Argument& argument);

/// Why the tensor arguments of an op cannot be cast; empty if they can.
std::string_view why_not_castable(const c10::FunctionSchema& schema);

/// Whether there is a kernel for the op under a device's autocast key.
bool has_autocast_kernel(const c10::OperatorHandle& op, at::DeviceType device);

/// Whether LibTorch itself has an autocast kernel for the op and device, overlays left out of
/// account.
bool has_native_kernel(const c10::OperatorHandle& op, at::DeviceType device);

// ---- Lists --------------------------------------------------------------------------------------

// Note [What LibTorch refuses]
// The first errors of a program that gets its first guard are about dtypes: a 16-bit product comes
// to an op that has no kernel for 16 bits, or that wants all its arguments in one dtype. These rows
// of the standard table are for such ops, and change no call that LibTorch takes:
//  - decompositions take their arguments in fp32, where LibTorch has no kernel that sees to it;
//  - ops that want one dtype take the widest;
//  - in place, and with out=, what they read takes the dtype of what they write to;
//  - masked_fill with a value beyond the 16-bit dtype of what it fills (-1e9 in fp16) fills in
//  fp32.

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

inline constexpr OpFamily decomposition("decomposition", decomposition_ops);
inline constexpr OpFamily one_dtype("one_dtype", one_dtype_ops);
inline constexpr OpFamily one_dtype_in_place("one_dtype_in_place", one_dtype_in_place_ops);
inline constexpr OpFamily fill("fill", fill_ops);

/// The ops that take probabilities: see Note [Binary cross entropy].
inline constexpr std::string_view probability_loss_ops[] = {"binary_cross_entropy"};
inline constexpr OpFamily probability_loss("probability_loss", probability_loss_ops);

/// The recurrent layers: see Note [Recurrent layers].
inline constexpr std::string_view recurrent_layer_ops[] = {"lstm", "gru", "rnn_tanh", "rnn_relu"};
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

/// Whether the family has the op, whatever its overload.
bool contains(const OpFamily& family, const c10::OperatorName& op);

/// The row of an op, by its own name or else its overload's, whether it is for a device or not;
/// null if it has none.
const StandardRow* standard_row(const c10::OperatorName& op);

/// The rule on LibTorch's own CUDA lists; native if there is none.
Cast listed_cast(const c10::OperatorName& op);

/// What LibTorch's own autocast kernel for the device, which must be there, does; native if this is
/// not known.
Cast kernel_rule(const c10::OperatorName& op, at::DeviceType device);

// ---- Rules --------------------------------------------------------------------------------------

/// The rule in force for one overload in regions of the dtype that the calling thread has for the
/// device, conditional rules left out.
Cast rule_in_force(const PolicyData& policy, const c10::OperatorHandle& op, at::DeviceType device);

/// What that rule does, where LibTorch's own kernel decides what this does; native if that is not
/// known.
Cast effect_of_rule(const PolicyData& policy, const c10::OperatorHandle& op, at::DeviceType device);

/// An overload, and what Policy::standard() says of it; native if nothing, or if the overload
/// cannot be cast.
struct TabledOp {
  c10::OperatorHandle op;
  StandardRule standard;

  explicit TabledOp(const c10::OperatorHandle& overload);
  TabledOp(c10::OperatorHandle overload, const StandardRule& rule);
};

/// What the overlay of an op has to do under `policy`; native if LibTorch alone does it.
OverlayEntry overlay_entry(const PolicyData& policy, const TabledOp& op, at::DeviceType device);

/// The ops that a policy speaks of, LibTorch's kernels aside. Some come more than once.
std::vector<TabledOp> candidates(const PolicyData& policy);

/// Adds an edit: see Policy::set. Where it throws, `policy` is as it was. `op_rule`: of the rule
/// fp8, whose own by default.
void add_edit(PolicyData& policy, Cast rule, const OpNames& ops, const When& when,
              std::shared_ptr<const OpRule> op_rule = nullptr);

}  // namespace torchamp::detail

#if TORCHAMP_BODIES
#include "torchamp/detail/policy/policy-inl.h"  // IWYU pragma: export
#endif
