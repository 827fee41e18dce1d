// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// @file
/// @brief Extra. add_nccl: NCCL for the CUDA tensors of a process group.

// Not in the umbrella header: it needs the headers of CUDA and NCCL, and LibTorch's CUDA libraries.
#if !__has_include(<torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>)
#error "torchamp/distributed/nccl.h: this LibTorch was built without its distributed part (c10d)."
#elif !__has_include(<cuda_runtime_api.h>)
#error \
    "torchamp/distributed/nccl.h needs the headers of CUDA. Install a CUDA toolkit and add its include folder to the include path."
#elif !__has_include(<nccl.h>)
#error \
    "torchamp/distributed/nccl.h needs nccl.h. Install NCCL's development package, or add the include folder of the wheel nvidia-nccl to the include path."
#endif

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>

#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#else  // LibTorch has NCCL, but defines this only for its own files
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#undef USE_C10D_NCCL
#endif
#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torchamp/detail/extras/shared/cuda_versions.h"
#include "torchamp/version.h"

namespace TORCHAMP_NAMESPACE {

/// Makes `group`, a result of make_process_group(), use NCCL instead of Gloo for CUDA tensors. All
/// processes of the group call it. Before the call, each process must make the device of its
/// LOCAL_RANK current. Errors: no CUDA device; a program compiled with another NCCL than
/// LibTorch's.
///
/// The host does not wait for NCCL, so it gets no error from NCCL. If a process dies or delays the
/// others for longer than `timeout`, LibTorch's watchdog ends the waiting processes. With
/// TORCH_NCCL_BLOCKING_WAIT=1 in the environment the host waits at each call and gets a c10::Error.
inline void add_nccl(c10d::ProcessGroup& group,
                     std::chrono::milliseconds timeout = std::chrono::minutes(10)) {
  TORCH_CHECK(at::hasCUDA(),
              "add_nccl: this LibTorch sees no CUDA device. Leave the call out; the "
              "group has Gloo for CPU tensors.");
  constexpr uint64_t nccl_of_headers =
      (uint64_t{NCCL_MAJOR} << 32) | (uint64_t{NCCL_MINOR} << 16) | uint64_t{NCCL_PATCH};
  detail::check_nccl_headers(nccl_of_headers, torch::cuda::nccl::version());
  const auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  group.setBackend(at::kCUDA, c10d::ProcessGroup::BackendType::NCCL,
                   c10::make_intrusive<c10d::ProcessGroupNCCL>(
                       c10::make_intrusive<c10d::PrefixStore>("nccl", group.getStore()),
                       group.getRank(), group.getSize(), options));
}

}  // namespace TORCHAMP_NAMESPACE
