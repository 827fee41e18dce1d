// SPDX-License-Identifier: BSD-3-Clause
// The rows of Policy::standard(), and LibTorch's own lists.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "torchamp/detail/core/base/devices.h"
#include "torchamp/detail/core/policy/schema.h"
#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [What LibTorch refuses]
// A 16-bit product may be an argument of an op that has no kernel for 16 bits, or that requires all
// its arguments in one dtype. These rows of the standard table are for such ops. If LibTorch
// accepts 16 bits for some inputs only (fp16 transforms, 16-bit sparse products without gradients),
// the op also runs in fp32. Otherwise these rows do not change calls that LibTorch accepts:
//  - decompositions, Fourier transforms, special functions, samples, complex numbers made of real
//    ones and ops on sparse matrices take their arguments in fp32, if LibTorch has no kernel that
//    casts them;
//  - ops that require one dtype take the widest;
//  - in place, and with out=, arguments that are read are cast to the dtype of the tensor that is
//    written;
//  - masked_fill runs in fp32 if the tensor's dtype cannot hold the value (-1e9 in fp16), and rrelu
//    in fp16 training on a CPU.

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
    "linalg_cond"sv, "linalg_tensorinv"sv, "linalg_tensorsolve"sv, "linalg_polar"sv,
    "linalg_householder_product"sv, "geqrf"sv, "orgqr"sv, "ormqr"sv, "linalg_vander"sv, "vander"sv};
inline constexpr std::string_view fp32_only_ops[] = {
    "histc"sv, "histogram"sv, "histogramdd"sv, "special_airy_ai"sv, "special_bessel_j0"sv,
    "special_bessel_j1"sv, "special_bessel_y0"sv, "special_bessel_y1"sv,
    "special_chebyshev_polynomial_t"sv, "special_chebyshev_polynomial_u"sv,
    "special_chebyshev_polynomial_v"sv, "special_chebyshev_polynomial_w"sv, "special_erfcx"sv,
    "special_hermite_polynomial_h"sv, "special_hermite_polynomial_he"sv,
    "special_laguerre_polynomial_l"sv, "special_legendre_polynomial_p"sv, "special_log_ndtr"sv,
    "special_modified_bessel_i0"sv, "special_modified_bessel_i1"sv, "special_modified_bessel_k0"sv,
    "special_modified_bessel_k1"sv, "special_ndtri"sv, "special_scaled_modified_bessel_k0"sv,
    "special_scaled_modified_bessel_k1"sv, "special_shifted_chebyshev_polynomial_t"sv,
    "special_shifted_chebyshev_polynomial_u"sv, "special_shifted_chebyshev_polynomial_v"sv,
    "special_shifted_chebyshev_polynomial_w"sv, "special_spherical_bessel_j0"sv, "special_zeta"sv};
/// Ops on sparse matrices. Products of a sparse matrix by `mm` or `matmul` keep LibTorch's kernels,
/// which cast to 16 bits for every layout: a kernel of torchamp for these ops would slow down dense
/// products.
inline constexpr std::string_view sparse_ops[] = {
    "_sparse_mm"sv, "_sparse_addmm"sv, "_sparse_sparse_matmul"sv, "_sparse_softmax"sv,
    "_sparse_log_softmax"sv, "sspaddmm"sv, "smm"sv, "hspmm"sv, "sparse_sampled_addmm"sv};
/// Random numbers, for which a CPU has no 16-bit kernels.
inline constexpr std::string_view sampling_ops[] = {
    "binomial"sv, "_sample_dirichlet"sv, "_dirichlet_grad"sv, "_standard_gamma"sv,
    "_standard_gamma_grad"sv};
/// Ops that LibTorch's list for CPUs runs in fp32, and similar ops; its list for CUDA lacks them. A
/// GPU rejects them in bf16 or in both 16-bit dtypes (its Fourier transforms take fp16 only for
/// powers of two). Their row applies if LibTorch has no autocast kernel for the op, so the
/// behaviour on a CPU stays.
inline constexpr std::string_view fp32_as_on_cpu_ops[] = {
    "fft_fft"sv, "fft_ifft"sv, "fft_fft2"sv, "fft_ifft2"sv, "fft_fftn"sv, "fft_ifftn"sv,
    "fft_rfft"sv, "fft_irfft"sv, "fft_rfft2"sv, "fft_irfft2"sv, "fft_rfftn"sv, "fft_irfftn"sv,
    "fft_hfft"sv, "fft_ihfft"sv, "fft_hfft2"sv, "fft_ihfft2"sv, "fft_hfftn"sv, "fft_ihfftn"sv,
    "stft"sv, "istft"sv, "quantile"sv, "nanquantile"sv, "ctc_loss"sv, "polar"sv, "complex"sv};
/// LibTorch casts them to the widest dtype, but throws if an argument has the 16-bit dtype other
/// than the region's. So torchamp's kernels run them.
inline constexpr std::string_view cpu_promoted_ops[] = {"cat"sv, "stack"sv};
inline constexpr std::string_view promoted_ops[] = {"index_copy"sv};
inline constexpr std::string_view one_dtype_ops[] = {
    "lerp"sv, "scatter"sv, "masked_scatter"sv, "linalg_cross"sv, "heaviside"sv, "isclose"sv,
    "allclose"sv, "cartesian_prod"sv, "meshgrid"sv, "_weight_norm"sv};
inline constexpr std::string_view one_dtype_in_place_ops[] = {
    "lerp_"sv, "index_add_"sv, "index_copy_"sv, "index_put_"sv, "index_reduce_"sv, "scatter_"sv,
    "scatter_add_"sv, "scatter_reduce_"sv, "masked_scatter_"sv, "put_"sv, "addmm_"sv, "addmv_"sv,
    "addbmm_"sv, "baddbmm_"sv, "mm.out"sv, "bmm.out"sv, "mv.out"sv, "matmul.out"sv, "addmm.out"sv,
    "addmv.out"sv, "addbmm.out"sv, "baddbmm.out"sv, "linear.out"sv};
/// Ops by which optimizers and training loops write to weights: see Note [Writes in a region].
inline constexpr std::string_view weight_writing_ops[] = {
    "add_"sv, "sub_"sv, "mul_"sv, "div_"sv, "addcmul_"sv, "addcdiv_"sv, "lerp_"sv, "copy_"sv,
    "neg_"sv, "pow_"sv, "clamp_"sv, "clamp_min_"sv, "clamp_max_"sv, "fill_"sv, "zero_"sv,
    "normal_"sv, "uniform_"sv, "random_"sv, "bernoulli_"sv, "index_add_"sv, "index_copy_"sv,
    "index_fill_"sv, "index_put_"sv, "_index_put_impl_"sv, "index_reduce_"sv, "scatter_"sv,
    "scatter_add_"sv, "scatter_reduce_"sv, "masked_fill_"sv, "masked_scatter_"sv, "put_"sv,
    "addmm_"sv, "addmv_"sv, "addr_"sv, "addbmm_"sv, "baddbmm_"sv, "renorm_"sv,
    "embedding_renorm_"sv, "set_"sv, "_foreach_add_"sv, "_foreach_sub_"sv, "_foreach_mul_"sv,
    "_foreach_div_"sv, "_foreach_addcmul_"sv, "_foreach_addcdiv_"sv, "_foreach_lerp_"sv,
    "_foreach_copy_"sv, "_foreach_neg_"sv, "_foreach_zero_"sv, "_foreach_clamp_min_"sv,
    "_foreach_clamp_max_"sv, "_fused_sgd_"sv, "_fused_adam_"sv, "_fused_adamw_"sv,
    "_fused_adagrad_"sv};
// clang-format on

// clang-format off
/// See Note [Sums in 16 bits]. ("name." is the overload without a name.)
inline constexpr std::string_view index_sum_ops[] = {
    "index_add"sv, "index_put"sv, "_unsafe_index_put"sv, "_unsafe_masked_index_put_accumulate"sv,
    "put"sv, "index_reduce"sv, "scatter_add"sv, "scatter.reduce"sv, "scatter.value_reduce"sv,
    "scatter_reduce"sv, "segment_reduce"sv, "col2im"sv, "addbmm."sv};
inline constexpr std::string_view gather_ops[] = {
    "index"sv, "_unsafe_index"sv, "_unsafe_masked_index"sv, "index_select"sv, "take"sv,
    "embedding"sv, "im2col"sv, "unfold_copy"sv, "avg_pool2d"sv, "_adaptive_avg_pool2d"sv,
    "adaptive_max_pool2d"sv, "max_pool2d_with_indices"sv};
inline constexpr std::string_view gather_of_one_dtype_ops[] = {"embedding_bag"sv};
/// Products that are on no list of LibTorch. The other overload of _flash_attention_forward takes
/// fp8.
inline constexpr std::string_view unlisted_product_ops[] = {
    "_grouped_mm"sv, "_scaled_dot_product_attention_math"sv,
    "_scaled_dot_product_flash_attention_for_cpu"sv, "_scaled_dot_product_efficient_attention"sv,
    "_scaled_dot_product_cudnn_attention"sv, "_scaled_dot_product_fused_attention_overrideable"sv,
    "_efficient_attention_forward"sv, "_cudnn_attention_forward"sv, "_flash_attention_forward."sv};
/// Ops with a `dtype` argument whose backward formulas compute in the dtype of the result. The rule
/// fp32 sets their `dtype` to fp32, which saves the cast of the input. The formulas of all other
/// ops with such an argument (norms) compute in the dtype of the input, so their input is cast.
inline constexpr std::string_view asked_for_dtype_ops[] = {
    "sum"sv, "nansum"sv, "mean"sv, "nanmean"sv, "prod"sv, "cumsum"sv, "cumprod"sv, "softmax"sv,
    "log_softmax"sv, "special_softmax"sv, "special_log_softmax"sv};
// clang-format on

// Note [Sums in 16 bits]
// Ops that add up elements by an index, a window or a segment round each partial sum to the dtype
// of the result: 5,000 ones sum to 256 in bf16 and to 2,048 in fp16.
//  - Ops that sum in the forward pass (index_sum_ops) run in fp32 on all devices: a CPU adds in 16
//    bits, and so do a GPU's atomic additions and its index_put with accumulate. addbmm adds the
//    products of its batch one by one. A call that only writes (index_put without accumulate, the
//    reduction amax) takes the widest dtype of its arguments.
//  - Ops that sum in the backward pass (gather_ops) keep the dtype of the result. On a CPU, if
//    autograd records a call, its 16-bit arguments are cast to fp32 and the result is cast back, so
//    the backward pass sums in fp32. The values are the same: these ops select elements, or average
//    them in fp32 already. A GPU has kernels that sum in fp32 for embeddings and pools, and its
//    memory is too scarce for an fp32 copy of each indexed tensor.
// The lists contain leaf ops: interpolation of the mode area calls _adaptive_avg_pool2d,
// repeat_interleave calls index_select, and pools in one dimension call pools in two. No rule
// applies to views (unfold, as_strided) and in-place sums into a 16-bit tensor.

/// Like the ops above. It returns a view of its argument, unless the argument is cast.
inline constexpr std::string_view complex_view_ops[] = {"view_as_complex"};
/// With an fp16 argument, its backward pass throws if its softmax runs in fp32.
inline constexpr std::string_view safe_softmax_ops[] = {"_safe_softmax"};
inline constexpr std::string_view fill_ops[] = {"masked_fill.Scalar"};
/// In training, without an fp16 kernel on a CPU.
inline constexpr std::string_view noisy_ops[] = {"rrelu"};
/// See Note [Binary cross entropy].
inline constexpr std::string_view probability_loss_ops[] = {"binary_cross_entropy"};
// Note [Recurrent layers]
// On CUDA, lstm, gru, rnn_tanh and rnn_relu call _cudnn_rnn, whose autocast kernel casts to fp16
// even if the region's dtype is bf16. So on devices that follow CUDA's lists, Policy::standard()
// casts the layers' own arguments. cuDNN requires the weights in one piece of memory, but the casts
// of the weights are separate: each call joins them, with a warning, which torchamp drops. On a CPU
// an LSTM calls oneDNN's LSTM; for CPUs without one, see runs_lstm().
inline constexpr std::string_view recurrent_layer_ops[] = {"lstm", "gru", "rnn_tanh", "rnn_relu"};

// Note [Compiled code]
// A package that AOTInductor compiled calls LibTorch's kernels by C shims. It assumes that their
// results have the dtype for which it was compiled: with another dtype it reads past their end. A
// shim calls the kernel of its op without the dispatcher, so no autocast kernel runs; but the
// kernel may call further ops. Among the ops that shims reach, only these have a rule that would
// change a result in fp32 (tests/autocast/compiled_code_test.cpp checks it). Eager code does not
// need their rules, because it calls conv2d and similar ops, which are cast themselves. Traces do,
// because they call _convolution. So if LibTorch has no autocast kernel for these ops, their rules
// hold only for calls by the JIT's interpreter. If a script runs such a package by an op, its calls
// cannot be distinguished from the script's.
inline constexpr std::string_view compiled_code_ops[] = {"convolution", "_convolution"};

inline constexpr OpFamily decomposition("decomposition", decomposition_ops);
inline constexpr OpFamily fp32_only("fp32_only", fp32_only_ops);
inline constexpr OpFamily sparse("sparse", sparse_ops);
inline constexpr OpFamily sampling("sampling", sampling_ops);
inline constexpr OpFamily fp32_as_on_cpu("fp32_as_on_cpu", fp32_as_on_cpu_ops);
inline constexpr OpFamily complex_view("complex_view", complex_view_ops);
inline constexpr OpFamily index_sum("index_sum", index_sum_ops);
inline constexpr OpFamily gather("gather", gather_ops);
inline constexpr OpFamily gather_of_one_dtype("gather_of_one_dtype", gather_of_one_dtype_ops);
inline constexpr OpFamily unlisted_product("unlisted_product", unlisted_product_ops);
inline constexpr OpFamily cpu_promoted("cpu_promoted", cpu_promoted_ops);
inline constexpr OpFamily promoted("promoted", promoted_ops);
inline constexpr OpFamily one_dtype("one_dtype", one_dtype_ops);
inline constexpr OpFamily one_dtype_in_place("one_dtype_in_place", one_dtype_in_place_ops);
inline constexpr OpFamily safe_softmax("safe_softmax", safe_softmax_ops);
inline constexpr OpFamily fill("fill", fill_ops);
inline constexpr OpFamily noisy("noisy", noisy_ops);
inline constexpr OpFamily probability_loss("probability_loss", probability_loss_ops);
inline constexpr OpFamily recurrent_layer("recurrent_layer", recurrent_layer_ops);
inline constexpr OpFamily weight_writing("weight_writing", weight_writing_ops);

/// The calls for which a rule of a table holds.
enum class Where : std::uint8_t {
  always,
  no_native_kernel,  ///< if LibTorch has no autocast kernel for the op
  call_is_refused,   ///< for calls that LibTorch rejects: see Note [What LibTorch refuses]
  call_sums,         ///< for calls that sum; other calls follow the rule promote
  backward_sums,     ///< always, and the backward pass in fp32: see Note [Sums in 16 bits]
};

class OpRule;

/// What an autocast kernel does with a call: a cast, and the calls for which it holds.
/// Cast::native: LibTorch's own autocast kernel decides, or nothing is to be done.
struct Rule {
  Cast cast = Cast::native;
  Where where = Where::always;
  const OpRule* op_rule = nullptr;  // not null for Cast::fp8
};

/// A row of a table. If two rows name an op, the first row decides. A row only for devices that
/// follow CUDA's lists sets `on_cpu` to {}, for LibTorch's own behaviour. A row only for the other
/// devices has the rule {Cast::unchanged}, because for_each_candidate() skips ops whose `rule` is
/// native.
struct Row {
  OpFamily family;
  Rule rule;
  Rule on_cpu = rule;      // and on other devices that do not follow CUDA's lists
  bool may_alias = false;  // for ops that write to an argument, or return a view of one
};

/// The rows of Policy::standard() that come before LibTorch's lists.
inline constexpr Row standard_rows[] = {
    {ops::addition, {Cast::fp32}},
    {ops::reduction, {Cast::fp32}},
    {ops::order_statistic, {Cast::unchanged}},
    {index_sum, {Cast::fp32, Where::call_sums}},
    {gather, {Cast::unchanged}, /*on_cpu=*/{Cast::unchanged, Where::backward_sums}},
    {gather_of_one_dtype, {Cast::promote}, /*on_cpu=*/{Cast::promote, Where::backward_sums}},
    {cpu_promoted, {Cast::unchanged}, /*on_cpu=*/{Cast::promote}},
    {promoted, {Cast::promote}},
    {safe_softmax, {Cast::fp32}},
    {probability_loss, {Cast::fp32}},
    {unlisted_product, {Cast::lower_precision, Where::no_native_kernel}},
    {recurrent_layer, {Cast::lower_precision}, /*on_cpu=*/{}},
    {decomposition, {Cast::fp32, Where::no_native_kernel}},
    {fp32_only, {Cast::fp32, Where::no_native_kernel}},
    {sparse, {Cast::fp32, Where::no_native_kernel}},
    {sampling, {Cast::promote}, /*on_cpu=*/{Cast::fp32}},
    {fp32_as_on_cpu, {Cast::fp32, Where::no_native_kernel}},
    {.family = complex_view, .rule = {Cast::fp32, Where::no_native_kernel}, .may_alias = true},
    {one_dtype, {Cast::promote, Where::no_native_kernel}},
    {.family = one_dtype_in_place, .rule = {Cast::promote}, .may_alias = true},
    {fill, {Cast::fp32, Where::call_is_refused}},
    {noisy, {Cast::unchanged}, /*on_cpu=*/{Cast::fp32, Where::call_is_refused}},
};

// LibTorch's own CUDA lists, from its macros, so that a newer LibTorch's are followed. The comma
// ends a name: "mm," is the overload without a name, "pow, Scalar," the overload Scalar.
// NOLINTBEGIN(bugprone-suspicious-missing-comma)
#define TORCHAMP_ENTRY(...) #__VA_ARGS__ ",",
#define TORCHAMP_ENTRY_WITH_DTYPE(function, name, ...) name ",",
inline constexpr std::string_view cuda_lower_precision_list[] = {
    AT_FORALL_LOWER_PRECISION_FP(TORCHAMP_ENTRY)};
inline constexpr std::string_view cuda_fp32_list[] = {
    AT_FORALL_FP32(TORCHAMP_ENTRY) AT_FORALL_FP32_SET_OPT_DTYPE(TORCHAMP_ENTRY)
        AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(TORCHAMP_ENTRY_WITH_DTYPE)};
inline constexpr std::string_view cuda_promote_list[] = {AT_FORALL_PROMOTE(TORCHAMP_ENTRY)};
#undef TORCHAMP_ENTRY
#undef TORCHAMP_ENTRY_WITH_DTYPE
// NOLINTEND(bugprone-suspicious-missing-comma)

/// The rows of LibTorch's CUDA lists. On the list `promote`, LibTorch's kernels throw for the
/// 16-bit dtype other than the region's, so torchamp's kernels run these ops.
inline constexpr Row cuda_rows[] = {
    {{"cuda_lower_precision", cuda_lower_precision_list},
     {Cast::lower_precision, Where::no_native_kernel}},
    {{"cuda_fp32", cuda_fp32_list}, {Cast::fp32, Where::no_native_kernel}},
    {{"cuda_promote", cuda_promote_list},
     {Cast::promote},
     /*on_cpu=*/{Cast::promote, Where::no_native_kernel}},
};

/// The op in a row's name: "mm" of "mm.out".
constexpr std::string_view op_in(std::string_view name) {
  return name.substr(0, name.find_first_of(",."));
}

/// The overload in a row's name: "out" of "mm.out", "" of "mm."; unset for "mm", which means all
/// overloads.
constexpr std::optional<std::string_view> overload_in(std::string_view name) {
  name.remove_prefix(op_in(name).size());
  if (name.empty()) return std::nullopt;
  name.remove_prefix(std::min(name.find_first_not_of(",. "), name.size()));
  return name.substr(0, name.find(','));
}

// clang-format off
/// The ops for which LibTorch has an autocast kernel on a CPU, by the kernel's effect. LibTorch's
/// headers do not have these lists; tests/internals/lists_test.cpp calls every kernel and compares.
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

/// The row of Policy::standard() for an op, from the standard rows or else from LibTorch's lists;
/// null if there is none.
const Row* standard_row(const c10::OperatorName& op);

/// Whether the rule fp32 sets the `dtype` argument of the op, if it has one, and casts nothing.
inline bool is_asked_for_dtype(const c10::FunctionSchema& schema) {
  return is_among(asked_for_dtype_ops, base_of(schema.operator_name()));
}

/// The cast on LibTorch's own CUDA lists; native if there is none.
inline Cast listed_cast(const c10::OperatorName& op) {
  const std::string_view base = base_of(op);
  for (const Row& row : cuda_rows) {
    for (const std::string_view name : row.family) {
      if (op_in(name) == base && overload_in(name) == op.overload_name) return row.rule.cast;
    }
  }
  return Cast::native;
}

/// Whether LibTorch's own autocast kernel for the device casts to 16 bits.
inline bool kernel_lowers(const c10::OperatorName& op, at::DeviceType device) {
  if (!facts_of(device).follows_cuda_lists) return is_among(cpu_lower_precision_ops, base_of(op));
  return is_among(cuda_lower_precision_ops, base_of(op)) ||
         listed_cast(op) == Cast::lower_precision;
}

/// The effect of LibTorch's autocast kernel; native if it is not known.
inline Cast effect_of_native(const c10::OperatorName& op, at::DeviceType device) {
  if (kernel_lowers(op, device)) return Cast::lower_precision;
  if (facts_of(device).follows_cuda_lists) return listed_cast(op);
  if (is_among(cpu_fp32_ops, base_of(op))) return Cast::fp32;
  return is_among(cpu_promote_ops, base_of(op)) ? Cast::promote : Cast::native;
}

}  // namespace TORCHAMP_NAMESPACE::detail
