// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Core. The ops that an edit of a policy names.

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchamp/rule.h"  // IWYU pragma: export
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// A named list of op names, for the edits of a Policy: `policy.fp32(ops::norm)`. A name stands for
/// all overloads of the op. Ops in the families of torchamp::ops that the running LibTorch lacks
/// are ignored, so one list serves all versions. If your own family has an op that LibTorch lacks,
/// the edit throws.
class OpFamily {
 public:
  /// Your own family. It holds a reference to `ops`, which must outlive it.
  template <std::size_t size>
  constexpr OpFamily(std::string_view name, const std::string_view (&ops)[size])
      : name_(name), ops_(ops), size_(size) {}

  /// The name: "norm".
  constexpr std::string_view name() const { return name_; }
  /// The first op's name.
  constexpr const std::string_view* begin() const { return ops_; }
  /// Past the last op's name.
  constexpr const std::string_view* end() const { return ops_ + size_; }
  /// The number of names.
  constexpr std::size_t size() const { return size_; }

  /// Whether the names and the ops are equal.
  constexpr bool operator==(const OpFamily& other) const {
    return name_ == other.name_ && std::equal(begin(), end(), other.begin(), other.end());
  }

 private:
  std::string_view name_;
  const std::string_view* ops_;
  std::size_t size_;
};

namespace detail {

// clang-format off
inline constexpr std::string_view matmul_ops[] = {
    "mm"sv, "bmm"sv, "mv"sv, "matmul"sv, "addmm"sv, "_addmm_activation"sv, "addmv"sv, "addr"sv,
    "addbmm"sv, "baddbmm"sv, "einsum"sv, "chain_matmul"sv, "linalg_multi_dot"sv, "linalg_vecdot"sv,
    "_grouped_mm"sv};
inline constexpr std::string_view conv_ops[] = {
    "conv1d"sv, "conv2d"sv, "conv3d"sv, "conv_tbc"sv, "conv_transpose1d"sv, "conv_transpose2d"sv,
    "conv_transpose3d"sv, "convolution"sv, "_convolution"sv, "cudnn_convolution"sv,
    "cudnn_convolution_transpose"sv};
inline constexpr std::string_view linear_ops[] = {"linear"sv};
inline constexpr std::string_view dense_ops[] = {"linear"sv, "addmm"sv, "mm"sv, "matmul"sv};
inline constexpr std::string_view attention_ops[] = {
    "scaled_dot_product_attention"sv, "_scaled_dot_product_flash_attention"sv,
    "_native_multi_head_attention"sv, "_scaled_dot_product_attention_math"sv,
    "_scaled_dot_product_flash_attention_for_cpu"sv, "_scaled_dot_product_efficient_attention"sv,
    "_scaled_dot_product_cudnn_attention"sv, "_scaled_dot_product_fused_attention_overrideable"sv,
    "_efficient_attention_forward"sv, "_cudnn_attention_forward"sv};
inline constexpr std::string_view recurrent_ops[] = {
    "lstm"sv, "gru"sv, "rnn_tanh"sv, "rnn_relu"sv, "lstm_cell"sv, "gru_cell"sv, "rnn_tanh_cell"sv,
    "rnn_relu_cell"sv, "_thnn_fused_lstm_cell"sv, "_thnn_fused_gru_cell"sv, "_cudnn_rnn"sv,
    "mkldnn_rnn_layer"sv};
inline constexpr std::string_view addition_ops[] = {"add"sv, "sub"sv, "rsub"sv};
inline constexpr std::string_view reduction_ops[] = {
    "sum"sv, "nansum"sv, "mean"sv, "nanmean"sv, "prod"sv, "cumsum"sv, "cumprod"sv, "logsumexp"sv,
    "logcumsumexp"sv, "norm"sv, "linalg_norm"sv, "linalg_vector_norm"sv, "linalg_matrix_norm"sv,
    "frobenius_norm"sv, "nuclear_norm"sv, "var"sv, "std"sv, "var_mean"sv, "std_mean"sv, "trace"sv,
    "linalg__powsum"sv, "_foreach_norm"sv, "_foreach_powsum"sv};
inline constexpr std::string_view order_statistic_ops[] = {
    "max"sv, "min"sv, "amax"sv, "amin"sv, "aminmax"sv, "argmax"sv, "argmin"sv, "median"sv,
    "nanmedian"sv, "mode"sv, "kthvalue"sv, "topk"sv, "sort"sv, "argsort"sv, "msort"sv, "cummax"sv,
    "cummin"sv, "maximum"sv, "minimum"sv, "fmax"sv, "fmin"sv};
inline constexpr std::string_view norm_ops[] = {
    "layer_norm"sv, "native_layer_norm"sv, "rms_norm"sv, "group_norm"sv, "native_group_norm"sv,
    "batch_norm"sv, "native_batch_norm"sv, "cudnn_batch_norm"sv, "instance_norm"sv};
inline constexpr std::string_view softmax_ops[] = {
    "softmax"sv, "log_softmax"sv, "special_softmax"sv, "special_log_softmax"sv, "_softmax"sv,
    "_log_softmax"sv, "_safe_softmax"sv};
inline constexpr std::string_view loss_ops[] = {
    "mse_loss"sv, "l1_loss"sv, "smooth_l1_loss"sv, "huber_loss"sv, "nll_loss"sv, "nll_loss2d"sv,
    "nll_loss_nd"sv, "cross_entropy_loss"sv, "binary_cross_entropy"sv,
    "binary_cross_entropy_with_logits"sv, "kl_div"sv, "poisson_nll_loss"sv, "ctc_loss"sv,
    "cosine_embedding_loss"sv, "hinge_embedding_loss"sv, "margin_ranking_loss"sv,
    "multi_margin_loss"sv, "multilabel_margin_loss"sv, "soft_margin_loss"sv,
    "triplet_margin_loss"sv};
inline constexpr std::string_view pointwise_ops[] = {
    "acos"sv, "asin"sv, "cosh"sv, "erfinv"sv, "exp"sv, "expm1"sv, "log"sv, "log10"sv, "log1p"sv,
    "log2"sv, "pow"sv, "reciprocal"sv, "rsqrt"sv, "sinh"sv, "softplus"sv, "tan"sv};
inline constexpr std::string_view distance_ops[] = {
    "cdist"sv, "pdist"sv, "dist"sv, "cosine_similarity"sv, "renorm"sv};
inline constexpr std::string_view interpolation_ops[] = {
    "upsample_nearest1d"sv, "_upsample_nearest_exact1d"sv, "upsample_nearest2d"sv,
    "_upsample_nearest_exact2d"sv, "upsample_nearest3d"sv, "_upsample_nearest_exact3d"sv,
    "upsample_linear1d"sv, "upsample_bilinear2d"sv, "_upsample_bilinear2d_aa"sv,
    "upsample_trilinear3d"sv, "upsample_bicubic2d"sv, "_upsample_bicubic2d_aa"sv, "grid_sampler"sv};
// clang-format on

/// The concepts of <ranges> check the same and take ten times as long to compile.
template <class Names>
concept is_range_of_names = requires(Names& names) {
  std::string_view(*std::begin(names));
  std::begin(names) != std::end(names);
};

}  // namespace detail

/// The families of ops in the standard table, and further families for edits. Ops call other ops
/// (`linear` calls `addmm`), and only the outermost op on a list is cast. So a rule for `addmm`
/// alone does not affect `linear`: edit the family. In C++ torch::nn::Linear calls `addmm` or
/// `matmul`, not `linear`: edit ops::matmul and ops::linear, or ops::dense.
namespace ops {

/// Matrix products and ops composed of them: `mm`, `matmul`, `einsum`, …
inline constexpr OpFamily matmul{"matmul", detail::matmul_ops};
/// Convolutions and transposed convolutions.
inline constexpr OpFamily conv{"conv", detail::conv_ops};
/// `linear`, which scripts and torch::linear call; not torch::nn::Linear.
inline constexpr OpFamily linear{"linear", detail::linear_ops};
/// Products with a matrix, which can be in fp8: `linear`, `addmm`, `mm`, `matmul`.
/// torch::nn::Linear calls ops of this family only. Each op is also in another family.
inline constexpr OpFamily dense{"dense", detail::dense_ops};
/// Scaled dot-product and multi-head attention.
inline constexpr OpFamily attention{"attention", detail::attention_ops};
/// LSTMs, GRUs and RNNs, and their cells.
inline constexpr OpFamily recurrent{"recurrent", detail::recurrent_ops};
/// `add`, `sub` and `rsub`.
inline constexpr OpFamily addition{"addition", detail::addition_ops};
/// Reductions that accumulate: sums, means, products, norms, variances.
inline constexpr OpFamily reduction{"reduction", detail::reduction_ops};
/// Ops that select values, which is exact in any dtype: `max`, `topk`, `sort`, …
inline constexpr OpFamily order_statistic{"order_statistic", detail::order_statistic_ops};
/// Normalisation layers.
inline constexpr OpFamily norm{"norm", detail::norm_ops};
/// `softmax` and `log_softmax`.
inline constexpr OpFamily softmax{"softmax", detail::softmax_ops};
/// Losses.
inline constexpr OpFamily loss{"loss", detail::loss_ops};
/// Pointwise functions whose range or precision exceeds 16 bits: `exp`, `log`, `pow`, …
inline constexpr OpFamily pointwise{"pointwise", detail::pointwise_ops};
/// Distances and similarities.
inline constexpr OpFamily distance{"distance", detail::distance_ops};
/// Upsampling and grid sampling.
inline constexpr OpFamily interpolation{"interpolation", detail::interpolation_ops};

/// All families, in the order of declaration.
inline constexpr OpFamily families[] = {
    matmul,          conv, linear,  dense, attention, recurrent, addition,     reduction,
    order_statistic, norm, softmax, loss,  pointwise, distance,  interpolation};

}  // namespace ops

/// The ops that an edit of a Policy names. Pass one name, a `{…}` list or any range of names, or a
/// family (of torchamp::ops, or your own). A name is "softmax" (all overloads), "softmax.int" or
/// "mylib::op".
class OpNames {
 public:
  // Implicit, so that edits read as `policy.fp32({"pow", "exp"})` and `policy.fp32(ops::norm)`.
  /// One op.
  OpNames(const char* name) : names_{name} {}
  /// One op.
  OpNames(std::string_view name) : names_{std::string(name)} {}
  /// One op.
  OpNames(std::string name) : names_{std::move(name)} {}
  /// Several ops: `{"pow", "exp"}`.
  OpNames(std::initializer_list<std::string_view> names) : names_(names.begin(), names.end()) {}
  /// All ops of a family.
  OpNames(const OpFamily& family) : names_(family.begin(), family.end()) {
    for (const OpFamily& ours : ops::families) {
      if (ours == family) family_ = ours.name();
    }
  }
  /// Any range of names.
  template <class Names>
  requires(detail::is_range_of_names<Names> && !std::is_convertible_v<Names, std::string_view> &&
           !std::is_same_v<std::remove_cvref_t<Names>, OpFamily> &&
           !std::is_same_v<std::remove_cvref_t<Names>, OpNames>) OpNames(Names&& names) {
    for (auto&& name : names) names_.emplace_back(std::string_view(name));
  }

  /// The first name.
  auto begin() const { return names_.begin(); }
  /// Past the last name.
  auto end() const { return names_.end(); }
  /// The name of the family of torchamp::ops with these ops; empty if there is none.
  std::string_view family() const { return family_; }

 private:
  std::vector<std::string> names_;
  std::string_view family_;
};

}  // namespace TORCHAMP_NAMESPACE
