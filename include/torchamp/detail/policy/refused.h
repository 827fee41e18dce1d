// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string_view>

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

}  // namespace torchamp::detail
