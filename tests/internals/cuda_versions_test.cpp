// SPDX-License-Identifier: BSD-3-Clause
#include "torchamp/detail/extras/shared/cuda_versions.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"

using torchamp::detail::check_cuda_headers;
using torchamp::detail::check_nccl_headers;

TEST(CudaVersions, OfOneMajorVersionFitButForGraphsBefore12Point4) {
  EXPECT_NO_THROW(check_cuda_headers(13000, 13020));
  EXPECT_NO_THROW(check_cuda_headers(12040, 12080));
  EXPECT_NO_THROW(check_cuda_headers(12010, 12030));
  EXPECT_ERROR(check_cuda_headers(12000, 12080),
               "this program was compiled with the headers of "
               "CUDA 12.0, LibTorch with the headers of CUDA 12.8");
  EXPECT_ERROR(check_cuda_headers(11080, 13020), "Compile it with the headers of CUDA 13.2.");
}

TEST(NcclVersions, OfOneMinorVersionFit) {
  const auto version = [](uint64_t major, uint64_t minor, uint64_t patch) {
    return major << 32 | minor << 16 | patch;
  };
  EXPECT_NO_THROW(check_nccl_headers(version(2, 28, 3), version(2, 28, 9)));
  EXPECT_ERROR(check_nccl_headers(version(2, 28, 9), version(2, 30, 7)),
               "add_nccl: this program was compiled with the headers of NCCL 2.28.9, LibTorch with "
               "the headers of NCCL 2.30.7");
  EXPECT_ERROR(check_nccl_headers(version(1, 30, 7), version(2, 30, 7)), "NCCL 1.30.7");
}
