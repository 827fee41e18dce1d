// SPDX-License-Identifier: BSD-3-Clause
// The functions of cuBLAS that LibTorch's products call. Whatever else they are given, the first
// argument is the handle; cublas_v2.h, which declares the rest, is therefore not included.
#include "cuda_on_host/stand_in.h"
#include "library.h"

#define KERNEL(name)                                                      \
  extern "C" int name(const stand_in::Library* handle) {                  \
    constexpr int execution_failed = 13;                                  \
    return stand_in_launch(#name, handle->stream) ? execution_failed : 0; \
  }

KERNEL(cublasSgemm_v2)
KERNEL(cublasDgemm_v2)
KERNEL(cublasCgemm_v2)
KERNEL(cublasZgemm_v2)
KERNEL(cublasSgemmEx)
KERNEL(cublasGemmEx)
KERNEL(cublasSgemmBatched)
KERNEL(cublasDgemmBatched)
KERNEL(cublasSgemmStridedBatched)
KERNEL(cublasDgemmStridedBatched)
KERNEL(cublasCgemmStridedBatched)
KERNEL(cublasZgemmStridedBatched)
KERNEL(cublasGemmStridedBatchedEx)
KERNEL(cublasSgemv_v2)
KERNEL(cublasDgemv_v2)
KERNEL(cublasSdot_v2)
KERNEL(cublasDdot_v2)
KERNEL(cublasDotEx)
KERNEL(cublasSger_v2)
KERNEL(cublasDger_v2)
KERNEL(cublasStrsm_v2)
KERNEL(cublasDtrsm_v2)
KERNEL(cublasStrsmBatched)
KERNEL(cublasDtrsmBatched)
