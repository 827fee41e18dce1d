// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE::detail {

// Note [Headers of CUDA and NCCL]
// Some LibTorch classes have members that depend on the version of CUDA's or NCCL's headers. If a
// program is compiled with other headers than LibTorch, such objects have another size than
// LibTorch's functions assume, and adjacent memory is overwritten.

/// Throws if a program compiled with CUDA's headers of version `headers` must not share a graph
/// with a LibTorch compiled with the headers of version `library`. Both have the form of
/// CUDART_VERSION.
inline void check_cuda_headers(int64_t headers, int64_t library) {
  const auto text = [](int64_t version) {
    return c10::str(version / 1000, '.', version % 1000 / 10);
  };
  // LibTorch's CUDAGraph grew with this version.
  const auto grew = [](int64_t version) { return version >= 12040; };
  TORCH_CHECK(headers / 1000 == library / 1000 && grew(headers) == grew(library),
              "CudaGraph: this program was compiled with the headers of CUDA ", text(headers),
              ", LibTorch with the headers of CUDA ", text(library),
              ", whose objects differ in size. Compile it with the headers of CUDA ", text(library),
              '.');
}

/// Throws if a program compiled with NCCL's headers of version `headers` must not share a process
/// group with a LibTorch compiled with the headers of version `library`. Both have the form of
/// torch::cuda::nccl::version().
inline void check_nccl_headers(uint64_t headers, uint64_t library) {
  const auto text = [](uint64_t version) {
    return c10::str(version >> 32, '.', version >> 16 & 0xffff, '.', version & 0xffff);
  };
  TORCH_CHECK(headers >> 16 == library >> 16,
              "add_nccl: this program was compiled with the headers of NCCL ", text(headers),
              ", LibTorch with the headers of NCCL ", text(library),
              ", whose objects differ in size. Compile it with the nccl.h of NCCL ", text(library),
              ", which comes with the wheel nvidia-nccl.");
}

}  // namespace TORCHAMP_NAMESPACE::detail
