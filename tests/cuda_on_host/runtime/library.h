// SPDX-License-Identifier: BSD-3-Clause
// What the stand-ins of cuBLAS and cuDNN share.
#pragma once

#include <cuda_runtime_api.h>

namespace stand_in {

/// What a library's handle points to.
struct Library {
  cudaStream_t stream = nullptr;
};

}  // namespace stand_in
