// SPDX-License-Identifier: BSD-3-Clause
// cuDNN by its older functions: descriptors that remember what LibTorch asks them for. Its graph
// API is left out; process.cpp says so to LibTorch. Recurrent layers are in cudnn_rnn.cpp.
#include <cudnn.h>

#include <algorithm>
#include <vector>

#include "cuda_on_host/stand_in.h"
#include "library.h"

namespace {

/// A tensor's or a filter's descriptor.
struct Shape {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::vector<int> sizes, strides;
};
struct Nothing {};

template <class As, class Handle>
As& get(Handle handle) {
  return *reinterpret_cast<As*>(const_cast<void*>(static_cast<const void*>(handle)));
}

template <class As, class Handle>
cudnnStatus_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(new As());
  return CUDNN_STATUS_SUCCESS;
}

void copy_out(const std::vector<int>& values, int wanted, int* result) {
  std::copy_n(values.begin(), std::min<std::size_t>(values.size(), static_cast<unsigned>(wanted)),
              result);
}

template <class Result, class Algorithm>
cudnnStatus_t choose(Result* results, int* found, Algorithm algorithm) {
  *results = {};
  results->algo = algorithm;
  results->mathType = CUDNN_TENSOR_OP_MATH;
  results->determinism = CUDNN_DETERMINISTIC;
  *found = 1;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t no_workspace(size_t* size) {
  *size = 0;
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  if (stand_in_unsafe("cudnnCreate")) return CUDNN_STATUS_NOT_INITIALIZED;
  return make<stand_in::Library>(handle);
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete &get<stand_in::Library>(handle);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  get<stand_in::Library>(handle).stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = get<stand_in::Library>(handle).stream;
  return CUDNN_STATUS_SUCCESS;
}
size_t cudnnGetVersion() {
  return CUDNN_VERSION;
}
cudnnStatus_t cudnnGetProperty(libraryPropertyType property, int* value) {
  *value = property == MAJOR_VERSION   ? CUDNN_MAJOR
           : property == MINOR_VERSION ? CUDNN_MINOR
                                       : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}
size_t cudnnGetCudartVersion() {
  return CUDART_VERSION;
}
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "an error of the stand-in";
}
void cudnnGetLastErrorString(char* text, size_t size) {
  if (size > 0) *text = '\0';
}

// ---- Descriptors -------------------------------------------------------------------------------

#define DESCRIPTOR(Name, As)                                                       \
  cudnnStatus_t cudnnCreate##Name##Descriptor(cudnn##Name##Descriptor_t* handle) { \
    return make<As>(handle);                                                       \
  }                                                                                \
  cudnnStatus_t cudnnDestroy##Name##Descriptor(cudnn##Name##Descriptor_t handle) { \
    delete &get<As>(handle);                                                       \
    return CUDNN_STATUS_SUCCESS;                                                   \
  }
DESCRIPTOR(Tensor, Shape)
DESCRIPTOR(Filter, Shape)
DESCRIPTOR(Convolution, Nothing)
DESCRIPTOR(Activation, Nothing)
DESCRIPTOR(Dropout, Nothing)
DESCRIPTOR(RNNData, Nothing)
#undef DESCRIPTOR

cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t handle, cudnnDataType_t type,
                                         int dimensions, const int* sizes, const int* strides) {
  get<Shape>(handle) = {type, {sizes, sizes + dimensions}, {strides, strides + dimensions}};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t handle, int wanted,
                                         cudnnDataType_t* type, int* dimensions, int* sizes,
                                         int* strides) {
  const Shape& shape = get<Shape>(handle);
  *type = shape.type;
  *dimensions = static_cast<int>(shape.sizes.size());
  copy_out(shape.sizes, wanted, sizes);
  copy_out(shape.strides, wanted, strides);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetFilterNdDescriptor(cudnnFilterDescriptor_t handle, cudnnDataType_t type,
                                         cudnnTensorFormat_t, int dimensions, const int* sizes) {
  get<Shape>(handle) = {type, {sizes, sizes + dimensions}, {}};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetFilterNdDescriptor(const cudnnFilterDescriptor_t handle, int wanted,
                                         cudnnDataType_t* type, cudnnTensorFormat_t* format,
                                         int* dimensions, int* sizes) {
  const Shape& shape = get<Shape>(handle);
  *type = shape.type;
  *format = CUDNN_TENSOR_NCHW;
  *dimensions = static_cast<int>(shape.sizes.size());
  copy_out(shape.sizes, wanted, sizes);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionNdDescriptor(cudnnConvolutionDescriptor_t, int, const int*,
                                              const int*, const int*, cudnnConvolutionMode_t,
                                              cudnnDataType_t) {
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t, int) {
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t, cudnnMathType_t) {
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetActivationDescriptor(cudnnActivationDescriptor_t, cudnnActivationMode_t,
                                           cudnnNanPropagation_t, double) {
  return CUDNN_STATUS_SUCCESS;
}

// ---- What convolutions and batch norms ask for first -------------------------------------------

cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(cudnnHandle_t, const cudnnTensorDescriptor_t,
                                                     const cudnnFilterDescriptor_t,
                                                     const cudnnConvolutionDescriptor_t,
                                                     const cudnnTensorDescriptor_t, const int,
                                                     int* found,
                                                     cudnnConvolutionFwdAlgoPerf_t* results) {
  return choose(results, found, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM);
}
cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(
    cudnnHandle_t, const cudnnFilterDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnConvolutionDescriptor_t, const cudnnTensorDescriptor_t, const int, int* found,
    cudnnConvolutionBwdDataAlgoPerf_t* results) {
  return choose(results, found, CUDNN_CONVOLUTION_BWD_DATA_ALGO_1);
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    cudnnHandle_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnConvolutionDescriptor_t, const cudnnFilterDescriptor_t, const int, int* found,
    cudnnConvolutionBwdFilterAlgoPerf_t* results) {
  return choose(results, found, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1);
}
cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t, const cudnnTensorDescriptor_t,
                                                      const cudnnFilterDescriptor_t,
                                                      const cudnnConvolutionDescriptor_t,
                                                      const cudnnTensorDescriptor_t,
                                                      cudnnConvolutionFwdAlgo_t, size_t* size) {
  return no_workspace(size);
}
cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(
    cudnnHandle_t, const cudnnFilterDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnConvolutionDescriptor_t, const cudnnTensorDescriptor_t,
    cudnnConvolutionBwdDataAlgo_t, size_t* size) {
  return no_workspace(size);
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(
    cudnnHandle_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnConvolutionDescriptor_t, const cudnnFilterDescriptor_t,
    cudnnConvolutionBwdFilterAlgo_t, size_t* size) {
  return no_workspace(size);
}
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* size) {
  return no_workspace(size);
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t,
    size_t* size) {
  return no_workspace(size);
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t,
    const cudnnTensorDescriptor_t, size_t* size) {
  return no_workspace(size);
}
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* size) {
  *size = 1 << 16;
  return CUDNN_STATUS_SUCCESS;
}
}
