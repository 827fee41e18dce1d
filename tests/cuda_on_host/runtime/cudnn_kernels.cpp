// SPDX-License-Identifier: BSD-3-Clause
// The functions of cuDNN that launch kernels. Whatever else they are given, the first argument is
// the handle; cudnn.h, which declares the rest, is therefore not included.
#include "cuda_on_host/stand_in.h"
#include "library.h"

#define KERNEL_OF(name, handle)          \
  constexpr int execution_failed = 5000; \
  return stand_in_launch(#name, (handle)->stream) ? execution_failed : 0;
#define KERNEL(name)                                     \
  extern "C" int name(const stand_in::Library* handle) { \
    KERNEL_OF(name, handle)                              \
  }

KERNEL(cudnnConvolutionForward)
KERNEL(cudnnConvolutionBackwardData)
KERNEL(cudnnConvolutionBackwardFilter)
KERNEL(cudnnConvolutionBiasActivationForward)
KERNEL(cudnnBatchNormalizationForwardTrainingEx)
KERNEL(cudnnBatchNormalizationForwardInference)
KERNEL(cudnnBatchNormalizationBackwardEx)
KERNEL(cudnnRNNForward)
KERNEL(cudnnRNNBackwardData_v8)
KERNEL(cudnnRNNBackwardWeights_v8)

extern "C" int cudnnSetDropoutDescriptor(void*, const stand_in::Library* handle) {
  KERNEL_OF(cudnnSetDropoutDescriptor, handle)
}
