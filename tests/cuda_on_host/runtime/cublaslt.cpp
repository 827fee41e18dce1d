// SPDX-License-Identifier: BSD-3-Clause
// cuBLASLt: products described by attributes. Those in fp8 must be what cuBLASLt's manual asks for.
#include <cublasLt.h>

#include <cstring>
#include <map>
#include <vector>

#include "cuda_on_host/stand_in.h"

namespace {

/// A descriptor, a layout or a preference.
struct Description {
  cudaDataType type = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  uint64_t rows = 0, columns = 0;
  int64_t stride = 0;
  std::map<int, std::vector<char>> attributes = {};

  void set(int attribute, const void* value, size_t size) {
    const char* const bytes = static_cast<const char*>(value);
    attributes[attribute].assign(bytes, bytes + size);
  }
  cublasOperation_t operation(int attribute) const {
    const auto found = attributes.find(attribute);
    int value = CUBLAS_OP_N;
    if (found != attributes.end()) std::memcpy(&value, found->second.data(), sizeof value);
    return static_cast<cublasOperation_t>(value);
  }
};

template <class Handle>
Description& get(Handle handle) {
  return *reinterpret_cast<Description*>(handle);
}

template <class Handle>
cublasStatus_t make(Handle* handle, Description description) {
  *handle = reinterpret_cast<Handle>(new Description(std::move(description)));
  return CUBLAS_STATUS_SUCCESS;
}

template <class Handle>
cublasStatus_t destroy(Handle handle) {
  delete &get(handle);
  return CUBLAS_STATUS_SUCCESS;
}

bool is_fp8(const Description& matrix) {
  return matrix.type == CUDA_R_8F_E4M3 || matrix.type == CUDA_R_8F_E5M2;
}

/// Both operands in fp8 but not both in e5m2, the first transposed and the second not, summed in
/// fp32, sizes and strides in multiples of 16 bytes.
bool fp8_is_valid(const Description& product, const Description& a, const Description& b,
                  const Description& c) {
  if (!is_fp8(a) || !is_fp8(b)) return false;
  if (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2) return false;
  if (product.compute != CUBLAS_COMPUTE_32F) return false;
  if (product.operation(CUBLASLT_MATMUL_DESC_TRANSA) != CUBLAS_OP_T) return false;
  if (product.operation(CUBLASLT_MATMUL_DESC_TRANSB) != CUBLAS_OP_N) return false;
  for (const uint64_t size : {a.rows, a.columns, c.rows}) {
    if (size % 16 != 0) return false;
  }
  return a.stride % 16 == 0 && b.stride % 16 == 0;
}

cublasStatus_t check(cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                     cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c) {
  const bool any_fp8 = is_fp8(get(a)) || is_fp8(get(b));
  return !any_fp8 || fp8_is_valid(get(product), get(a), get(b), get(c))
             ? CUBLAS_STATUS_SUCCESS
             : CUBLAS_STATUS_NOT_SUPPORTED;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return make(handle, {});
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return destroy(handle);
}
size_t cublasLtGetVersion() {
  return CUBLAS_VERSION;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* handle, cublasComputeType_t compute,
                                        cudaDataType_t type) {
  return make(handle, {.type = type, .compute = compute});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) {
  return destroy(handle);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  get(handle).set(attribute, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* handle, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t stride) {
  return make(handle, {.type = type, .rows = rows, .columns = columns, .stride = stride});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) {
  return destroy(handle);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t size) {
  get(handle).set(attribute, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* handle) {
  return make(handle, {});
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) {
  return destroy(handle);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t size) {
  get(handle).set(attribute, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
  *found = 0;
  if (const cublasStatus_t status = check(product, a, b, c)) return status;
  if (wanted < 1) return CUBLAS_STATUS_SUCCESS;
  *results = {};
  results->state = CUBLAS_STATUS_SUCCESS;
  results->wavesCount = 1;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void*,
                              const void*, cublasLtMatrixLayout_t a, const void*,
                              cublasLtMatrixLayout_t b, const void*, const void*,
                              cublasLtMatrixLayout_t c, void*, cublasLtMatrixLayout_t,
                              const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  if (const cublasStatus_t status = check(product, a, b, c)) return status;
  const char* const name = is_fp8(get(a)) ? "cublasLtMatmul in fp8" : "cublasLtMatmul";
  return stand_in_launch(name, stream) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
}
