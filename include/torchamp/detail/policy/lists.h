// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/operator_name.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torchamp/detail/devices.h"
#include "torchamp/detail/policy/rule.h"
#include "torchamp/detail/policy/special_ops.h"
#include "torchamp/detail/text.h"
#include "torchamp/ops.h"
#include "torchamp/version.h"

namespace torchamp::detail {

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

/// The rules of one overload: one that always holds, if there is one, and on top of it those of
/// edits that hold only sometimes (their indices, in the order in which they were given).
struct OverloadRules {
  bool has_cast = false;  // whether an edit has set `cast`
  Cast cast = Cast::native;
  std::vector<std::size_t> conditional = {};
  std::size_t edit = 0;  // that set `cast`
};

/// By the overload's name: "aten::pow.Tensor_Scalar".
using RuleMap = std::map<std::string, OverloadRules, std::less<>>;

/// The ops that take probabilities: see Note [Binary cross entropy].
inline constexpr std::string_view probability_loss_ops[] = {"binary_cross_entropy"};
inline constexpr OpFamily probability_loss("probability_loss", probability_loss_ops);

/// fp32 in regions of a dtype that the device has no recurrent layers in, native in others: see
/// Note [Recurrent layers]. Only the standard table has it.
inline constexpr Cast fp32_where_lacking = static_cast<Cast>(0x81);

/// The rows of Policy::standard() that LibTorch's lists do not have; they come before those.
struct StandardRow {
  OpFamily family;
  Cast cast;
  Cast cast_on_cpu = cast;     // and on other devices that do not follow CUDA's lists
  bool unless_native = false;  // where LibTorch has no kernel of its own
  bool writes = false;         // for ops that write to an argument

  Cast cast_for(at::DeviceType device) const {
    return facts_of(device).lists == OpLists::cuda ? cast : cast_on_cpu;
  }
};
inline constexpr StandardRow standard_rows[] = {
    {ops::addition, Cast::fp32},
    {ops::reduction, Cast::fp32},
    {ops::order_statistic, Cast::unchanged},
    {probability_loss, Cast::fp32},
    {recurrent_layer, Cast::lower_precision, /*cast_on_cpu=*/fp32_where_lacking},
    {.family = decomposition, .cast = Cast::fp32, .unless_native = true},
    {.family = one_dtype, .cast = Cast::promote, .unless_native = true},
    {.family = one_dtype_in_place, .cast = Cast::promote, .writes = true},
    {fill, Cast::fp32},  // see fp32_where_it_must
};

/// What is listed of an op or overload: its row of standard_rows, or its rule on LibTorch's lists.
struct ListedRule {
  std::string op;
  Cast cast;
  const StandardRow* row = nullptr;
};

/// Listed rules in the order in which they came; found by name.
class RuleList {
 public:
  /// Null if there is none.
  const ListedRule* find(std::string_view op) const {
    const std::size_t index = slots_[slot_of(op)];
    return index == 0 ? nullptr : &rules_[index - 1];
  }

  /// In place of one of that name, if there is one.
  void set(ListedRule rule) {
    std::uint16_t& index = slots_[slot_of(rule.op)];
    if (index != 0) {
      rules_[index - 1] = std::move(rule);
      return;
    }
    TORCH_INTERNAL_ASSERT(rules_.size() + 1 < std::size(slots_));
    rules_.push_back(std::move(rule));
    index = static_cast<std::uint16_t>(rules_.size());
  }

  std::size_t size() const { return rules_.size(); }
  auto begin() const { return rules_.begin(); }
  auto end() const { return rules_.end(); }

 private:
  /// Where the name is, or belongs.
  std::size_t slot_of(std::string_view op) const {
    std::size_t slot = quick_hash(op) % std::size(slots_);
    while (slots_[slot] != 0 && rules_[slots_[slot] - 1].op != op) {
      slot = (slot + 1) % std::size(slots_);
    }
    return slot;
  }

  std::vector<ListedRule> rules_;
  std::uint16_t slots_[1024] = {};  // from 1; LibTorch's lists have some 120 names
};

/// No name may stand in two rows, where the last would hold: the test
/// Ops.EveryNameOfTheStandardTableHasOneRow looks.
inline RuleList list_standard_rows() {
  RuleList list;
  for (const StandardRow& row : standard_rows) {
    for (const std::string_view name : row.family) list.set({std::string(name), row.cast, &row});
  }
  return list;
}

/// The row of an op, by its overload's name or else its own, whether it is for a device or not;
/// null if it has none.
inline const StandardRow* standard_row(const c10::OperatorName& op) {
  static const auto& names = *new RuleList(list_standard_rows());  // never destroyed
  const std::string_view base = op.name;
  if (!base.starts_with("aten::"sv)) return nullptr;
  const ListedRule* listed = names.find(base.substr(6));
  if (!op.overload_name.empty() && listed == nullptr) {
    listed = names.find(full_name(op).substr(6));
  }
  return listed == nullptr ? nullptr : listed->row;
}

/// Whether the family has the op, whatever its overload.
inline bool contains(const OpFamily& family, const c10::OperatorName& op) {
  std::string_view base = op.name;
  if (!base.starts_with("aten::")) return false;
  base.remove_prefix(6);
  for (const std::string_view name : family) {
    if (name == base) return true;
  }
  return false;
}

/// Whether the op computes in the widest dtype of its arguments by itself: see
/// Note [One cast for an addition].
inline bool promotes_its_arguments(const c10::OperatorName& op) {
  return contains(ops::addition, op);
}

/// Whether cuDNN takes the op's weights in one piece of memory: see Note [Recurrent layers].
inline bool is_recurrent_layer(const c10::OperatorName& op) {
  return contains(recurrent_layer, op);
}

/// What is made of products: what a region with an fp8 rule may call instead of products in fp8.
inline constexpr OpFamily products[] = {ops::matmul, ops::linear, ops::conv, ops::recurrent};

inline bool is_product(const c10::OperatorName& op) {
  for (const OpFamily& family : products) {
    if (contains(family, op)) return true;
  }
  return false;
}

// "pow, Tensor_Scalar" -> "aten::pow.Tensor_Scalar"
inline std::string listed_name(std::string_view entry) {
  const auto comma = entry.find(',');
  std::string name = "aten::" + std::string(entry.substr(0, comma));
  if (comma != std::string_view::npos) {
    name += '.' + std::string(entry.substr(entry.find_first_not_of(' ', comma + 1)));
  }
  return name;
}

/// The rules on LibTorch's own CUDA lists, by full overload name: "aten::pow.Tensor_Scalar". Read
/// from the macros of ATen/autocast_mode.h, so that a newer LibTorch's lists are followed.
inline RuleList read_libtorch_cuda_lists() {
  RuleList lists;
  const auto add = [&](const char* entry, Cast cast) { lists.set({listed_name(entry), cast}); };
#define TORCHAMP_LOWER(...) add(#__VA_ARGS__, Cast::lower_precision);
#define TORCHAMP_FP32(...) add(#__VA_ARGS__, Cast::fp32);
#define TORCHAMP_PROMOTE(...) add(#__VA_ARGS__, Cast::promote);
#define TORCHAMP_APPEND_DTYPE(function, name, ...) add(name, Cast::fp32);
  AT_FORALL_LOWER_PRECISION_FP(TORCHAMP_LOWER)
  AT_FORALL_FP32(TORCHAMP_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TORCHAMP_FP32)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(TORCHAMP_APPEND_DTYPE)
  AT_FORALL_PROMOTE(TORCHAMP_PROMOTE)
#undef TORCHAMP_LOWER
#undef TORCHAMP_FP32
#undef TORCHAMP_PROMOTE
#undef TORCHAMP_APPEND_DTYPE
  return lists;
}

inline const RuleList& libtorch_cuda_lists() {
  static const auto& lists = *new RuleList(read_libtorch_cuda_lists());  // never destroyed
  return lists;
}

/// The rule that LibTorch's CUDA lists have for an overload; native if they have none.
inline Cast listed_rule(std::string_view full_name) {
  const ListedRule* const listed = libtorch_cuda_lists().find(full_name);
  return listed == nullptr ? Cast::native : listed->cast;
}

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

/// What LibTorch's own autocast kernel for the device, which must be there, does; native if this is
/// not known.
inline Cast kernel_rule(std::string_view full_name, at::DeviceType device) {
  if (!full_name.starts_with("aten::")) return Cast::native;
  const std::string_view base = full_name.substr(6, full_name.find('.') - 6);
  const auto has = [&](const auto& list) {
    return std::find(std::begin(list), std::end(list), base) != std::end(list);
  };
  if (facts_of(device).lists == OpLists::cuda) {
    return has(cuda_lower_precision_ops) ? Cast::lower_precision : listed_rule(full_name);
  }
  if (has(cpu_lower_precision_ops)) return Cast::lower_precision;
  if (has(cpu_fp32_ops)) return Cast::fp32;
  return has(cpu_promote_ops) ? Cast::promote : Cast::native;
}

}  // namespace torchamp::detail
